"""Exports of small attention models, and whether what they wrote runs and agrees.

`answer` is the harness of `test_export.py` and of `docs/export_table.py`: it exports a
model, runs the exported program on batches and lengths that its shapes allow, and
compares every output with the model's own.
"""

import concurrent.futures
import contextlib
import importlib.util
import io
import logging
import multiprocessing
import pathlib
import tempfile
import warnings
from typing import NamedTuple

import keras
import numpy as np

from keras_rfattn import generation, layers, replace_attention
from tests.models.families import build

DIM, BLOCK, WINDOW, LENGTH, BATCH = 16, 4, 8, 16, 2
# A program that computes anything else is off by more than a hundred times this.
TOLERANCE = 2e-5


class Case(NamedTuple):
    """A model: what its attention sees, and the arguments of its layer."""

    causal: bool = False
    masked: bool = False
    grouped: bool = False
    options: tuple = ()


CASES = {
    "bidirectional": Case(),
    "padding mask": Case(masked=True),
    "causal": Case(causal=True),
    "causal, padding mask": Case(causal=True, masked=True),
    "window": Case(options=(("window", WINDOW),)),
    "sliding window": Case(
        masked=True, options=(("window", WINDOW), ("sliding", True))
    ),
    "causal window": Case(causal=True, options=(("window", WINDOW),)),
    "causal sliding window": Case(
        causal=True, masked=True, options=(("window", WINDOW), ("sliding", True))
    ),
    "grouped queries": Case(causal=True, masked=True, grouped=True),
    "heads kept softmax": Case(options=(("softmax_heads", (1,)),)),
}
# Batch and length of the exported program; `None` is any.
SHAPES = {
    "fixed": (BATCH, LENGTH),
    "any batch": (None, LENGTH),
    "any length": (None, None),
}


def attention(case, mechanism):
    """A layer of a `Case`; the softmax one where `mechanism` is `None`."""
    name, arguments = "MultiHeadAttention", {"num_heads": 2, "key_dim": 8}
    if case.grouped:
        name = "GroupedQueryAttention"
        arguments = {"head_dim": 8, "num_query_heads": 4, "num_key_value_heads": 2}
    if mechanism is None:
        name = name.replace("Grouped", "Group")
        return getattr(keras.layers, name)(**arguments)
    options = {"block_size": BLOCK, "seed": 0, **dict(case.options)}
    if isinstance(mechanism, str) and mechanism in FEATURES:
        options["num_features"] = FEATURES[mechanism]
    return getattr(layers, name)(feature_map=mechanism, **arguments, **options)


# Of maps that take a number of features, a small one.
FEATURES = {"favorplus": 24, "favorpp": 24, "gerf": 24, "favor": 24}


def model(case, mechanism, length):
    """A model of tokens `(B, T, 16)`, and of a mask `(B, T)` if there is one."""
    keras.utils.set_random_seed(0)
    x = keras.Input((length, DIM), name="x")
    inputs, masks = [x], {}
    if case.masked:
        inputs.append(keras.Input((length,), dtype="bool", name="visible"))
        name = "value_mask"
        masks = {name: inputs[1]}
    layer = attention(case, mechanism)
    output = layer(x, x, use_causal_mask=case.causal, **masks)
    made = keras.Model(inputs if case.masked else x, output)
    rng = np.random.default_rng(0)
    for weight in made.trainable_weights:
        # Fresh attention is close to uniform.
        if "query/kernel" in weight.path or "key/kernel" in weight.path:
            weight.assign(rng.normal(size=weight.shape) * 0.5)
    return made


def batches(case, shape):
    """Inputs that a program of such a shape takes."""
    batch, length = shape
    if length is not None:
        sizes = [(batch or x, length) for x in (BATCH, 3)][: 1 if batch else 2]
    else:
        sizes = [(2, LENGTH), (3, 5), (1, 21)]
    rng = np.random.default_rng(1)
    for rows, tokens in sizes:
        inputs = [rng.normal(size=(rows, tokens, DIM)).astype("float32")]
        if case.masked:
            visible = np.ones((rows, tokens), bool)
            visible[0, 4:] = False
            visible[-1, :2] = False
            inputs.append(visible)
        yield inputs


class Refused(Exception):
    """Why an export is not tried."""


def specs(case, shape):
    """`keras.InputSpec` of the inputs, as `export` takes them."""
    found = [keras.InputSpec(shape=(*shape, DIM), dtype="float32", name="x")]
    if case.masked:
        found.append(keras.InputSpec(shape=shape, dtype="bool", name="visible"))
    return [found] if case.masked else found


def _saved_model(made, case, shape, folder):
    import tensorflow as tf

    others = {}
    if keras.backend.backend() == "jax":
        # Keras would give the lengths of tokens and mask different names.
        names = ("batch", "length")
        sizes = (x if x is None else str(x) for x in shape)
        sizes = ", ".join(x or y for x, y in zip(sizes, names, strict=True))
        shapes = f"({sizes}, {DIM})"
        shapes = [[shapes, f"({sizes})"]] if case.masked else [shapes]
        others["jax2tf_kwargs"] = {"polymorphic_shapes": shapes}
    made.export(
        folder, format="tf_saved_model", verbose=False,
        input_signature=specs(case, shape), **others,
    )  # fmt: skip
    # Its variables live as long as the loaded object.
    loaded = tf.saved_model.load(str(folder))

    def run(inputs):
        return loaded.serve(inputs if case.masked else inputs[0])

    return run


def _jax_export(made, case, shape, folder):
    import jax
    from jax import export

    names = ["batch" if x is None else str(x) for x in shape[:1]]
    names += ["length" if x is None else str(x) for x in shape[1:]]
    batch, length = export.symbolic_shape(", ".join(names))
    arguments = [jax.ShapeDtypeStruct((batch, length, DIM), "float32")]
    if case.masked:
        arguments.append(jax.ShapeDtypeStruct((batch, length), "bool"))

    def call(*inputs):
        return made(list(inputs) if case.masked else inputs[0], training=False)

    written = export.export(jax.jit(call))(*arguments).serialize()
    program = export.deserialize(written)
    return lambda inputs: program.call(*inputs)


def _litert(made, case, shape, folder):
    import tensorflow as tf

    file = str(folder / "model.tflite")
    made.export(
        file, format="litert", verbose=False, input_signature=specs(case, shape)
    )
    reader = tf.lite.Interpreter(file)

    def run(inputs):
        found = sorted(reader.get_input_details(), key=lambda x: -len(x["shape"]))
        for x, given in zip(found, inputs, strict=True):
            reader.resize_tensor_input(x["index"], given.shape)
        reader.allocate_tensors()
        for x, given in zip(found, inputs, strict=True):
            reader.set_tensor(x["index"], given)
        reader.invoke()
        return reader.get_tensor(reader.get_output_details()[0]["index"])

    return run


def _torch_export(made, case, shape, folder):
    import torch

    axes = {}
    if shape[0] is None:
        axes[0] = torch.export.Dim("batch", min=1, max=512)
    if shape[1] is None:
        axes[1] = torch.export.Dim("length", min=2, max=4096)
    example = [torch.tensor(x) for x in next(batches(case, shape))]
    dynamic = [([axes] * 2,)] if case.masked else [(axes,)]
    arguments = (example,) if case.masked else tuple(example)
    program = torch.export.export(
        made, arguments, strict=False, dynamic_shapes=dynamic if axes else None
    )
    file = folder / "model.pt2"
    torch.export.save(program, file)
    program = torch.export.load(file).module()

    def run(inputs):
        inputs = [torch.tensor(x) for x in inputs]
        return program(inputs if case.masked else inputs[0])

    return run


def _onnx(made, case, shape, folder):
    need("onnx", "onnxscript", "onnxruntime")
    import onnxruntime

    file = str(folder / "model.onnx")
    made.export(file, format="onnx", verbose=False, input_signature=specs(case, shape))
    session = onnxruntime.InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    return lambda x: session.run(None, dict(zip(names, x, strict=True)))[0]


FORMATS = {
    "jax": {"tf_saved_model": _saved_model, "jax.export": _jax_export},
    "tensorflow": {"tf_saved_model": _saved_model, "litert": _litert},
    "torch": {"torch": _torch_export, "onnx": _onnx},
}


# Whose runtime ends the process where it meets a program that it cannot run.
MAY_ABORT = {"litert"}


def need(*modules):
    """Raises `Refused` unless modules are installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise Refused(f"needs `{name}`")


def answer(form, case, shape, mechanism):
    """`"yes"`, or why a model's export does not run or agree.

    Args:
        form: A key of `FORMATS[backend]`.
        case: A `Case`.
        shape: Batch and length, `None` for any.
        mechanism: Feature map of the layer; `None` for softmax.
    """
    if form not in MAY_ABORT:
        return _answer(form, case, shape, mechanism)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as child:
        try:
            return child.submit(_answer, form, case, shape, mechanism).result()
        except concurrent.futures.process.BrokenProcessPool:
            return "BrokenProcessPool: the runtime ended the process"


def _answer(form, case, shape, mechanism):
    made = model(case, mechanism, shape[1])
    write = FORMATS[keras.backend.backend()][form]

    def errors(folder):
        run = write(made, case, shape, folder)
        for inputs in batches(case, shape):
            tensors = [keras.ops.convert_to_tensor(x) for x in inputs]
            given = made(tensors if case.masked else tensors[0], training=False)
            yield difference(run(inputs), given)

    return _judged(errors)


def _judged(errors):
    """`"yes"` if all errors are small, else what is wrong."""
    try:
        with tempfile.TemporaryDirectory() as folder, quiet():
            for error in errors(pathlib.Path(folder)):
                if not error < TOLERANCE:
                    return f"differs by {error:.1e}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip() or 'no text'}"
    return "yes"


def difference(found, given):
    """Largest difference of an output from the model's, by the largest of that."""
    found, given = (np.asarray(_plain(x)) for x in (found, given))
    assert np.any(given), "nothing to compare with: the model's output is zero"
    if found.shape != given.shape:
        return float("inf")
    return float(np.max(np.abs(found - given)) / np.max(np.abs(given)))


def _plain(x):
    return keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else x


def step_answer(form, batch, mechanism, window=None):
    """`answer` for the step of a decoder: a token and a state to logits and a state.

    Two steps are taken, the second from the state that the exported program returns.

    Args:
        form: A key of `STEPS[backend]`.
        batch: Rows of the program, `None` for any.
        mechanism: Feature map of the decoder's layers; `None` for softmax.
        window: Of those layers.
    """
    # PyTorch traces a layer with a window for twenty seconds.
    task, inputs = build("llama", num_layers=2 if window is None else 1)
    if mechanism is not None:
        options = {} if window is None else {"window": window}
        replace_attention(task, mechanism, num_features=24, seed=0, **options)
    prompt = keras.ops.convert_to_tensor(inputs["token_ids"][:, :5])
    if mechanism is None:
        _, cache = task._build_cache(
            keras.ops.convert_to_tensor(inputs["token_ids"] * 0)
        )
    else:
        _, cache = generation.prefill(task, prompt)
    leaves = keras.tree.flatten(cache)

    def step(tokens, start, *leaves):
        cache = keras.tree.pack_sequence_as(structure, list(leaves))
        logits, _, cache = task.call_with_cache(tokens, cache, start)
        return (logits, *keras.tree.flatten(cache))

    structure = cache

    def errors(folder):
        write = STEPS[keras.backend.backend()][form]
        tokens = keras.ops.convert_to_tensor(inputs["token_ids"][:, 5:6])
        start = keras.ops.convert_to_tensor(np.int32(5))
        run = write(task, step, (tokens, start, *leaves), batch, folder)
        expected = found = leaves
        for i in range(2):
            now = keras.ops.convert_to_tensor(np.int32(5 + i))
            given, *expected = step(tokens, now, *expected)
            logits, *found = run(tokens, now, *found)
            yield difference(logits, given)

    return _judged(errors)


def _step_of_jax(task, step, example, batch, folder):
    import jax
    from jax import export

    rows = export.symbolic_shape("batch")[0] if batch is None else batch

    def spec(x):
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]) if x.ndim else (), x.dtype)

    written = export.export(jax.jit(step))(*map(spec, example)).serialize()
    return export.deserialize(written).call


def _step_of_tensorflow(task, step, example, batch, folder):
    import tensorflow as tf

    module = tf.Module()
    module.variables_of_task = [x.value for x in task.variables]
    specs = [
        tf.TensorSpec([batch, *x.shape[1:]] if x.shape.rank else [], x.dtype)
        for x in example
    ]
    module.step = tf.function(step, input_signature=specs, autograph=False)
    tf.saved_model.save(module, str(folder))
    loaded = tf.saved_model.load(str(folder))
    return lambda *x: loaded.step(*x)


def _step_of_torch(task, step, example, batch, folder):
    import torch

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.task = task

        def forward(self, arguments):
            return step(*arguments)

    shapes = None
    if batch is None:
        rows = torch.export.Dim("batch", min=1, max=64)
        shapes = ([{0: rows} if x.ndim else {} for x in example],)
    program = torch.export.export(
        Step(), (list(example),), dynamic_shapes=shapes, strict=False
    )
    torch.export.save(program, folder / "step.pt2")
    program = torch.export.load(folder / "step.pt2").module()
    return lambda *x: program(list(x))


STEPS = {
    "jax": {"jax.export": _step_of_jax},
    "tensorflow": {"tf_saved_model": _step_of_tensorflow},
    "torch": {"torch": _step_of_torch},
}


@contextlib.contextmanager
def quiet():
    """What exporters print is not kept."""
    logging.disable(logging.WARNING)
    sink = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
