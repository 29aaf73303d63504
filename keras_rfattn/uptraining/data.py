"""Provides batches whose order is a pure function of the seed and the step."""

import itertools

import keras
import numpy as np

from keras_rfattn.layers.batches import is_text
from keras_rfattn.uptraining.inputs import (
    as_array,
    as_texts,
    check_data,
    inputs_of,
    is_image,
    is_iterable,
    is_pair,
    is_spent,
    is_table,
    normalized,
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

    Args:
        data: Rows or batches. Rows are an array, a dict or list of arrays, texts, or
            `(x, y)` or `(x, y, weight)` of these. Batches are a
            `keras.utils.PyDataset`, a `tf.data.Dataset`, a generator or a function that
            makes one, or a list of batches. A list of arrays is not a list of batches
            but the several inputs of a model.
        batch_size: Number of rows per batch if `data` holds rows. Texts of similar
            lengths share a batch.
        seed: Non-negative integer, the seed of the order.
        preprocessor: Function that turns texts and images into model inputs, or
            `None`.
        exclude: Texts that are dropped from `data`, or `None`.
        force: Whether all data goes through the preprocessor, not only texts and
            images.
        hint: Text for error messages that says where to find a preprocessor.

    Attributes:
        dropped: Number of rows that `exclude` has dropped so far.

    Raises:
        ValueError: If the data is empty, if it holds texts and there is no
            preprocessor, or if `exclude` is given and the data is not text.
    """

    def __init__(self, data, batch_size, seed, preprocessor=None, exclude=None,
                 force=False, hint="with a tokenizer"):  # fmt: skip
        self.batch_size, self.seed, self.force = batch_size, seed, force
        self.hint = hint
        self.preprocessor, self.dropped, self._lengths = preprocessor, 0, None
        self._form = None
        # PyTorch's data loaders return inputs and labels as a list, not a tuple.
        self.is_loader = type(data).__module__.startswith("torch.utils.data")
        exclude = () if exclude is None else exclude
        if isinstance(exclude, (str, bytes)) or not is_iterable(exclude):
            raise ValueError(
                "`exclude` must be a list of texts. Received: "
                f"exclude={exclude!r:.80}. Put a single text into a list."
            )
        # With an empty list, data that is not text must not be refused.
        self.exclude = {normalized(x) for x in exclude} or None
        if preprocessor is not None and not callable(preprocessor):
            raise ValueError(
                "`preprocessor` must be a function or a KerasHub preprocessor. "
                f"Received: preprocessor={preprocessor!r:.80}."
            )
        check_data(data)
        if isinstance(data, tuple):
            data = list(data) if all(map(is_text, data)) else inputs_of(data)
            check_data(data)
        if isinstance(data, keras.utils.PyDataset) and self.exclude is None:
            self._at = self._of_dataset(data)
        elif is_table(data):
            self._at = self._of_table(data)
        else:
            self._at = self._of_stream(data)

    def __call__(self, step):
        """Returns the inputs of a step as NumPy arrays."""
        batch = self._at(step)
        form = keras.tree.map_structure(lambda x: f"{x.ndim} axes", batch)
        self._form = form if self._form is None else self._form
        if form != self._form:
            raise ValueError(
                "All batches of `data` must hold arrays of the same names and numbers "
                f"of axes. Received: {form} in batch {step}, and {self._form} before."
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
        """Returns a dict with the inputs "x" of a step, and with "noise".

        The noise is a float32 array `(B, count)` of random numbers in [0, 1), which
        depends only on the seed and the step.
        """
        batch = self(step)
        seed = np.random.SeedSequence([self.seed, 1, step])
        generator = np.random.Generator(np.random.Philox(seed))
        rows = len(keras.tree.flatten(batch)[0])
        if rows == 0:
            raise ValueError(
                f"Each batch of `data` must hold a row. Received: none in batch {step}."
            )
        return {"x": batch, "noise": generator.random((rows, count), dtype="float32")}

    def _of_table(self, data):
        data = keras.tree.map_structure(as_array, as_texts(data))
        leaves = keras.tree.flatten(data)
        lengths = {len(x) for x in leaves}
        if len(lengths) != 1:
            raise ValueError(
                "All arrays of `data` must have the same number of rows. "
                f"Received: {sorted(lengths)}."
            )
        (count,) = lengths
        if self.exclude is not None:
            kept = self._kept(leaves)
            self.dropped = count - len(kept)
            data = keras.tree.map_structure(lambda x: x[kept], data)
            leaves, count = keras.tree.flatten(data), len(kept)
        if not count:
            raise ValueError(
                "`data` must hold at least one row. Received: none"
                + (f" after {self.dropped} were dropped." if self.dropped else ".")
            )

        if all(is_text(x) for x in leaves):
            rows = zip(*leaves, strict=True)
            self._lengths = np.array([sum(map(len, row)) for row in rows])

        def at(step):
            places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
            epochs = places // count
            rows = np.empty_like(places)
            for epoch in np.unique(epochs):
                here = epochs == epoch
                rows[here] = self._order(epoch, count)[places[here] % count]
            return self._ready(keras.tree.map_structure(lambda x: x[rows], data))

        return at

    def _of_dataset(self, data):
        count = data.num_batches
        if count == 0:
            raise ValueError("`data` must hold at least one batch. Received: none.")

        def at(step):
            if count is not None:
                step = int(self._order(step // count, count)[step % count])
            return self._ready(inputs_of(data[step]))

        return at

    def _passing(self, data, epoch):
        """Iterates over the batches of an epoch of a stream, or of a `PyDataset`."""
        if not isinstance(data, keras.utils.PyDataset):
            return iter(data() if callable(data) else data)
        count = data.num_batches
        order = itertools.count() if count is None else self._order(epoch, count)
        return (data[int(i)] for i in order)

    def _of_stream(self, data):
        state = {"step": -1, "last": None, "iterator": None, "counted": 0}
        # The first batches are needed several times, but a generator runs only once.
        head = {}

        def batches():
            empty = True
            for epoch in itertools.count():
                for place, item in enumerate(self._passing(data, epoch)):
                    item = tuple(item) if is_pair(self.is_loader, item) else item
                    batch, dropped = self._filtered(inputs_of(item))
                    if place >= state["counted"]:
                        self.dropped += dropped
                        state["counted"] = place + 1
                    if batch is not None or not dropped:
                        empty = False
                        yield batch
                if empty or is_spent(data):
                    return
                empty = True

        def at(step):
            if step in head:
                return self._ready(head[step])
            if state["iterator"] is None or step < state["step"]:
                if state["step"] >= 0 and is_spent(data):
                    raise ValueError(
                        "A generator yields its batches only once, but training "
                        f"returns to step {step}. Pass a function that makes the "
                        "generator."
                    )
                state.update(step=-1, iterator=batches())
            while state["step"] < step:
                try:
                    state["last"] = next(state["iterator"])
                except StopIteration:
                    less = f" ({self.dropped} rows excluded)" if self.dropped else ""
                    if state["step"] < 0:
                        raise DataEnded(
                            "`data` must hold at least one batch. Received: none"
                            f"{less}."
                        ) from None
                    raise DataEnded(
                        f"`data` ended after {state['step'] + 1} batches{less}, and "
                        f"step {step} needs one more. Pass a function that makes the "
                        "generator, a dataset, or arrays, which can be read repeatedly."
                    ) from None
                state["step"] += 1
                if state["step"] < HEAD:
                    head[state["step"]] = state["last"]
            return self._ready(state["last"])

        return at

    def _order(self, epoch, count):
        """Returns a random order of `count` rows or batches for an epoch."""
        key = int(epoch), count
        if getattr(self, "_known", (None,))[0] != key:
            bits = np.random.Philox(np.random.SeedSequence([self.seed, int(epoch)]))
            generator = np.random.Generator(bits)
            order = generator.permutation(count)
            if self._lengths is not None:
                order = self._grouped(order, generator)
            self._known = key, order
        return self._known[1]

    def _grouped(self, order, generator):
        """Groups texts of similar lengths into batches, which come in random order."""
        size, parts = self.batch_size, []
        for rows in np.split(order, range(POOL * size, len(order), POOL * size)):
            whole = len(rows) // size * size
            batches = rows[:whole][np.argsort(self._lengths[rows[:whole]])]
            parts += [*generator.permutation(batches.reshape(-1, size)), rows[whole:]]
        return np.concatenate(parts)

    def _kept(self, leaves):
        if not all(is_text(x) for x in leaves):
            raise ValueError(
                "`exclude` must be `None`, because `data` is not text. Received: "
                f"{[getattr(x, 'dtype', type(x)) for x in leaves]}. Pass the texts "
                "themselves, or drop them beforehand."
            )
        rows = zip(*(map(normalized, x) for x in leaves), strict=True)
        return np.array(
            [i for i, row in enumerate(rows) if not self.exclude.intersection(row)],
            "int64",
        )

    def _filtered(self, batch):
        """Drops excluded rows of a batch.

        Returns:
            The batch, or `None` if every row was dropped; and the number of rows that
            were dropped.
        """
        if self.exclude is None:
            return batch, 0
        batch = keras.tree.map_structure(as_array, as_texts(batch))
        leaves = keras.tree.flatten(batch)
        kept = self._kept(leaves)
        dropped = len(leaves[0]) - len(kept)
        if dropped and not len(kept):
            return None, dropped
        return keras.tree.map_structure(lambda x: x[kept], batch), dropped

    def _ready(self, batch):
        """Returns the batch as inputs of the model."""
        batch = keras.tree.map_structure(as_array, as_texts(batch))
        leaves = keras.tree.flatten(batch)
        is_raw = any(is_text(x) or is_image(x) for x in leaves)
        if self.preprocessor is None:
            if any(is_text(x) for x in leaves):
                raise ValueError(
                    "`data` holds texts, but the model has no preprocessor. Received: "
                    f"preprocessor=None. Pass a `preprocessor`, {self.hint}, or pass "
                    "tokens."
                )
            return batch
        if not is_raw and not self.force:
            return batch
        if isinstance(batch, list):
            # Without `y`, KerasHub takes a tuple to be inputs and labels.
            batch = self.preprocessor(tuple(batch), y=None)
        else:
            batch = self.preprocessor(batch)
        batch = inputs_of(batch) if isinstance(batch, tuple) else batch
        return trimmed(keras.tree.map_structure(as_array, batch))
