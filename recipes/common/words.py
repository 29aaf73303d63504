"""WikiText-2 as words, and fitting models to them; not a recipe itself."""

import collections

import keras
import numpy as np
from scipy import special


def load(data_dir, vocabulary_size, length):
    """Returns rows of word numbers `(n, length + 1)` for training, validation and test.

    The first 90 % of `valid.txt` are for training and the rest for validation. Words
    are numbered in the order in which they first appear, and rare words are `<unk>`.
    """
    folder = data_dir / "wikitext2"
    texts = [(folder / f"{part}.txt").read_text().split() for part in ("valid", "test")]
    counts = collections.Counter(texts[0])
    common = {word for word, _ in counts.most_common(vocabulary_size - 1)} - {"<unk>"}
    number = {word: i + 1 for i, word in enumerate(w for w in counts if w in common)}
    rows = []
    for text in texts:
        ids = np.array([number.get(word, 0) for word in text], "int32")
        starts = range(0, len(ids) - length, length)
        rows.append(np.stack([ids[i : i + length + 1] for i in starts]))
    watched = max(1, len(rows[0]) // 10)
    return rows[0][:-watched], rows[0][-watched:], rows[1]


def fit(model, data, watched, epochs, patience=0):
    """Trains on `(x, y)` while the validation loss falls; returns the epochs it took.

    `patience` is the number of epochs without improvement after which training stops.
    """
    stop = keras.callbacks.EarlyStopping(
        "val_loss", patience=patience, restore_best_weights=True
    )
    history = model.fit(
        *data, batch_size=16, epochs=epochs, callbacks=[stop],
        validation_data=watched, verbose=2,
    )  # fmt: skip
    return len(history.epoch)


def perplexity(states, classes, targets):
    """Returns the perplexity under the full softmax over `states @ classes.T`."""
    total, targets = 0.0, targets.ravel()
    states = states.reshape(len(targets), -1)
    for i in range(0, len(states), 4096):
        logs = special.log_softmax(states[i : i + 4096] @ classes.T, axis=-1)
        total -= np.sum(np.take_along_axis(logs, targets[i : i + 4096, None], 1))
    return float(np.exp(total / len(targets)))
