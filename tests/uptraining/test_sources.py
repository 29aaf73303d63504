"""`uptrain` takes what `fit` takes, and runs the callbacks of Keras."""

import csv

import keras
import numpy as np
import pytest

from tests.uptraining import models as m

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def encode(texts):
    """Stands for a preprocessor: a token for each letter."""
    ids = np.zeros((len(texts), m.TOKENS), "int32")
    for row, text in zip(ids, texts, strict=True):
        text = text.decode() if isinstance(text, bytes) else text
        row[: len(text)] = [1 + LETTERS.index(letter) for letter in text]
    return ids


def texts_of(rows):
    return ["".join(LETTERS[(i - 1) % 26] for i in row[row > 0]) for row in rows]


class Dataset(keras.utils.PyDataset):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    @property
    def num_batches(self):
        return None  # otherwise the order is random

    def __getitem__(self, index):
        return self.rows[index % 4 * 16 :][:16], np.zeros(16)


def batches(rows):
    return [rows[i : i + 16] for i in range(0, 64, 16)]


def data_of(kind, rows):
    if kind in ("tf.data", "tf.data of single texts"):
        tf = pytest.importorskip("tensorflow")
        if kind == "tf.data":
            return tf.data.Dataset.from_tensor_slices((rows, rows[:, 0])).batch(16)
        return tf.data.Dataset.from_tensor_slices(texts_of(rows))
    if kind == "DataLoader":
        torch = pytest.importorskip("torch")
        return torch.utils.data.DataLoader(torch.tensor(rows), batch_size=16)
    return {
        "batches": lambda: iter(batches(rows)),
        "PyDataset": Dataset(rows),
        "generator": (x for x in batches(rows) * 3),
        "function": lambda: ((x, None) for x in batches(rows)),
        "generator of single texts": (x for x in texts_of(rows) * 3),
    }[kind]


KINDS = (
    "tf.data", "DataLoader", "PyDataset", "generator", "function",
    "tf.data of single texts", "generator of single texts",
)  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    found = {}

    def trained(is_text):
        if is_text not in found:
            found[is_text] = trained_on("batches", is_text)
        return found[is_text]

    return trained


def trained_on(kind, is_text=False):
    model, rows = m.linear_model(), m.tokens()
    model.preprocessor = encode
    if is_text:
        rows = encode(texts_of(rows))  # of 26 letters
    report = m.uptrain(model, data_of(kind, rows), steps=6)
    return m.weights(model), report.before


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_of_the_same_batches_trains_the_same(kind, expected):
    is_text = "texts" in kind
    weights, before = trained_on(kind, is_text)
    wanted, error = expected(is_text)
    assert before == error > 0
    for a, b in zip(weights, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_early_stopping_and_logs_of_keras(tmp_path):
    file = tmp_path / "log.csv"
    stop = keras.callbacks.EarlyStopping(monitor="loss", min_delta=10, patience=2)
    log = keras.callbacks.CSVLogger(file, append=True)
    report = m.uptrain(m.linear_model(), steps=20, callbacks=[stop, log])
    # No epoch, of one step each, is better by 10 than the first.
    assert [stage.steps for stage in report.stages] == [3, 3]
    with open(file) as lines:
        rows = list(csv.DictReader(lines))
    # Stage "features" begins with epoch 10.
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2, 10, 11, 12]
    assert float(rows[0]["error"]) == pytest.approx(report.stages[0].first, rel=1e-5)
    assert float(rows[0]["error"]) > 0 and float(rows[3]["loss"]) > 0
