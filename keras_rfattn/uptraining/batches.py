"""Provides the batch of each step, as a pure function of the data, seed and step."""

import itertools
import operator

import keras
import numpy as np
from keras.src.trainers.data_adapters import is_torch_dataloader

from keras_rfattn.backend.devices import compiles_each_length
from keras_rfattn.layers.recording import described, is_text

# Number of batches that calibrate maps and that errors are measured on. They are kept,
# because a generator cannot provide them again.
HEAD = 4
# Number of batches of texts that are sorted by length together to reduce padding.
POOL = 32
# Batches of texts are padded to a multiple of this number of tokens. Where every new
# length must be compiled, they are padded to the number times a power of two.
SHORTEST = 16
# Names of KerasHub's inputs that have a column for each token.
TOKENS = "token_ids", "segment_ids", "padding_mask"


class Batches:
    """Batches of inputs without labels, from any data that `keras.Model.fit` takes."""

    def __init__(self, data, batch_size, seed, preprocessor=None):
        self.seed, self.preprocessor = seed, preprocessor
        self.batches = enumerate(_batches_of(data, batch_size, seed))
        first = itertools.islice(self.batches, HEAD)
        self.first = [self._prepared(batch) for _, batch in first]
        self.head = [batch["x"] for batch in self.first]
        if not self.head:
            raise ValueError("`data` must hold at least one batch. Received: none.")

    def __call__(self, step):
        """Returns the inputs of a step as NumPy arrays; after the head, in order."""
        return self.weighted(step)["x"]

    def weighted(self, step):
        """Returns a dict with the inputs "x" of a step, and their "weight" if given."""
        if step < len(self.first):
            return self.first[step]
        for place, batch in self.batches:
            if place == step:
                return self._prepared(batch)
            if place > step:
                break
        raise ValueError(
            f"`data` must hold a batch for each step. Received: none for step {step}. "
            "Pass a function that makes the generator, a dataset, or arrays, which can "
            "be read repeatedly."
        )

    def with_noise(self, step, count):
        """Returns a dict with the inputs "x" of a step, and with "noise"."""
        batch = self.weighted(step)
        seed = np.random.SeedSequence([self.seed, 1, step])
        generator = np.random.Generator(np.random.Philox(seed))
        rows = len(keras.tree.flatten(batch["x"])[0])
        return {**batch, "noise": generator.random((rows, count), dtype="float32")}

    def _prepared(self, weighted):
        """Returns a batch of the data, in which "x" are inputs of the model."""
        batch = weighted["x"]
        arrays = keras.tree.flatten(batch)
        are_texts = [is_text(x) for x in arrays]
        for x, x_is_text in zip(arrays, are_texts, strict=True):
            if x.ndim == 0 or len(x) == 0 or x.dtype.kind == "O" and not x_is_text:
                raise ValueError(
                    "Batches of `data` must hold rows: arrays of numbers, padded to "
                    f"one length, or lists of texts. Received: {described(x)}. Batch a "
                    "dataset of single rows first: `data.batch(32)`."
                )
        if any(are_texts) and self.preprocessor is None:
            raise ValueError(
                "`data` holds texts, but the model has no preprocessor. Received: "
                "texts. Turn them into tokens first, by a preprocessor or tokenizer, "
                "or uptrain a task that has a preprocessor."
            )
        are_images = [x.dtype == np.uint8 and x.ndim == 4 for x in arrays]
        if self.preprocessor is None or not any(are_texts + are_images):
            return weighted
        # Without `y`, KerasHub takes a tuple to be inputs and labels.
        labels = {"y": None} if isinstance(batch, list) else {}
        batch = tuple(batch) if isinstance(batch, list) else batch
        inputs = self.preprocessor(keras.tree.map_structure(_listed, batch), **labels)
        inputs = inputs[0] if isinstance(inputs, tuple) else inputs
        return {**weighted, "x": trimmed(as_arrays(inputs))}


def _batches_of(data, batch_size, seed):
    """Returns an iterator over the batches of all epochs, as `_weighted` makes them."""
    is_known = hasattr(data, "__iter__") or callable(data)
    is_one = isinstance(data, (str, bytes)) or getattr(data, "shape", None) == ()
    is_empty = isinstance(data, (list, tuple, dict)) and not data
    if is_one or is_empty or not is_known or hasattr(data, "columns"):
        raise ValueError(
            "`data` must be arrays, texts, a dataset or a function that makes a "
            f"generator. Received: data={data!r:.80} of type {type(data).__name__}. "
            "Put one text into a list, and pass the columns of a table as lists."
        )
    if isinstance(data, tuple) and not all(map(is_text, data)):
        x, _, weight = keras.utils.unpack_x_y_sample_weight(data)
        if weight is None:
            return _batches_of(x, batch_size, seed)
        return _of_rows(_weighted(data), batch_size, seed)
    if isinstance(data, keras.utils.PyDataset):
        count = data.num_batches
        order = itertools.count() if count is None else _order(count, seed)
        return (_weighted(data[int(i)]) for i in order)
    columns = data if isinstance(data, (list, tuple)) else [data]
    are_arrays = all(hasattr(x, "shape") and hasattr(x, "dtype") for x in columns)
    if isinstance(data, dict) or are_arrays or _holds_text(columns):
        return _of_rows({"x": as_arrays(data)}, batch_size, seed)
    return _of_items(_items(data), batch_size)


def _of_rows(arrays, batch_size, seed):
    """Yields batches of rows in memory, each row once an epoch, in random order."""
    columns = keras.tree.flatten(arrays)
    counts = {len(x) for x in columns}
    if len(counts) != 1:
        raise ValueError(
            "All arrays of `data` must have the same number of rows. Received: "
            f"{sorted(counts)}."
        )
    (count,), lengths = counts, None
    if all(map(is_text, columns)):
        lengths = np.array([sum(map(len, row)) for row in zip(*columns, strict=True)])

    order = _order(count, seed, lengths, batch_size)
    while rows := list(itertools.islice(order, batch_size)):
        yield keras.tree.map_structure(operator.itemgetter(rows), arrays)


def _order(count, seed, lengths=None, batch_size=None):
    """Yields the numbers below `count` in each epoch, in random order."""
    for epoch in itertools.count() if count else ():
        bits = np.random.Philox(np.random.SeedSequence([seed, epoch]))
        generator = np.random.Generator(bits)
        order = generator.permutation(count)
        if lengths is None:
            yield from order
            continue
        # Texts of similar lengths share a batch; these batches come in random order.
        for rows in np.split(order, range(POOL * batch_size, count, POOL * batch_size)):
            whole = len(rows) // batch_size * batch_size
            batches = rows[:whole][np.argsort(lengths[rows[:whole]])]
            batches = generator.permutation(batches.reshape(-1, batch_size))
            yield from batches.reshape(-1)
            yield from rows[whole:]


def _items(data):
    """Yields the items of an iterable, or of what a function makes, in each epoch."""
    is_exhausted = False
    while not is_exhausted:
        is_exhausted = True
        for item in data() if callable(data) else data:
            is_exhausted = False
            is_list = is_torch_dataloader(data) and isinstance(item, list)
            # Loaders return inputs and labels as a list.
            item = tuple(item) if is_list and not _holds_text(item) else item
            yield _weighted(item)


def _of_items(items, batch_size):
    """Yields items that are batches; puts those that hold a single text together."""
    for item in items:
        if any(x.ndim == 0 and is_text(x) for x in keras.tree.flatten(item)):
            rows = [item, *itertools.islice(items, batch_size - 1)]
            item = keras.tree.map_structure(lambda *x: np.stack(x), *rows)
        yield item


def _weighted(item):
    """Returns a dict with "x", and "weight" if there is one, of inputs and labels."""
    x, weight = item, None
    if isinstance(item, tuple):
        x, _, weight = keras.utils.unpack_x_y_sample_weight(item)
    weighted = {"x": as_arrays(x)}
    return weighted if weight is None else {**weighted, "weight": as_arrays(weight)}


def _holds_text(items):
    return any(isinstance(x, (str, bytes)) for x in items)


def as_arrays(x):
    """Converts rows, a batch or one row to nested NumPy arrays."""
    if isinstance(x, dict):
        return {name: as_arrays(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)) and x and not _holds_text(x):
        return [as_arrays(i) for i in x]
    if isinstance(x, (list, tuple)) or is_text(x):
        return np.array(x, dtype=object)
    return x if isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x)


def _listed(x):
    """Returns a list of strings if an array holds texts: some tokenizers need that."""
    if not is_text(x):
        return x
    return [text.decode() if isinstance(text, bytes) else text for text in x.tolist()]


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
