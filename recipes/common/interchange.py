"""Whether a linear model's embeddings can take the place of softmax's; not a recipe.

An index that was built with softmax should answer queries that a linear model embeds.
Neither the sentences nor the long texts of the measurement may be trained on.
"""

import keras_hub
import numpy as np
from common import length_training, long_documents, sentences
from scipy.stats import spearmanr

SHORTEST, LONGEST = 256, 512  # tokens of the long texts
NEAREST = 10


def texts(data, tokenizer, count, long_count):
    """Returns token ids of "sentences", "articles" and "messages": a dict of lists.

    Sentences are evenly spread over those of the evaluated STS pairs. There are
    `long_count` texts of each other kind, from the test part of `long_documents.read`.
    """
    pairs = sentences.pairs_of(data, "*.test.tsv")
    found = sorted({s for *_, a, b in pairs for s in (a, b)})
    places = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)
    short = [
        np.asarray(x, "int32")[:126] for x in tokenizer([found[i] for i in places])
    ]
    corpus = long_documents.read(data, tokenizer, "test", 2 * long_count)
    lengths = np.linspace(SHORTEST, LONGEST, long_count).astype(int) - 2
    kinds = {"sentences": short}
    for kind, source in corpus._asdict().items():
        if source:
            corpus = long_documents.Corpus(source, [])
            runs = long_documents.stream(corpus, LONGEST, long_count)
            kinds[kind] = [
                np.concatenate(long_documents.cut(run, length))
                for run, length in zip(runs, lengths, strict=True)
            ]
    return kinds


def embedded(backbone, tokenizer, documents):
    """Returns a dict from kinds of text to unit embeddings `(texts, dim)`."""
    # A new task, because compiled functions keep the attention that a model had.
    model = keras_hub.models.BertTextEmbedder(backbone)
    return {
        kind: length_training.embed(model, some, tokenizer)
        for kind, some in documents.items()
    }


def row(given, wanted):
    """Returns the measures of each kind of text, under names for a row of results."""
    return {
        f"{kind}: {name}": value
        for kind in wanted
        for name, value in measures(given[kind], wanted[kind]).items()
    }


def measures(given, wanted):
    """Compares unit embeddings with those of softmax, `wanted`, of the same texts.

    Returns:
        A dict with the mean and the lowest cosine of a text's two embeddings; the share
        of the ten texts nearest to a query in softmax's index that are also among the
        ten nearest to the same query in `given`, where an index holds all texts but the
        query; and the rank correlation of all similarities in `given` and in `wanted`.
    """
    cosines = np.sum(given * wanted, axis=-1)
    nearest = [_nearest(queries @ wanted.T) for queries in (given, wanted)]
    shared = [len({*a} & {*b}) / len(a) for a, b in zip(*nearest, strict=True)]
    upper = np.triu_indices(len(wanted), 1)
    similarities = [(x @ x.T)[upper] for x in (given, wanted)]
    return {
        "mean cosine": float(cosines.mean()),
        "lowest cosine": float(cosines.min()),
        "recall at 10": float(np.mean(shared)),
        "correlation of similarities": float(spearmanr(*similarities)[0]),
    }


def _nearest(similarities):
    """Returns the places of the texts nearest to each query, which is none of them."""
    np.fill_diagonal(similarities, -np.inf)
    count = min(NEAREST, len(similarities) - 1)
    return np.argsort(-similarities, axis=1, kind="stable")[:, :count]
