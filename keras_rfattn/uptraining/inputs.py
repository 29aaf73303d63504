"""What a batch of data is: arrays, texts or images."""

import unicodedata

import keras
import numpy as np

# Tokens that a batch of texts is padded to at least; a multiple of them on PyTorch,
# doubled while too few where every other length is compiled anew.
SHORTEST = 16


def normalized(text):
    """What two texts have in common that differ in case, spaces or punctuation."""
    text = text.decode() if isinstance(text, bytes) else str(text)
    text = unicodedata.normalize("NFKC", text).casefold()
    # Letters, their marks, and numbers.
    kept = (x if unicodedata.category(x)[0] in "LMN" else " " for x in text)
    return " ".join("".join(kept).split())


def inputs_of(item):
    """Inputs without labels and weights, of what a dataset gives."""
    return item[0] if isinstance(item, tuple) else item


def as_array(x):
    """As NumPy has it."""
    if x is None:
        raise ValueError("Batches of `data` must hold arrays or texts. Received: None.")
    return x if isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x)


def is_text(x):
    """Whether it is an array of strings."""
    return getattr(x, "dtype", None) is not None and x.dtype.kind in "OUS"


def is_image(x):
    """Whether it is a batch of images as files hold them, bytes."""
    return x.dtype == np.uint8 and x.ndim == 4


def is_iterable(x):
    """Whether it can be gone through; a number as NumPy has it cannot."""
    return hasattr(x, "__iter__") and getattr(x, "shape", None) != ()


def is_pair(is_loader, item):
    """Whether what a stream gives is a list of inputs and labels."""
    return is_loader and isinstance(item, list)


def is_spent(data):
    """Whether going through `data` once uses it up."""
    if isinstance(data, keras.utils.PyDataset) or callable(data):
        return False
    return iter(data) is data


def is_table(data):
    """Whether `data` is rows at hand, rather than batches."""
    if isinstance(data, (list, tuple)):
        return bool(data) and all(
            isinstance(x, (str, bytes)) or is_array(x) for x in data
        )
    return isinstance(data, dict) or is_array(data)


def is_array(x):
    """Whether it is an array of some library."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def as_texts(data):
    """Texts as arrays of objects, whatever holds them."""
    if isinstance(data, (list, tuple)) and all(
        isinstance(x, (str, bytes)) for x in data
    ):
        return np.array(data, dtype=object)
    if "string" in str(getattr(data, "dtype", "")):
        return np.asarray(data, dtype=object)
    if isinstance(data, dict):
        return {key: as_texts(x) for key, x in data.items()}
    if isinstance(data, (list, tuple)):
        return [as_texts(x) for x in data]
    return data


def trimmed(batch):
    """Without the padding that all rows share, but for a length as of `SHORTEST`."""
    if not isinstance(batch, dict) or "padding_mask" not in batch:
        return batch
    mask = batch["padding_mask"].astype(bool)
    used = np.flatnonzero(mask.any(0))
    full, length = mask.shape[1], SHORTEST
    # Padding on the left stays: positions count from there.
    wanted = used[-1] + 1 if len(used) else full
    while length < wanted:
        length += SHORTEST if keras.backend.backend() == "torch" else length
    return {
        key: x[:, :length] if x.ndim > 1 and x.shape[1] == full else x
        for key, x in batch.items()
    }
