"""Stage "attention": trains each layer against the softmax attention of that layer.

The inputs of every layer come from the softmax path. Layers therefore learn
independently, and one that fails does not harm the next. The loss of a head is the
relative squared error of its outputs plus the divergence of its attention rows. "The
Hedgehog & the Porcupine" (Zhang et al., 2024) compares rows; "LoLCATs" (Zhang et al.,
2024) compares both.
"""

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import with_gradient
from keras_rfattn.layers.call_context import Interceptor
from keras_rfattn.layers.recording import recording, run
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.rows import feature_rows, kernel_rows, nearby

TINY = 1e-9
QUANTITIES = ("squared", "norm", "mean_of_v", "divergence", "rows")


class AttentionStage(keras.Model):
    """Trains maps, queries and keys by comparing the outputs of attention layers."""

    measure = "relative squared error of attention outputs"
    no_attention = 1.0  # error of an output of 0

    def __init__(self, teacher, window_dropout=0.0, max_rows=512):
        super().__init__(dtype="float32", name="attention_stage")
        self.teacher, self.model = teacher, teacher.model
        self.first_values = list(teacher.copies.values())
        self.learning, self.window_dropout = list(teacher.layers), window_dropout
        self.max_rows = max_rows
        self.error = keras.metrics.Mean("error")
        self.built = True

    def call(self, inputs):
        """Returns errors of L layers with up to N heads, summed over the batch."""
        x, noise = inputs["x"], inputs["noise"]
        watched = [(layer, Watcher()) for layer in self.learning]
        with self.teacher.weights(), recording(watched):
            self.model(x, training=False)
        losses, sums = [], []
        for i, (layer, watcher) in enumerate(watched):
            students = watcher.calls
            if self.teacher.trains(layer):
                students = watcher.replayed(layer)
            dropped = noise[:, i] < self.window_dropout
            calls = list(zip(watcher.calls, students, strict=True))
            offset = noise[0, -1], self.max_rows
            loss, sums_of_layer = _compared(layer, calls, dropped, *offset)
            losses.append(loss)
            sums.append(sums_of_layer)
        heads = max(x["norm"].shape[-1] for x in sums)

        def widened(x):
            return ops.pad(x, ((0, 0), (0, heads - x.shape[-1])))

        stacked = {
            name: ops.stack([widened(x[name]) for x in sums], 1) for name in QUANTITIES
        }
        return stacked | {"loss": ops.stack(losses)[None]}

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        error, _, _, heads = relative(y_pred)
        count = ops.maximum(ops.sum(heads), 1)
        self.error.update_state(ops.sum(error) / count)
        return ops.sum(y_pred["loss"]) / count


class Watcher(Interceptor):
    """Stores a layer's calls, and answers them with softmax attention."""

    def __init__(self):
        # The calls as `Attention`, and as the arguments of the layer.
        self.calls, self.arguments = [], []

    def around(self, layer, function, args, kwargs):
        """Stores the arguments of the layer; see `Interceptor`."""
        self.arguments.append((args, dict(kwargs)))
        return function(*args, **kwargs)

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
    """Computes relative errors of L layers with N heads from sums over batches."""
    total = {name: ops.sum(ops.cast(x, "float32"), axis=0) for name, x in sums.items()}
    norm = ops.maximum(total["norm"], TINY)
    heads = ops.cast(total["norm"] > 0, "float32")
    return (
        total["squared"] / norm,
        total["divergence"] / ops.maximum(total["rows"], 1),
        total["mean_of_v"] / norm,
        heads,
    )


def _compared(layer, calls, dropped, offset, max_rows):
    """Returns the loss of a layer in a batch and a dict of `QUANTITIES`, `(1, N)`."""
    if not calls:
        heads = layer._kv_shape()[0]
        return ops.zeros(()), {name: ops.zeros((1, heads)) for name in QUANTITIES}

    def compared(*tensors):
        sums, tensors = dict.fromkeys(QUANTITIES, 0), iter(tensors)
        for teacher, student in calls:
            query, key, value = next(tensors), next(tensors), next(tensors)
            student = student.replace(query=query, key=key, value=value)
            errors = layer_errors(teacher, student, dropped, offset, max_rows)
            for name, by_row in errors.items():
                sums[name] = sums[name] + ops.sum(by_row, axis=0, keepdims=True)
        error, divergence, _, _ = relative(sums)
        return ops.sum(error + divergence), *(sums[name] for name in QUANTITIES)

    students = [student for _, student in calls]
    tensors = [tensor for x in students for tensor in (x.query, x.key, x.value)]
    loss, *sums = with_gradient(compared, layer.feature_map.variables, tensors)
    return loss, dict(zip(QUANTITIES, sums, strict=True))


def layer_errors(teacher, student, dropped, offset, max_rows):
    """Measures how far linear attention is from softmax attention."""
    query, key, kernel = teacher.softmax_terms()
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    groups, dtype = num_heads // num_kv_heads, key.dtype
    rows, taken = _sampled_rows(query, offset, max_rows)
    visible, real = _visible(teacher, rows, groups)
    wanted = kernel_rows(kernel, taken(query), key, visible)
    given = _student_rows(student, rows, taken, visible, dropped)

    values = ops.cast(teacher.value, dtype)
    mean = split_heads(_mean(values, visible), num_kv_heads)
    wanted_output = ops.matmul(wanted, split_heads(values, num_kv_heads))
    own_values = split_heads(ops.cast(student.value, dtype), num_kv_heads)
    given_output = ops.matmul(given, own_values)

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
        if kernel.has_offset:
            # The weight of the sink is a part of the distribution of a row.
            sink, own = (
                ops.maximum(1 - ops.sum(x, axis=-1), TINY) for x in (wanted, given)
            )
            divergence = divergence + sink * (ops.log(sink) - ops.log(own))
    sums = {
        "squared": squares(wanted_output - given_output),
        "norm": squares(wanted_output),
        "mean_of_v": squares(wanted_output - mean),
        "divergence": per_head(divergence),
        "rows": per_head(ops.ones_like(divergence)),
    }
    kept = student.options.softmax_heads
    if kept:
        # These heads learn nothing and must not enter the means.
        learns = ops.convert_to_tensor(
            [i // groups not in kept for i in range(num_heads)]
        )
        sums = {name: ops.where(learns, x, 0) for name, x in sums.items()}
    return sums


def _sampled_rows(query, offset, max_rows):
    """Returns positions of the compared queries, and a function that selects them."""
    length = query.shape[1]
    if length is None or length <= max_rows:
        return ops.arange(ops.shape(query)[1], dtype="int32"), lambda x: x
    start = ops.cast(ops.cast(offset, "float32") * length, "int32")
    rows = (ops.arange(max_rows, dtype="int32") * length) // max_rows
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
    """Returns the attention rows of the linear model, `(B, K, R · G, S)`."""
    query, key, bound = call.prepared()
    feature_map, options, mask = call.feature_map, call.options, call.mask
    near = call.local(taken(query), key, bound)
    if feature_map.is_exact:
        return kernel_rows(near.kernel, near.query, near.key, visible)
    local = None
    if options.window is not None:
        batch, given = ops.shape(key)[0], ops.shape(dropped)[0]
        if not isinstance(batch, int) or batch != given:
            dropped = ops.repeat(dropped, batch // given)
        is_near = nearby(
            mask.key_mask, rows, ops.shape(key)[1], options.window, options.sliding,
            mask.causal,
        ) & ~dropped[:, None, None]  # fmt: skip
        is_near = ops.repeat(is_near, query.shape[2] // key.shape[2], axis=1)[:, None]
        local = near.kernel, near.query, near.key, is_near
    features = bound.query_features(taken(query)), bound.key_features(key)
    features = call.with_sinks(features, near.query, near.key, mask.key_mask)
    return feature_rows(*features, visible, mask.key_mask, local)


class Measuring:
    """Measures the errors of attention layers on the first batches of the data.

    It uses a separate Keras model that is compiled once. The models that train are
    compiled again for each stage, which would discard the compiled function.
    """

    def __init__(self, teacher, batches, max_rows):
        self.layers, self.batches = teacher.layers, batches
        self.stage = AttentionStage(teacher, max_rows=max_rows)

    def __call__(self, must_be_finite=False):
        """Measures the errors of L layers with up to N heads."""
        total = dict.fromkeys(QUANTITIES, 0)
        for step in range(len(self.batches.head)):
            sums = self._sums(step)
            bad = ~np.all(np.isfinite(sums["squared"]), axis=(0, 2))
            if must_be_finite and np.any(bad):
                raise ValueError(
                    "Attention outputs must be finite before training. Received: "
                    f"outputs that are not finite in {self._paths(bad)}, batch {step}. "
                    "Check `data` and weights for NaN, and tokens for "
                    "out-of-vocabulary ids."
                )
            total = {k: x + sums[k].sum(0, keepdims=True) for k, x in total.items()}
        without_token = ~np.any(total["rows"] > 0, axis=(0, 2))
        if np.any(without_token):
            raise ValueError(
                "`data` must hold a real token for every linear layer. Received: "
                "only padding, or a model that does not call every layer, at "
                f"{self._paths(without_token)}."
            )
        error, _, control, heads = map(ops.convert_to_numpy, relative(total))
        return tuple(np.where(heads > 0, x, np.nan) for x in (error, control))

    def _sums(self, step):
        """Returns the output of `AttentionStage` for a batch."""
        inputs = self.batches.with_noise(step, len(self.layers) + 1)
        noise = np.ones_like(inputs["noise"])  # so that no window is left out

        def predict(x):
            return self.stage.predict_on_batch({"x": x, "noise": noise})

        return run(self.stage.model, inputs["x"], predict)

    def _paths(self, chosen):
        return [self.layers[i].path for i in np.flatnonzero(chosen)][:3]
