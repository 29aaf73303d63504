"""Recognizes and converts data: arrays, texts or images, rows or batches."""

import unicodedata

import keras
import numpy as np

from keras_rfattn.layers.batches import described

# Minimum number of tokens that a batch of texts is padded to. Longer batches are padded
# to a multiple of it on PyTorch. Other backends compile every new length, so there the
# length doubles until it is enough, which gives few different lengths.
SHORTEST = 16


def normalized(text):
    """Normalizes a text so that case, spaces and punctuation make no difference."""
    text = text.decode() if isinstance(text, bytes) else str(text)
    text = unicodedata.normalize("NFKC", text).casefold()
    # Unicode categories: letters, marks (such as accents) and numbers.
    kept = (x if unicodedata.category(x)[0] in "LMN" else " " for x in text)
    return " ".join("".join(kept).split())


def inputs_of(item):
    """Returns the inputs of a dataset's item, without labels and sample weights."""
    return item[0] if isinstance(item, tuple) else item


def check_data(data):
    """Raises `ValueError` if data holds no batches, and says what to pass instead."""
    reason = None
    if isinstance(data, (str, bytes)) or _is_scalar_text(data):
        reason = f"one text, data={data!r:.80}. Put it into a list: `data=[text]`"
    elif hasattr(data, "columns"):
        reason = (
            f"a {type(data).__name__}. Pass the texts or numbers of its columns, such "
            "as `data[column].tolist()`"
        )
    elif isinstance(data, (list, tuple, dict)) and not data:
        empty = {list: "an empty list", tuple: "an empty tuple", dict: "an empty dict"}
        reason = f"{empty.get(type(data), 'nothing')}. It must hold at least one row"
    elif isinstance(data, list) and isinstance(data[0], list) and data[0]:
        if not is_array(data[0][0]) and not holds_text(data[0]):
            reason = "a list of lists. Pass an array with rows padded to one length"
    elif not (
        isinstance(data, keras.utils.PyDataset) or callable(data) or is_iterable(data)
    ):
        reason = f"data={data!r:.80} of type {type(data).__name__}"
    if reason is not None:
        raise ValueError(
            "`data` must be arrays, texts, a dataset or a function that makes a "
            f"generator. Received: {reason}."
        )


def as_array(x):
    """Converts to a NumPy array of numbers, or of strings only.

    Raises:
        ValueError: If this is not possible.
    """
    reason = None
    if x is None or isinstance(x, (str, bytes, int, float, np.generic)):
        reason = f"{x!r:.80}. A batch must be an array or a list of texts"
    else:
        x = x if isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x)
        if x.dtype.kind == "O":
            others = [i for i in x.flat if not isinstance(i, (str, bytes))]
            if others:
                reason = f"{described(x)}, such as {others[0]!r:.80}"
                if isinstance(others[0], (list, tuple, np.ndarray)):
                    reason += ". Pad rows to one length"
                elif len(others) < x.size:
                    reason += " between texts. Drop it, or turn it into a text"
    if reason is not None:
        raise ValueError(
            f"Batches of `data` must hold arrays of numbers or texts. Received: "
            f"{reason}."
        )
    return x


def _is_scalar_text(x):
    is_scalar = getattr(x, "shape", None) == () and hasattr(x, "dtype")
    return is_scalar and any(k in str(x.dtype) for k in ("string", "<U", "|S"))


def is_image(x):
    """Returns whether `x` is a batch of raw images: four axes, uint8."""
    return x.dtype == np.uint8 and x.ndim == 4


def is_iterable(x):
    """Returns whether `x` can be iterated over; NumPy scalars cannot."""
    return hasattr(x, "__iter__") and getattr(x, "shape", None) != ()


def is_pair(is_loader, item):
    """Returns whether an item of a stream is a list of inputs and labels."""
    return is_loader and isinstance(item, list)


def is_spent(data):
    """Returns whether `data` can be iterated over only once, as a generator can."""
    if isinstance(data, keras.utils.PyDataset) or callable(data):
        return False
    return iter(data) is data


def is_table(data):
    """Returns whether `data` holds rows in memory, rather than batches."""
    if isinstance(data, (list, tuple)):
        return holds_text(data) or all(map(is_array, data))
    return isinstance(data, dict) or is_array(data)


def holds_text(data):
    """Returns whether a list holds any text; `as_array` refuses anything else in it."""
    return any(isinstance(x, (str, bytes)) for x in data)


def is_array(x):
    """Returns whether `x` is an array or tensor of any library."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def as_texts(data):
    """Returns data with all texts in NumPy object arrays."""
    if isinstance(data, (list, tuple)) and (not data or holds_text(data)):
        # `np.array(data)` might nest deeper, as an element might be a list.
        found = np.empty(len(data), dtype=object)
        found[:] = data
        return found
    if "string" in str(getattr(data, "dtype", "")):
        return np.asarray(data, dtype=object)
    if isinstance(data, dict):
        return {key: as_texts(x) for key, x in data.items()}
    if isinstance(data, (list, tuple)):
        return [as_texts(x) for x in data]
    return data


def trimmed(batch):
    """Cuts off padding that all rows share, as described at `SHORTEST`."""
    if not isinstance(batch, dict) or "padding_mask" not in batch:
        return batch
    mask = batch["padding_mask"].astype(bool)
    used = np.flatnonzero(mask.any(0))
    full, length = mask.shape[1], SHORTEST
    # Padding on the left stays, because positions are counted from the left end.
    wanted = used[-1] + 1 if len(used) else full
    while length < wanted:
        length += SHORTEST if keras.backend.backend() == "torch" else length
    return {
        key: x[:, :length] if x.ndim > 1 and x.shape[1] == full else x
        for key, x in batch.items()
    }
