"""Provides the batch of each step, as a pure function of the seed and the step.

`Batches` interprets the data once: as `Rows` in memory, as a `Dataset` whose batches
can be read in any order, or as a `Stream` of batches.
"""

import keras
import numpy as np

from keras_rfattn.layers.batches import is_text
from keras_rfattn.uptraining.data import (
    as_array,
    as_arrays,
    check_data,
    inputs_of,
    is_image,
    is_table,
    trimmed,
)

# Batches used to calibrate and to measure errors; they are kept, so that even a
# generator can provide them again.
HEAD = 4
# Number of batches of texts that are sorted by length together to reduce padding.
POOL = 32


class DataEnded(ValueError):
    """Raised if the data has fewer batches than requested."""


class Batches:
    """Batches of inputs without labels, from any data that `keras.Model.fit` takes.

    Rows are an array, a dict or list of arrays, texts, or `(x, y)` or `(x, y, weight)`
    of these; `batch_size` is for them. Batches are a `keras.utils.PyDataset`, a
    `tf.data.Dataset`, a generator or a function that makes one, or a list of batches. A
    list of arrays is not a list of batches but the several inputs of a model. Texts and
    images go through the preprocessor; `hint` says in errors where to find one.
    """

    def __init__(
        self, data, batch_size, seed, preprocessor=None, hint="with a tokenizer"
    ):
        self.seed, self.preprocessor, self.hint = seed, preprocessor, hint
        # Names and numbers of axes of the inputs of the first batch.
        self.form = None
        check_data(data)
        if isinstance(data, tuple):
            data = list(data) if all(map(is_text, data)) else inputs_of(data)
            check_data(data)
        if isinstance(data, keras.utils.PyDataset):
            self.source = Dataset(data, seed)
        elif is_table(data):
            self.source = Rows(data, batch_size, seed)
        else:
            self.source = Stream(data)

    def __call__(self, step):
        """Returns the inputs of a step as NumPy arrays."""
        batch = self._preprocessed(self.source(step))
        form = keras.tree.map_structure(lambda x: f"{x.ndim} axes", batch)
        self.form = form if self.form is None else self.form
        if form != self.form:
            raise ValueError(
                "All batches of `data` must hold arrays of the same names and numbers "
                f"of axes. Received: {form} in batch {step}, and {self.form} before."
            )
        return batch

    def first(self, count):
        """Iterates over the inputs of the first `count` steps, fewer if data ends."""
        for step in range(count):
            try:
                yield self(step)
            except DataEnded:
                if step == 0:
                    raise
                return

    def with_noise(self, step, count):
        """Returns a dict with the inputs "x" of a step, and with "noise"."""
        batch = self(step)
        seed = np.random.SeedSequence([self.seed, 1, step])
        generator = np.random.Generator(np.random.Philox(seed))
        rows = len(keras.tree.flatten(batch)[0])
        if rows == 0:
            raise ValueError(
                f"Each batch of `data` must hold a row. Received: none in batch {step}."
            )
        return {"x": batch, "noise": generator.random((rows, count), dtype="float32")}

    def _preprocessed(self, batch):
        arrays = keras.tree.flatten(batch)
        has_text = any(map(is_text, arrays))
        if has_text and self.preprocessor is None:
            raise ValueError(
                "`data` holds texts, but the model has no preprocessor. Received: "
                f"texts. Turn them into tokens first, {self.hint}, or uptrain a task "
                "that has a preprocessor."
            )
        is_raw = has_text or any(map(is_image, arrays))
        if self.preprocessor is None or not is_raw:
            return batch
        if isinstance(batch, list):
            # Without `y`, KerasHub takes a tuple to be inputs and labels.
            batch = self.preprocessor(tuple(batch), y=None)
        else:
            batch = self.preprocessor(batch)
        return trimmed(keras.tree.map_structure(as_array, inputs_of(batch)))


class Rows:
    """Rows in memory: every epoch has each of them once, in a random order."""

    def __init__(self, data, batch_size, seed):
        self.arrays = as_arrays(data)
        lengths = {len(x) for x in keras.tree.flatten(self.arrays)}
        if len(lengths) != 1:
            raise ValueError(
                "All arrays of `data` must have the same number of rows. "
                f"Received: {sorted(lengths)}."
            )
        columns = keras.tree.flatten(self.arrays)
        self.count, self.batch_size = len(columns[0]), batch_size
        if not self.count:
            raise ValueError("`data` must hold at least one row. Received: none.")
        lengths = None
        if all(map(is_text, columns)):
            rows = zip(*columns, strict=True)
            lengths = np.array([sum(map(len, row)) for row in rows])
        self.order = Order(seed, batch_size, lengths)

    def __call__(self, step):
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = (divmod(place, self.count) for place in places)
        rows = [self.order(epoch, self.count)[place] for epoch, place in epochs]
        return keras.tree.map_structure(lambda x: x[rows], self.arrays)


class Dataset:
    """Batches of a `PyDataset`: every epoch has each of them once, in random order."""

    def __init__(self, data, seed):
        self.data, self.order = data, Order(seed)
        if data.num_batches == 0:
            raise ValueError("`data` must hold at least one batch. Received: none.")

    def __call__(self, step):
        count = self.data.num_batches
        if count is not None:
            step = int(self.order(step // count, count)[step % count])
        return as_arrays(inputs_of(self.data[step]))


class Stream:
    """Batches that can only be read one after the other, again in each epoch."""

    def __init__(self, data):
        self.data = data
        # PyTorch's data loaders return inputs and labels as a list, not a tuple.
        self.is_loader = type(data).__module__.startswith("torch.utils.data")
        self.batches, self.position, self.last = None, -1, None
        # The first batches are needed several times, but a generator runs only once.
        self.head = {}

    def __call__(self, step):
        if step in self.head:
            return self.head[step]
        if self.batches is None or step < self.position:
            if self.position >= 0 and self._runs_once():
                raise ValueError(
                    "A generator yields its batches only once, but training "
                    f"returns to step {step}. Pass a function that makes the "
                    "generator."
                )
            self.batches, self.position = self._read(), -1
        while self.position < step:
            self.last = self._next(step)
            self.position += 1
            if self.position < HEAD:
                self.head[self.position] = self.last
        return self.last

    def _next(self, step):
        batch = next(self.batches, None)
        if batch is not None:
            return batch
        if self.position < 0:
            raise DataEnded("`data` must hold at least one batch. Received: none.")
        raise DataEnded(
            f"`data` ended after {self.position + 1} batches, and step {step} needs "
            "one more. Pass a function that makes the generator, a dataset, or arrays, "
            "which can be read repeatedly."
        )

    def _read(self):
        """Yields the batches of all epochs."""
        is_empty = False
        while not is_empty:
            is_empty = True
            for item in self.data() if callable(self.data) else self.data:
                if self.is_loader and isinstance(item, list):
                    item = tuple(item)
                is_empty = False
                yield as_arrays(inputs_of(item))
            if self._runs_once():
                return

    def _runs_once(self):
        """Returns whether the data can be iterated over only once, as a generator."""
        return not callable(self.data) and iter(self.data) is self.data


class Order:
    """The random order of rows or batches, a pure function of the seed and the epoch.

    If there are `lengths` of texts, texts of similar lengths share a batch, and these
    batches come in random order.
    """

    def __init__(self, seed, batch_size=None, lengths=None):
        self.seed, self.batch_size, self.lengths = seed, batch_size, lengths
        self.known_epoch, self.known = None, None

    def __call__(self, epoch, count):
        """Returns the order of `count` rows or batches in an epoch."""
        if self.known_epoch != (epoch, count):
            bits = np.random.Philox(np.random.SeedSequence([self.seed, int(epoch)]))
            generator = np.random.Generator(bits)
            order = generator.permutation(count)
            if self.lengths is not None:
                order = self._grouped(order, generator)
            self.known_epoch, self.known = (epoch, count), order
        return self.known

    def _grouped(self, order, generator):
        size, parts = self.batch_size, []
        for rows in np.split(order, range(POOL * size, len(order), POOL * size)):
            whole = len(rows) // size * size
            batches = rows[:whole][np.argsort(self.lengths[rows[:whole]])]
            parts += [*generator.permutation(batches.reshape(-1, size)), rows[whole:]]
        return np.concatenate(parts)
