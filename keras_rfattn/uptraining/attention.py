"""Stage "attention": trains each layer against the softmax attention of that layer.

The inputs of every layer come from the softmax path. Layers therefore learn
independently, and one that fails does not harm the next. The loss of a head is the
relative squared error of its outputs plus the divergence of its attention rows. "The
Hedgehog & the Porcupine" (Zhang et al., 2024) compares rows; "LoLCATs" (Zhang et al.,
2024) compares both.

B is the batch size, L the number of layers, N of query heads, K of key/value heads, S
of keys, G = N / K, and R the number of query rows that are compared, G times each.
Sums of shape `(5, N)` hold squared errors, squared norms, squared errors of uniform
attention, divergences and numbers of rows.
"""

import numpy as np
from keras import ops, tree

from keras_rfattn.backend import with_gradient
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.call_context import Interceptor
from keras_rfattn.layers.recording import recording, run
from keras_rfattn.ops.layout import split_heads
from keras_rfattn.ops.rows import feature_rows, kernel_rows, nearby
from keras_rfattn.uptraining.weights import StageModel, paths

TINY = 1e-9


class AttentionStage(StageModel):
    """Trains maps, queries and keys by comparing the outputs of attention layers."""

    measure = "relative squared error of attention outputs"
    no_attention = 1.0  # error of an output of 0

    def call(self, inputs):
        """Returns the loss, and sums over the batch of shape `(1, L, 5, N)`."""
        noise, stage = inputs["noise"], self.stage
        watched = [(layer, Watcher()) for layer in self.learning]
        with self.teacher.weights(), recording(watched):
            self.model(inputs["x"], training=False)
        losses, sums = [], []
        for i, (layer, watcher) in enumerate(watched):
            # Without copies of weights, teacher and student have the same projections.
            again = watcher.replayed(layer) if self.teacher.copies else watcher.calls
            calls = list(zip(watcher.calls, again, strict=True))
            dropped = noise[:, i] < stage.window_dropout
            options = dropped, noise[0, -1], stage.max_rows
            loss, errors = _compared(layer, calls, *options)
            losses.append(loss)
            sums.append(errors)
        heads = max(x.shape[-1] for x in sums)
        sums = [ops.pad(x, ((0, 0), (0, heads - x.shape[-1]))) for x in sums]
        # The first axis is for the replicas of a distribution strategy.
        return {"loss": ops.stack(losses)[None], "sums": ops.stack(sums)[None]}

    def measured(self, compared):
        """Returns `(error, loss)`, each a mean over heads."""
        error, _, _, heads = relative(compared["sums"])
        count = ops.maximum(ops.sum(heads), 1)
        return ops.sum(error) / count, ops.sum(compared["loss"]) / count


class Watcher(Interceptor):
    """Stores a layer's calls, and answers them by a method of `Attention`."""

    def __init__(self, answer=Attention.softmax):
        # `Attention` objects, and pairs of the arguments with which layers were called.
        self.answer, self.calls, self.arguments = answer, [], []

    def around(self, layer, function, args, kwargs):
        self.arguments.append((args, dict(kwargs)))
        return function(*args, **kwargs)

    def __call__(self, call):
        self.calls.append(call)
        return self.answer(call)

    def replayed(self, layer):
        """Returns the same calls, computed with the current weights of the layer."""
        again = Watcher(Attention.zero)
        with recording([(layer, again)]):
            for args, kwargs in self.arguments:
                layer(*args, **kwargs)
        return again.calls


def relative(sums):
    """Returns `(L, N)` errors, divergences, errors of uniform attention, and counts."""
    sums = ops.sum(sums, axis=0)
    squared, norm, uniform, divergence, rows = ops.unstack(sums, axis=-2)
    heads, norm = ops.cast(norm > 0, "float32"), ops.maximum(norm, TINY)
    return squared / norm, divergence / ops.maximum(rows, 1), uniform / norm, heads


def _compared(layer, calls, dropped, offset, max_rows):
    """Returns the loss of a layer, and its `layer_errors` of all calls together."""
    if not calls:
        return ops.zeros(()), ops.zeros((5, 1))

    def compared(*tensors):
        sums = 0
        for i, (teacher, student) in enumerate(calls):
            query, key, value = tensors[3 * i : 3 * i + 3]
            student = student.replace(query=query, key=key, value=value)
            sums = sums + layer_errors(teacher, student, dropped, offset, max_rows)
        error, divergence, _, _ = relative(sums[None])
        return ops.sum(error + divergence), sums

    tensors = [x for _, call in calls for x in (call.query, call.key, call.value)]
    return with_gradient(compared, layer.feature_map.variables, tensors)


def layer_errors(teacher, student, dropped, offset, max_rows):
    """Returns the five sums of the module's docstring, `(5, N)`."""
    query, key, kernel = teacher.softmax_terms()
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    groups = num_heads // num_kv_heads
    rows, taken = _sampled_rows(query, offset, max_rows)
    rows = ops.repeat(rows, groups)
    visible, real = _visible(teacher, rows)
    wanted = kernel_rows(kernel, taken(query), key, visible)
    given = _student_rows(student, rows, taken, visible, dropped)

    values, own_values = (
        split_heads(ops.cast(x.value, key.dtype), num_kv_heads)
        for x in (teacher, student)
    )
    output, own_output = ops.matmul(wanted, values), ops.matmul(given, own_values)
    seen = ops.cast(visible, key.dtype)
    mean = ops.matmul(seen, values)
    mean = mean / ops.maximum(ops.sum(seen, axis=-1, keepdims=True), 1)
    differences = output - own_output, output, output - mean
    squares = [ops.sum(ops.square(x), axis=-1) for x in differences]
    divergence = ops.zeros_like(squares[0])
    if student.feature_map.is_positive:
        divergence = _divergence(wanted, given, visible, kernel.has_offset)
    errors = ops.stack([*squares, divergence, ops.ones_like(divergence)])
    errors = ops.where(real, errors, 0)
    shape = 5, ops.shape(errors)[1], num_kv_heads, -1, groups
    errors = ops.sum(ops.sum(ops.reshape(errors, shape), axis=3), axis=1)
    # Heads that stay softmax learn nothing and must not enter the means.
    learns = ~np.isin(np.arange(num_kv_heads), student.options.softmax_heads)
    errors = ops.where(learns[:, None], errors, 0)
    return ops.cast(ops.reshape(errors, (-1, num_heads)), "float32")


def _divergence(wanted, given, visible, has_sink):
    """Returns the Kullback-Leibler divergence of rows."""
    ratio = ops.log(wanted + TINY) - ops.log(given + TINY)
    divergence = ops.sum(ops.where(visible, wanted * ratio, 0), axis=-1)
    if not has_sink:
        return divergence
    # The weight of the sink is what the other weights leave of 1.
    sink, own = (ops.maximum(1 - ops.sum(x, axis=-1), TINY) for x in (wanted, given))
    return divergence + sink * (ops.log(sink) - ops.log(own))


def _sampled_rows(query, offset, max_rows):
    """Returns positions of the compared queries, and a function that selects them."""
    length = query.shape[1]
    if length is None or length <= max_rows:
        return ops.arange(ops.shape(query)[1], dtype="int32"), lambda x: x
    start = ops.cast(ops.cast(offset, "float32") * length, "int32")
    rows = (ops.arange(max_rows, dtype="int32") * length) // max_rows
    rows = (rows + start) % length
    return rows, lambda x: ops.take(x, rows, axis=1)


def _visible(call, rows):
    """Returns which keys rows see, `(B, 1, R · G or 1, S)`, and which rows are real."""
    mask, length = call.mask, ops.shape(call.key)[1]
    visible = ops.ones((ops.shape(call.key)[0], 1, 1, length), dtype="bool")
    if mask.key_mask is not None:
        visible = visible & ops.cast(mask.key_mask, "bool")[:, None, None]
    if mask.causal:
        past = rows[:, None] >= ops.arange(length, dtype="int32")
        if mask.prefix_mask is not None:
            past = past | ops.cast(mask.prefix_mask, "bool")[:, None, None]
        visible = visible & past
    real = ops.any(visible, axis=-1)
    if call.query_mask is not None:
        query_mask = ops.cast(call.query_mask, "bool")
        real = real & ops.take(query_mask, rows, axis=1)[:, None]
    return visible, real


def _student_rows(call, rows, taken, visible, dropped):
    """Returns the attention rows of the linear model, `(B, K, R · G, S)`."""
    query, key, bound = call.prepared()
    options, mask = call.options, call.mask
    near = call.local(taken(query), key, bound)
    if call.feature_map.is_exact:
        return kernel_rows(near.kernel, near.query, near.key, visible)
    local = None
    if options.window is not None:
        is_near = nearby(mask.key_mask, rows, ops.shape(key)[1], near, mask.causal)
        # A model may split one example into several sequences.
        count = ops.shape(key)[0] // ops.shape(dropped)[0]
        is_near = is_near & ~ops.repeat(dropped, count)[:, None, None]
        local = near.kernel, near.query, near.key, is_near[:, None]
    features = bound.query_features(taken(query)), bound.key_features(key)
    return feature_rows(*features, visible, mask.key_mask, local)


def measured_errors(trainer, batches, must_be_finite=False):
    """Returns errors and those of uniform attention, by layer and head that learns."""

    def sums_of(x):
        shape = len(tree.flatten(x)[0]), len(trainer.learning) + 1
        inputs = {"x": x, "noise": np.zeros(shape, "float32")}
        return trainer.predict_on_batch(inputs)["sums"]

    def first_paths(chosen):
        return paths([trainer.learning[i] for i in np.flatnonzero(chosen)[:3]])

    total = 0
    for step, x in enumerate(batches):
        sums = run(trainer.model, x, sums_of)
        total = total + sums.sum(axis=0, keepdims=True)
        bad = ~np.isfinite(sums).all(axis=(0, 2, 3))
        if must_be_finite and bad.any():
            raise ValueError(
                "Attention outputs must be finite before training. Received: outputs "
                f"that are not finite in {first_paths(bad)}, batch {step}. Check "
                "`data` and weights for NaN, and tokens for out-of-vocabulary ids."
            )
    empty = (total[:, :, -1] == 0).all(axis=(0, 2))
    if empty.any():
        raise ValueError(
            "`data` must hold a real token for every linear layer. Received: only "
            "padding, or a model that does not call every layer, at "
            f"{first_paths(empty)}."
        )
    error, _, uniform, heads = map(ops.convert_to_numpy, relative(total))
    return [
        [row[kept > 0].tolist() for row, kept in zip(x, heads, strict=True)]
        for x in (error, uniform)
    ]
