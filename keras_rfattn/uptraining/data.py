"""Converts the data that `uptrain` receives to nested NumPy arrays."""

import keras
import numpy as np

from keras_rfattn.backend.devices import compiles_each_length
from keras_rfattn.layers.batches import described

# Minimum number of tokens that a batch of texts is padded to. Longer batches are padded
# to a multiple of it. Where every new length must be compiled, the length doubles until
# it is enough, which gives few different lengths.
SHORTEST = 16
# Names of KerasHub's inputs that have a column for each token.
TOKENS = "token_ids", "segment_ids", "padding_mask"


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
    elif isinstance(data, keras.utils.PyDataset) or callable(data):
        pass
    elif not hasattr(data, "__iter__") or getattr(data, "shape", None) == ():
        # Arrays of NumPy without axes have the method, too.
        reason = f"data={data!r:.80} of type {type(data).__name__}"
    if reason is not None:
        raise ValueError(
            "`data` must be arrays, texts, a dataset or a function that makes a "
            f"generator. Received: {reason}."
        )


def inputs_of(item):
    """Returns the inputs of a dataset's item, without labels and sample weights."""
    return item[0] if isinstance(item, tuple) else item


def _is_scalar_text(x):
    is_scalar = getattr(x, "shape", None) == () and hasattr(x, "dtype")
    return is_scalar and any(k in str(x.dtype) for k in ("string", "<U", "|S"))


def is_array(x):
    """Returns whether `x` is an array or tensor of any library."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_image(x):
    """Returns whether `x` is a batch of raw images: four axes, uint8."""
    return x.dtype == np.uint8 and x.ndim == 4


def is_table(data):
    """Returns whether `data` holds rows in memory, rather than batches."""
    if isinstance(data, (list, tuple)):
        return holds_text(data) or all(map(is_array, data))
    return isinstance(data, dict) or is_array(data)


def holds_text(data):
    """Returns whether a list holds any text; `as_array` refuses anything else in it."""
    return any(isinstance(x, (str, bytes)) for x in data)


def as_arrays(inputs):
    """Converts rows or a batch, without labels, to nested arrays."""
    if isinstance(inputs, (list, tuple)) and (not inputs or holds_text(inputs)):
        # `np.array(inputs)` might nest deeper, as an element might be a list.
        texts = np.empty(len(inputs), dtype=object)
        texts[:] = inputs
        return as_array(texts)
    if isinstance(inputs, dict):
        return {name: as_arrays(x) for name, x in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return [as_arrays(x) for x in inputs]
    return as_array(inputs)


def as_array(x):
    """Converts to a NumPy array of numbers, or of strings only."""
    is_one = isinstance(x, (str, bytes, int, float, np.generic))
    if x is None or is_one or getattr(x, "shape", None) == ():
        advice = ". A batch must be an array or a list of texts"
        if hasattr(x, "shape"):
            advice += ": batch the dataset, for example by `data.batch(32)`"
        raise _no_array(f"{x!r:.80}{advice}")
    if "string" in str(getattr(x, "dtype", "")):
        return np.asarray(x, dtype=object)
    array = x if isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x)
    if array.dtype.kind != "O":
        return array
    others = [entry for entry in array.flat if not isinstance(entry, (str, bytes))]
    if not others:
        return array
    reason = f"{described(array)}, such as {others[0]!r:.80}"
    if isinstance(others[0], (list, tuple, np.ndarray)):
        reason += ". Pad rows to one length"
    elif len(others) < array.size:
        reason += " between texts. Drop it, or turn it into a text"
    raise _no_array(reason)


def _no_array(reason):
    return ValueError(
        f"Batches of `data` must hold arrays of numbers or texts. Received: {reason}."
    )


def trimmed(batch):
    """Cuts off padding that all rows share, as described at `SHORTEST`."""
    if not isinstance(batch, dict) or "padding_mask" not in batch:
        return batch
    mask = batch["padding_mask"].astype(bool)
    full, length = mask.shape[1], SHORTEST
    # Whether an axis of this length is one of tokens only names can tell: an image may
    # be as high as the text is long.
    others = [x for name, x in batch.items() if name not in TOKENS]
    if any(full in x.shape[1:] for x in others):
        return batch
    used = np.flatnonzero(mask.any(0))
    # Padding on the left stays, because positions are counted from the left end.
    wanted = used[-1] + 1 if len(used) else full
    while length < wanted:
        length += length if compiles_each_length() else SHORTEST
    return {name: x[:, :length] if name in TOKENS else x for name, x in batch.items()}
