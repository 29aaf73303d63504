"""A Whisper in CTranslate2's format, loaded, is the model whose weights it holds."""

import itertools
import json
import struct

import numpy as np
import pytest
from keras import ops
from scipy import special

tokenizers = pytest.importorskip("tokenizers")
whisper_ctranslate2 = pytest.importorskip("recipes.common.whisper_ctranslate2")
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SPECIAL = [whisper_ctranslate2.END, *whisper_ctranslate2.PROMPT]
TOKENS, HEADS, HIDDEN, INNER, MELS = len(ALPHABET) + 5, 2, 16, 24, 4
FRAMES, POSITIONS, LAYERS = 12, 20, 2
SUPPRESSED, FIRST = [3, 5, 7], [11]
TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
ALIASES = {"decoder/projection/weight": "decoder/embeddings/weight"}


def draw_weights():
    """Returns float16 weights and settings by their names in the file."""
    generator = np.random.default_rng(0)
    found = {}
    for name, shape in shapes().items():
        # Attention that matters.
        found[name] = generator.normal(size=shape, scale=0.5).astype("float16")
        if name.endswith("attention/linear_0/bias") and len(found[name]) > HIDDEN:
            found[name][HIDDEN : 2 * HIDDEN] = 0  # The keys have no bias.
        if name.endswith("/attention/linear_1/bias"):
            found[name][:HIDDEN] = 0
    # Otherwise each token of a transcript would be the one before it again.
    found["decoder/position_encodings/encodings"] *= 6
    for side in ("encoder", "decoder"):
        found[f"{side}/num_heads"] = np.int16(HEADS)
    found |= {"decoder/pre_norm": np.int8(1), "decoder/activation": np.int8(3)}
    found["decoder/alignment_layer"] = np.int16(-1)
    return found


def shapes():
    linear = {
        "self_attention": [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
        "attention": [(HIDDEN, HIDDEN), (2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
        "ffn": [(INNER, HIDDEN), (HIDDEN, INNER)],
    }
    found = {
        "decoder/embeddings/weight": (TOKENS, HIDDEN),
        "encoder/position_encodings/encodings": (FRAMES, HIDDEN),
        "decoder/position_encodings/encodings": (POSITIONS, HIDDEN),
        "encoder/conv1/weight": (HIDDEN, MELS, 3),
        "encoder/conv2/weight": (HIDDEN, HIDDEN, 3),
    }
    norms = ["encoder/layer_norm", "decoder/layer_norm"]
    for side, part, i in itertools.product(
        ("encoder", "decoder"), linear, range(LAYERS)
    ):
        if (side, part) != ("encoder", "attention"):
            source = f"{side}/layer_{i}/{part}"
            norms.append(f"{source}/layer_norm")
            for k, shape in enumerate(linear[part]):
                found[f"{source}/linear_{k}/weight"] = shape
    for name in [x for x in found if "linear" in x or "conv" in x]:
        found[name.replace("weight", "bias")] = found[name][:1]
    for norm in norms:
        found |= {f"{norm}/gamma": (HIDDEN,), f"{norm}/beta": (HIDDEN,)}
    return found


def binary(weights, version=6, name="WhisperSpec", revision=3, aliases=ALIASES):
    """Returns the bytes of a file in CTranslate2's format."""

    def text(x):
        return struct.pack("<H", len(x) + 1) + x.encode() + b"\0"

    parts = [struct.pack("<I", version), text(name), struct.pack("<I", revision)]
    parts.append(struct.pack("<I", len(weights)))
    for key, value in weights.items():
        data = value.tobytes()
        parts += [text(key), struct.pack("<B", value.ndim)]
        parts += [struct.pack("<I", n) for n in value.shape]
        parts += [struct.pack("<BI", TYPES[value.dtype.name], len(data)), data]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [text(x) for pair in aliases.items() for x in pair]
    return b"".join(parts)


def write(folder, data, special=SPECIAL):
    (folder / "model.bin").write_bytes(data)
    settings = {"suppress_ids": SUPPRESSED, "suppress_ids_begin": FIRST}
    (folder / "config.json").write_text(json.dumps(settings))
    vocabulary = {token: i for i, token in enumerate([*ALPHABET, *special])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class ByHand:
    """Whisper in NumPy, for one clip."""

    def __init__(self, weights):
        self.weights = {k: np.asarray(v, "float64") for k, v in weights.items()}

    def gelu(self, x):
        return x * (1 + special.erf(x / np.sqrt(2))) / 2

    def norm(self, name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * self.weights[f"{name}/gamma"] + self.weights[f"{name}/beta"]

    def linear(self, name, x):
        return x @ self.weights[f"{name}/weight"].T + self.weights[f"{name}/bias"]

    def convolution(self, name, x, stride):
        x = np.pad(x, ((1, 1), (0, 0)))
        kernel = self.weights[f"{name}/weight"]
        windows = [x[t : t + 3] for t in range(0, len(x) - 2, stride)]
        return np.einsum("tki,oik->to", windows, kernel) + self.weights[f"{name}/bias"]

    def attention(self, query, key, value, is_causal=False):
        query, key, value = (
            x.reshape(len(x), HEADS, -1).swapaxes(0, 1) for x in (query, key, value)
        )
        logits = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
        if is_causal:
            logits += np.triu(np.full(logits.shape[1:], -np.inf), 1)
        found = special.softmax(logits, axis=-1) @ value
        return found.swapaxes(0, 1).reshape(found.shape[1], -1)

    def self_attention(self, part, x, is_causal=False):
        fused = self.linear(f"{part}/linear_0", self.norm(f"{part}/layer_norm", x))
        found = self.attention(*np.split(fused, 3, axis=-1), is_causal)
        return x + self.linear(f"{part}/linear_1", found)

    def feed_forward(self, part, x):
        inner = self.linear(f"{part}/linear_0", self.norm(f"{part}/layer_norm", x))
        return x + self.linear(f"{part}/linear_1", self.gelu(inner))

    def encode(self, x):
        x = self.gelu(self.convolution("encoder/conv1", x, 1))
        x = self.gelu(self.convolution("encoder/conv2", x, 2))
        x = x + self.weights["encoder/position_encodings/encodings"][: len(x)]
        for i in range(LAYERS):
            x = self.self_attention(f"encoder/layer_{i}/self_attention", x)
            x = self.feed_forward(f"encoder/layer_{i}/ffn", x)
        return self.norm("encoder/layer_norm", x)

    def logits(self, encoded, ids):
        table = self.weights["decoder/embeddings/weight"]
        positions = self.weights["decoder/position_encodings/encodings"]
        x = table[ids] + positions[: len(ids)]
        for i in range(LAYERS):
            x = self.self_attention(f"decoder/layer_{i}/self_attention", x, True)
            part = f"decoder/layer_{i}/attention"
            query = self.linear(f"{part}/linear_0", self.norm(f"{part}/layer_norm", x))
            fused = self.linear(f"{part}/linear_1", encoded)
            found = self.attention(query, *np.split(fused, 2, axis=-1))
            x = x + self.linear(f"{part}/linear_2", found)
            x = self.feed_forward(f"decoder/layer_{i}/ffn", x)
        return self.norm("decoder/layer_norm", x) @ table.T


@pytest.fixture(scope="module")
def weights():
    return draw_weights()


@pytest.fixture(scope="module")
def whisper(weights, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("whisper"), binary(weights))
    return whisper_ctranslate2.load(folder)


def draw_features(frames=2 * FRAMES, count=2):
    shape = count, frames, MELS
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def test_loaded_model_equals_its_weights(weights, whisper):
    model, features = ByHand(weights), draw_features()
    ids = np.random.default_rng(2).integers(TOKENS, size=(2, 9)).astype("int32")
    inputs = {"encoder_features": features, "decoder_token_ids": ids}
    inputs |= {"decoder_padding_mask": np.ones_like(ids)}
    found = whisper.backbone.predict_on_batch(inputs)
    embedding = whisper.backbone.token_embedding
    logits = embedding(found["decoder_sequence_output"], reverse=True)
    encoded = [model.encode(x) for x in features]
    expected = [model.logits(x, row) for x, row in zip(encoded, ids, strict=True)]
    check(found["encoder_sequence_output"], encoded)
    check(logits, expected)


def check(found, expected):
    scale = np.abs(expected).max()
    found = ops.convert_to_numpy(found)
    np.testing.assert_allclose(found / scale, expected / scale, atol=2e-5)


@pytest.mark.once
def test_transcripts_are_greedy(weights, whisper):
    model, encoded, expected = ByHand(weights), [], []
    end, start, plain = range(len(ALPHABET), len(ALPHABET) + 3)
    for features in draw_features():
        encoded.append(model.encode(features))
        ids = [start, plain]
        while len(ids) < POSITIONS and ids[-1] != end:
            logits = model.logits(encoded[-1], np.array(ids))[-1]
            logits[[*SUPPRESSED, *range(end + 1, TOKENS)]] = -np.inf
            if len(ids) == 2:
                logits[FIRST] = -np.inf
            ids.append(logits.argmax())
        expected.append(whisper.tokenizer.decode(ids).strip())
    encoded = np.array(encoded, "float32")
    assert whisper_ctranslate2.transcribe(whisper, encoded) == expected
    assert all(len({*text.split()}) > 2 for text in expected)
    short = whisper_ctranslate2.transcribe(whisper, encoded[1:], max_tokens=4)
    assert expected[1].startswith(short[0]) and short[0] != expected[1]


@pytest.mark.once
def test_other_files_are_refused(weights, tmp_path):
    write(tmp_path, binary(weights, version=5))
    with pytest.raises(ValueError, match="must be a file of .*Received: .5, 'Whisper"):
        whisper_ctranslate2.load(tmp_path)
    missing = {k: v for k, v in weights.items() if "layer_1/ffn/linear_1/bias" not in k}
    write(tmp_path, binary(missing))
    with pytest.raises(KeyError, match="layer_1/ffn/linear_1/bias"):
        whisper_ctranslate2.load(tmp_path)
