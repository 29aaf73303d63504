"""Stage "attention": trains each layer against the softmax attention of that layer.

The inputs of every layer come from the softmax path. Layers therefore learn
independently, and one that fails does not harm the next. The loss of a head is the
relative squared error of its outputs plus the divergence of its attention rows. "The
Hedgehog & the Porcupine" (Zhang et al., 2024) compares rows; "LoLCATs" (Zhang et al.,
2024) compares both.
"""

import keras
from keras import ops

from keras_rfattn.backend import with_gradient
from keras_rfattn.layers.attend import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.ops import Softmax
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.rows import feature_rows, kernel_rows, nearby

MAX_ROWS = 512
TINY = 1e-9
QUANTITIES = ("squared", "norm", "mean_of_v", "divergence", "rows")


class AttentionStage(keras.Model):
    """Trains maps, queries and keys by comparing the outputs of attention layers.

    Args:
        teacher: `Teacher` of a model with linear attention.
        layers: The linear attention layers that learn.
        below: Layers that pass on their linear output, which the learning layers then
            receive. Empty if all layers learn side by side.
        window_dropout: Share of sequences for which a layer leaves its window out.
    """

    def __init__(self, teacher, layers, below=(), window_dropout=0.0):
        super().__init__(dtype="float32", name="attention_stage")
        self.teacher, self.model = teacher, teacher.model
        self.first_values = list(teacher.copies.values())
        self.learning, self.below = list(layers), list(below)
        known = {id(x) for x in (*layers, *below)}
        self.others = [x for x in teacher.layers if id(x) not in known]
        self.window_dropout = window_dropout
        self.error = keras.metrics.Mean("error")
        self.mean_of_v = keras.metrics.Mean("mean_of_v")
        self.zero = keras.metrics.Mean("zero")
        self.built = True

    def call(self, inputs):
        """Returns errors of L layers with up to N heads, summed over the batch.

        Args:
            inputs: Dict with the model's inputs "x" and with "noise" `(B, count)` in
                [0, 1), which selects windows to leave out and rows to compare.

        Returns:
            Dict with an array `(1, L, N)` for each of `QUANTITIES`, and with "loss",
            `(1, L)`.
        """
        x, noise = inputs["x"], inputs["noise"]
        watchers = [Watcher() for _ in self.learning]
        recorders = [
            *zip(self.learning, watchers, strict=True),
            *((layer, Attention.softmax) for layer in self.others),
        ]
        with self.teacher.weights(live=self.below), recording(recorders):
            self.model(x, training=False)
        found = []
        for i, (layer, watcher) in enumerate(zip(self.learning, watchers, strict=True)):
            students = watcher.calls
            if self.teacher.trains(layer):
                students = watcher.replayed(layer)
            dropped = noise[:, i] < self.window_dropout
            calls = list(zip(watcher.calls, students, strict=True))
            found.append(_compared(layer, calls, dropped, noise[0, -1]))
        losses, sums = zip(*found, strict=True)
        heads = max(x["norm"].shape[-1] for x in sums)
        stacked = {k: ops.stack([_widened(x[k], heads) for x in sums], 1)
                   for k in QUANTITIES}  # fmt: skip
        return stacked | {"loss": ops.stack(losses)[None]}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None,
                     training=True):  # fmt: skip
        error, _, mean_of_v, heads = relative(y_pred)
        count = ops.maximum(ops.sum(heads), 1)
        self.error.update_state(ops.sum(error) / count)
        self.mean_of_v.update_state(ops.sum(mean_of_v) / count)
        self.zero.update_state(1.0)
        return ops.sum(y_pred["loss"]) / count


class Watcher:
    """A recorder that stores a layer's calls and answers them with softmax attention.

    Attributes:
        calls: List of `Attention`, the calls of the layer.
        arguments: List of `(args, kwargs)` that the layer was called with.
    """

    def __init__(self):
        self.calls, self.arguments = [], []

    def __call__(self, call):
        self.calls.append(call)
        return call.softmax()

    def replayed(self, layer):
        """Returns the same calls, computed with the current weights of the layer."""
        calls = []

        def catch(call):
            calls.append(call)
            return call.zero()

        with recording([(layer, catch)]):
            for args, kwargs in self.arguments:
                layer(*args, **kwargs)
        return calls


def relative(sums):
    """Computes relative errors of L layers with N heads from sums over batches.

    Args:
        sums: Dict with an array `(rows, L, N)` for each of `QUANTITIES`.

    Returns:
        Tuple of four arrays `(L, N)`: relative squared error of outputs, mean
        divergence of attention rows, relative squared error of uniform attention, and
        1 for heads that were measured, else 0.
    """
    total = {key: ops.sum(ops.cast(x, "float32"), axis=0) for key, x in sums.items()}
    norm = ops.maximum(total["norm"], TINY)
    heads = ops.cast(total["norm"] > 0, "float32")
    return (
        total["squared"] / norm,
        total["divergence"] / ops.maximum(total["rows"], 1),
        total["mean_of_v"] / norm,
        heads,
    )


def _compared(layer, calls, dropped, offset):
    """Returns the loss of a layer in a batch and a dict of `QUANTITIES`, `(1, N)`.

    The sums run over rows here, because each layer may reshape the batch into a
    different number of rows.
    """
    if not calls:
        heads = layer._kv_shape()[0]
        return ops.zeros(()), {k: ops.zeros((1, heads)) for k in QUANTITIES}

    def compared(*tensors):
        sums, tensors = {k: 0 for k in QUANTITIES}, iter(tensors)
        for teacher, student in calls:
            live = dict(zip(("query", "key", "value"), tensors, strict=False))
            found = layer_errors(teacher, student.replace(**live), dropped, offset)
            for k, x in found.items():
                sums[k] = sums[k] + ops.sum(x, axis=0, keepdims=True)
        error, divergence, _, _ = relative(sums)
        return ops.sum(error + divergence), *(sums[k] for k in QUANTITIES)

    tensors = [y for _, x in calls for y in (x.query, x.key, x.value)]
    loss, *sums = with_gradient(compared, layer.feature_map.variables, tensors)
    return loss, dict(zip(QUANTITIES, sums, strict=True))


def layer_errors(teacher, student, dropped, offset):
    """Measures how far linear attention is from softmax attention.

    Args:
        teacher: `layers.attend.Attention` with the queries, keys and values of the
            softmax model.
        student: `layers.attend.Attention` with those of the linear model.
        dropped: Booleans `(B,)`, true for sequences whose window is left out.
        offset: Number in [0, 1) that selects which rows are compared if the sequence
            has more than `MAX_ROWS` of them.

    Returns:
        Dict of arrays `(B, N)`, sums over the compared rows: squared error of outputs,
        squared norm of the softmax outputs, squared error of uniform attention (the
        mean of the visible values), Kullback-Leibler divergence of attention rows (0
        for maps that are not positive), and number of rows. All are 0 for heads that
        stay softmax.
    """
    query, key = teacher.scaled()
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    groups, dtype = num_heads // num_kv_heads, key.dtype
    rows, taken = _sampled_rows(query, offset)
    visible, real = _visible(teacher, rows, groups)
    query = taken(query) * teacher.logit_scale
    wanted = kernel_rows(Softmax(), query, key, visible)
    given = _student_rows(student, rows, taken, visible, dropped)

    values = split_heads(ops.cast(teacher.value, dtype), num_kv_heads)
    own = split_heads(ops.cast(student.value, dtype), num_kv_heads)
    output = ops.matmul(wanted, values)
    mean = split_heads(_mean(ops.cast(teacher.value, dtype), visible), num_kv_heads)

    def squares(x):
        return per_head(ops.sum(ops.square(x), axis=-1))

    def per_head(x):
        x = ops.where(real[..., 0], x, 0)
        shape = ops.shape(x)[0], num_kv_heads, -1, groups
        return ops.reshape(ops.sum(ops.reshape(x, shape), axis=2), (-1, num_heads))

    divergence = ops.zeros_like(wanted[..., 0])
    if student.feature_map.is_positive:
        ratio = ops.log(wanted + TINY) - ops.log(given + TINY)
        divergence = ops.sum(ops.where(visible, wanted * ratio, 0), axis=-1)
    found = {
        "squared": squares(output - ops.matmul(given, own)),
        "norm": squares(output),
        "mean_of_v": squares(output - mean),
        "divergence": per_head(divergence),
        "rows": per_head(ops.ones_like(divergence)),
    }
    kept = student.options.softmax_heads
    if kept:
        # These heads learn nothing and must not enter the means.
        learns = ops.convert_to_tensor([x not in kept for x in range(num_heads)])
        found = {k: ops.where(learns, x, 0) for k, x in found.items()}
    return found


def _sampled_rows(query, offset):
    """Returns positions of the compared queries, and a function that selects them."""
    length = query.shape[1]
    if length is None or length <= MAX_ROWS:
        return ops.arange(ops.shape(query)[1], dtype="int32"), lambda x: x
    start = ops.cast(ops.cast(offset, "float32") * length, "int32")
    rows = (ops.arange(MAX_ROWS, dtype="int32") * length) // MAX_ROWS
    rows = (rows + start) % length
    return rows, lambda x: ops.take(x, rows, axis=1)


def _visible(call, rows, groups):
    """Returns which keys each row sees, `(B, 1, R · G, S)`, and which rows are real."""
    length, batch = ops.shape(call.key)[1], ops.shape(call.key)[0]
    visible = ops.ones((batch, 1, 1, length), dtype="bool")
    if call.mask.key_mask is not None:
        visible = ops.cast(call.mask.key_mask, "bool")[:, None, None]
    rows = ops.repeat(rows, groups)
    if call.mask.causal:
        keys = ops.arange(length, dtype="int32")
        past = (rows[:, None] >= keys[None])[None, None]
        if call.mask.prefix_mask is not None:
            past = past | ops.cast(call.mask.prefix_mask, "bool")[:, None, None]
        visible = visible & past
    real = ops.any(visible, axis=-1, keepdims=True)
    if call.query_mask is not None:
        mask = ops.take(ops.cast(call.query_mask, "bool"), rows, axis=1)
        real = real & mask[:, None, :, None]
    return visible, real | ops.zeros((batch, 1, ops.shape(rows)[0], 1), dtype="bool")


def _mean(value, visible):
    """Returns the mean of the values each row sees, `(B, R · G, K, V)`."""
    shape = ops.shape(value)
    seen = ops.cast(visible[:, 0], value.dtype)
    total = ops.matmul(seen, ops.reshape(value, (shape[0], shape[1], -1)))
    mean = total / ops.maximum(ops.sum(seen, axis=-1, keepdims=True), 1)
    return ops.reshape(mean, (shape[0], -1, *shape[2:]))


def _student_rows(call, rows, taken, visible, dropped):
    query, key, stats = call.prepared()
    feature_map, options, mask = call.feature_map, call.options, call.mask
    if feature_map.is_exact:
        return kernel_rows(feature_map.exact_kernel, taken(query), key, visible)
    local = None
    if options.window is not None:
        batch, given = ops.shape(key)[0], ops.shape(dropped)[0]
        if not isinstance(batch, int) or batch != given:
            dropped = ops.repeat(dropped, batch // given)
        near = nearby(
            mask.key_mask, rows, ops.shape(key)[1], options.window, options.sliding,
            mask.causal,
        ) & ~dropped[:, None, None]  # fmt: skip
        near = ops.repeat(near, query.shape[2] // key.shape[2], axis=1)[:, None]
        local = feature_map.exact_kernel, taken(query), key, near
    return feature_rows(
        feature_map.query_features(taken(query), stats),
        feature_map.key_features(key, stats),
        visible, mask.key_mask, local,
    )  # fmt: skip


def _widened(x, heads):
    """Pads an array `(B, N)` with zeros up to the largest number of heads."""
    return ops.pad(x, ((0, 0), (0, heads - x.shape[-1])))
