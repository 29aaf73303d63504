import keras
import numpy as np
import pytest

from keras_rfattn.uptraining.batches import Batches, trimmed

pytestmark = pytest.mark.once

ROWS = np.arange(10)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    batches = Batches(ROWS, 4, seed=3)
    seen = np.concatenate([batches(step) for step in range(5)])
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == list(ROWS)
    assert list(first) != list(second) and list(first) != list(ROWS)


def test_the_order_is_a_function_of_seed_and_step():
    a, b = Batches(ROWS, 4, seed=3), Batches(ROWS, 4, seed=3)
    # A run that is resumed passes batches over.
    for step in (0, 3, 7, 11):
        found = a(step)
        np.testing.assert_array_equal(found, Batches(ROWS, 4, seed=3)(step))
        np.testing.assert_array_equal(found, b(step))
    other = Batches(ROWS, 4, seed=4)
    assert any(np.any(a(step) != other(step)) for step in range(3))
    noise = a.with_noise(2, 3)["noise"]
    np.testing.assert_array_equal(noise, b.with_noise(2, 3)["noise"])
    assert noise.shape == (4, 3) and np.any(noise != a.with_noise(1, 3)["noise"])


def test_a_small_table_fills_a_batch():
    assert sorted(Batches(ROWS[:2], 4, seed=0)(0)) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "data",
    [
        {"a": ROWS, "b": 2 * ROWS},
        ({"a": ROWS, "b": 2 * ROWS}, ROWS),
        ({"a": ROWS, "b": 2 * ROWS}, ROWS, ROWS),
    ],
)
def test_rows_stay_together_and_labels_go(data):
    batch = Batches(data, 4, seed=0)(1)
    assert set(batch) == {"a", "b"}
    np.testing.assert_array_equal(batch["b"], 2 * batch["a"])


def test_several_inputs_are_a_list():
    a, b = Batches([ROWS, 3 * ROWS], 4, seed=0)(0)
    np.testing.assert_array_equal(b, 3 * a)


class Dataset(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.full(2, index), np.zeros(2)


def test_batches_of_a_dataset_in_random_order():
    batches = Batches(Dataset(), 99, seed=0)
    seen = [int(batches(step)[0]) for step in range(10)]
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))
    assert seen[:5] != seen[5:]


def stream():
    for i in range(3):
        yield np.full(2, i), np.zeros(2)


@pytest.mark.parametrize("kind", ["function", "list", "tf.data"])
def test_streams_start_again(kind):
    data = {"function": lambda: stream, "list": lambda: list(stream())}
    if kind == "tf.data":
        tf = pytest.importorskip("tensorflow")
        data[kind] = lambda: tf.data.Dataset.range(3).map(
            lambda i: (tf.fill([2], i), i)
        )
    batches = Batches(data[kind](), 99, seed=0)
    assert [int(batches(step)[0]) for step in (0, 1, 4, 2)] == [0, 1, 1, 2]


def test_a_generator_ends():
    batches = Batches(stream(), 99, seed=0)
    # The first few are kept.
    assert [int(batches(i)[0]) for i in (1, 0, 2)] == [1, 0, 2]
    with pytest.raises(ValueError, match="none for step 3"):
        batches(3)
    assert len(Batches(stream(), 99, seed=0).head) == 3
    batches = Batches((np.full(2, i) for i in range(9)), 99, seed=0)
    assert int(batches(8)[0]) == 8 and int(batches(2)[0]) == 2
    with pytest.raises(ValueError, match="none for step 5"):
        batches(5)


def lengths(texts, y=None):
    """Stands for a preprocessor: as many tokens as letters, of at most 64."""
    texts = texts[0] if isinstance(texts, tuple) else texts
    # KerasHub's byte pair tokenizers refuse arrays and bytes.
    assert isinstance(texts, list) and all(isinstance(x, str) for x in texts)
    ids = np.zeros((len(texts), 64), "int32")
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = 1
    return {"token_ids": ids, "padding_mask": ids}, np.zeros(len(texts))


@pytest.mark.parametrize("kind", ["list", "array", "pair", "tensor", "stream"])
def test_texts_go_through_the_preprocessor(kind):
    texts = ["one", "two words", "a longer text than those", "four"]
    data = {
        "list": texts,
        "array": np.array(texts),
        "pair": (texts, [0, 1, 0, 1]),
        "stream": lambda: iter([np.array(texts[:2]), np.array(texts[2:])]),
    }
    if kind == "tensor":
        data[kind] = pytest.importorskip("tensorflow").constant(texts)
    batches = Batches(data[kind], 4, seed=0, preprocessor=lengths)
    batch = batches(0)
    # Padding is cut off, but for a power of two.
    assert set(batch) == {"token_ids", "padding_mask"}
    assert batch["token_ids"].shape[1] == (16 if kind == "stream" else 32)
    with pytest.raises(ValueError, match="has no preprocessor"):
        Batches(data[kind], 4, seed=0)(0)


def test_pairs_of_texts():
    hub = pytest.importorskip("keras_hub")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    encode = hub.models.BertTextClassifierPreprocessor(
        hub.models.BertTokenizer(words), sequence_length=32
    )
    left, right = np.array(["one", "two"]), np.array(["two three", "one"])
    batch = Batches([left, right], 2, 0, encode)(0)
    rows = {tuple(row[row > 0]) for row in batch["token_ids"]}
    assert rows == {(2, 5, 3, 6, 7, 3), (2, 6, 3, 5, 3)}
    assert batch["token_ids"].shape[1] == 16


def test_texts_of_similar_lengths_share_a_batch():
    generator = np.random.default_rng(0)
    texts = [f"{i:04}" + "x" * generator.integers(60) for i in range(1003)]
    batches = Batches(texts, 10, 0, lambda x: np.array([[len(t)] for t in x]))
    spread = [np.ptp(batches(step)) for step in range(100)]
    assert np.mean(spread) < 5 and np.ptp([len(t) for t in texts]) > 50
    # Neighbours in time differ all the same, and every text comes once an epoch.
    batches = Batches(texts, 10, 0, lambda x: np.array([[len(t)] for t in x]))
    means = [batches(step).mean() for step in range(100)]
    assert np.mean(np.abs(np.diff(means))) > 10
    batches = Batches(texts, 10, 0, lambda x: np.array([int(t[:4]) for t in x]))
    rows = np.concatenate([batches(step) for step in range(101)])
    assert sorted(rows[:1003]) == list(range(1003))


@pytest.mark.parametrize("used, eager, compiled", [
    (3, 16, 16), (16, 16, 16), (17, 32, 32), (40, 48, 64), (70, 80, 96), (96, 96, 96),
])  # fmt: skip
def test_padding_goes_but_for_few_lengths(used, eager, compiled):
    mask = np.arange(96)[None] < np.array([[1], [used]])
    batch = {"padding_mask": mask, "token_ids": 7 * mask, "labels": np.zeros((2, 3))}
    found = trimmed(batch)
    length = eager if keras.backend.backend() == "torch" else compiled
    assert found["token_ids"].shape == found["padding_mask"].shape == (2, length)
    assert found["token_ids"].sum() == 7 * (used + 1)
    assert found["labels"].shape == (2, 3)


@pytest.mark.parametrize(
    "shape", [(2, 96, 4, 3), (2, 4, 96, 3), (2, 96), (2, 96, 96)], ids=str
)
def test_arrays_that_may_have_other_axes_are_not_cut(shape):
    mask = np.arange(96)[None] < np.array([[1], [3]])
    batch = {"padding_mask": mask, "token_ids": 7 * mask, "images": np.ones(shape)}
    found = trimmed(batch)
    assert {name: x.shape for name, x in found.items()} == {
        "padding_mask": (2, 96), "token_ids": (2, 96), "images": shape
    }  # fmt: skip


def one_by_one(kind, labelled):
    """Single texts, as a dataset yields them that is not batched."""
    texts = ["one", "four", "three"]
    if kind == "tf.data":
        tf = pytest.importorskip("tensorflow")
        data = tf.data.Dataset.from_tensor_slices(texts)
        return data.map(lambda x: (x, 0)) if labelled else data
    kinds = {
        "array": np.array, "object": lambda x: np.array(x, object), "str": str,
        "scalar": np.str_,
    }  # fmt: skip
    items = [kinds[kind](x) for x in texts]
    return lambda: iter([(x, 0) for x in items] if labelled else items)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("kind", ["tf.data", "array", "object", "scalar", "str"])
def test_single_texts_are_batched(kind, labelled):
    batches = Batches(one_by_one(kind, labelled), 2, 0, lengths)
    found = [batches(step)["token_ids"].sum(1).tolist() for step in range(3)]
    # An epoch has three texts.
    assert found == [[3, 4], [5, 3], [4, 5]]


def test_single_inputs_that_hold_a_text_are_batched():
    def rows():
        for i in range(4):
            yield {"prompts": "a" * i, "images": np.full((2, 2, 3), i)}, i

    batch = Batches(rows, 3, 0, lambda x: x)(0)
    assert batch["prompts"].tolist() == ["", "a", "aa"]
    assert batch["images"].shape == (3, 2, 2, 3) and batch["images"].max() == 2
    pairs = Batches(
        lambda: iter([((np.array("a"), np.array("bb")), 1)] * 2), 2, 0, PAIR
    )
    assert pairs(0).tolist() == [[1, 2], [1, 2]]


def PAIR(x, y=None):
    return np.array([[len(a), len(b)] for a, b in zip(*x, strict=True)])


@pytest.mark.parametrize("row", [3, np.float32(3), None, [[1], [1, 2]]], ids=str)
def test_single_rows_of_numbers_are_refused(row):
    with pytest.raises(
        ValueError, match=r"arrays of numbers, padded.*data.batch\(32\)"
    ):
        Batches(lambda: iter([row]), 4, 0)


@pytest.mark.parametrize(
    "kind", ["arrays", "labelled", "dicts", "texts", "texts, labelled"]
)
def test_loaders_of_pytorch(kind):
    torch = pytest.importorskip("torch")
    texts, numbers = ["one", "two", "four", "three"], list(np.eye(4))
    rows = {
        "arrays": numbers,
        "labelled": [(x, 0) for x in numbers],
        "dicts": [{"a": x, "b": 2 * x} for x in numbers],
        "texts": texts,
        "texts, labelled": [(x, 0) for x in texts],
    }[kind]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    batches = Batches(loader, 99, 0, lengths)
    first, again = batches(0), batches(2)
    if "texts" in kind:
        assert first["token_ids"].sum(1).tolist() == [3, 3]
        first, again = first["token_ids"], again["token_ids"]
    elif kind == "dicts":
        np.testing.assert_array_equal(first["b"], 2 * np.eye(4)[:2])
        first, again = first["a"], again["a"]
    if "texts" not in kind:
        np.testing.assert_array_equal(first, np.eye(4)[:2])
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("data", [np.zeros((0, 3)), {"a": ROWS, "b": ROWS[:3]}])
def test_tables_that_are_none(data):
    with pytest.raises(ValueError, match="at least one|same number"):
        Batches(data, 4, seed=0)(0)


def test_batches_without_a_row_are_not_passed_over():
    with pytest.raises(ValueError, match="must hold rows"):
        Batches([[], ["a text"]], 2, 0, np.asarray)


def test_images_of_bytes_go_through_the_preprocessor():
    images = np.zeros((3, 2, 2, 3), "uint8")
    found = Batches(images, 3, 0, lambda x: (x / 255 + 1, None))(0)
    np.testing.assert_array_equal(found, np.ones((3, 2, 2, 3)))
    floats = images.astype("float32")
    np.testing.assert_array_equal(Batches(floats, 3, 0, lengths)(0), floats)
