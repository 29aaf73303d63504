"""Make a fine-tuned BERT linear without its labels: SST-2 or MRPC.

The recipe fine-tunes the softmax checkpoint of replace_bert_attention.py, makes its
attention linear, and uptrains it on the texts of the task without labels.

    python recipes/finetune_bert.py --data-dir DIR --task sst2 \
        --mechanism favorpp_learned --num-features 64 --tune-steps 100 --steps 300

DIR holds sst2/ and mrpc/ (formats: common/sentences.py). `--num-features` takes one
number, or one for each layer (0 keeps softmax), and `--softmax-heads` keeps single
heads softmax. Arms: softmax, linear and not trained ("replaced"), "uptrained", and
`one_feature` (weights that do not depend on the query, trained in the same way).
Cost: 20 to 40 minutes a seed on one core. Seen: docs/pages/results/quality.md.
"""

import pathlib

from common.program import make_parser, parse, tell

parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="hedgehog", seeds=[0],
    stages=["calibrate", "attention", "features"],
)  # fmt: skip
parser.add_argument("--task", choices=["sst2", "mrpc"], default="sst2")
parser.add_argument("--num-features", nargs="+", type=int,
                    help="one, or one for each layer (0: softmax)")  # fmt: skip
parser.add_argument("--softmax-heads", nargs="+", default=[], help="layer:head")
parser.add_argument("--steps", type=int, default=600, help="of uptraining")
parser.add_argument("--tune-steps", type=int, default=300, help="of fine-tuning")
parser.set_defaults(stride=1)  # evaluates every n-th row
args = parse(parser, steps=2, tune_steps=2, stride=20)

import keras
import keras_hub
import numpy as np
from common import controls, sentences  # noqa: F401 (registers "one_feature")
from keras import ops

import keras_rfattn
from keras_rfattn import diagnostics, feature_maps
from keras_rfattn.models import Plan
from keras_rfattn.ops import Options

# Maximum number of tokens of a text or pair; hardly any is longer.
TOKENS = {"sst2": 48, "mrpc": 96}
BATCH, RATE = 32, 1e-4


def main(args):
    parts = [
        sentences.split(args.data_dir, args.task, part, args.stride)
        for part in ("dev", "test")
    ]
    texts, labels = zip(*parts[0], *parts[1], strict=True)
    for seed in args.seeds:
        for arm, model, inputs in arms(args, texts, seed):
            row = {"task": args.task, "arm": arm, "seed": seed, "rows": len(labels)}
            row["accuracy"] = accuracy(model, (inputs, labels))
            if arm == "uptrained":
                parts = diagnostics.attribute(model, (inputs, labels), accuracy)
                row |= vars(parts)
            tell(args, row)


def arms(args, evaluated, seed):
    """Yields each arm with its classifier, and the inputs of the evaluated texts."""
    backbone, tokenizer = sentences.load()
    preprocessor = sentences.preprocessor(tokenizer, TOKENS[args.task])
    train = sentences.split(args.data_dir, args.task, "train")
    model = fine_tuned(args, backbone, preprocessor, train, seed)
    inputs = preprocessed(preprocessor, evaluated)
    yield "softmax", model, inputs
    # The old optimizer has no slots for the weights of the maps.
    model.compile()
    softmax = model.get_weights()
    known = {x for text in evaluated for x in text}
    texts = [text for text, _ in train if not known & {*text}]
    if args.task == "mrpc":
        # The model sees a pair in the other order as another text.
        texts += [text[::-1] for text in texts]
    for arm in ("uptrained", "one_feature"):
        mechanism = args.mechanism if arm == "uptrained" else arm
        make_linear(args, model, mechanism, seed)
        if arm == "uptrained":
            yield "replaced", model, inputs
        task = sentences.embedder(backbone, tokenizer, TOKENS[args.task])
        report = keras_rfattn.uptrain(
            task, columns(texts), steps=args.steps, stages=args.stages, seed=seed,
            verbose=2,
        )  # fmt: skip
        print(report, flush=True)
        yield arm, model, inputs
        keras_rfattn.restore_attention(model)
        model.set_weights(softmax)


def fine_tuned(args, backbone, preprocessor, train, seed):
    """Returns a classifier after training the whole model."""
    keras.utils.set_random_seed(seed)
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
    generator = np.random.default_rng(seed)
    rows = np.concatenate([
        generator.choice(len(train), BATCH, replace=False)
        for _ in range(args.tune_steps)
    ])  # fmt: skip
    x = preprocessed(preprocessor, [text for text, _ in train])
    x, y = {k: v[rows] for k, v in x.items()}, np.array([y for _, y in train])[rows]
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, args.tune_steps, warmup_target=RATE,
        warmup_steps=args.tune_steps // 10 + 1,
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


def make_linear(args, model, mechanism, seed):
    """Replaces attention with one width, or one per layer; width 0 keeps softmax."""
    paths = [row.path for row in keras_rfattn.describe_attention(model).rows]
    widths = args.num_features or [None]
    widths = len(paths) * widths if len(widths) == 1 else widths
    heads = [tuple(map(int, name.split(":"))) for name in args.softmax_heads]
    maps = dict.fromkeys(paths)
    for layer, (path, width) in enumerate(zip(paths, widths, strict=True)):
        if width != 0:
            width = {} if mechanism == "one_feature" else {"num_features": width}
            kept = Options(softmax_heads=[head for i, head in heads if i == layer])
            maps[path] = feature_maps.get(mechanism, **width), kept
    keras_rfattn.replace_attention(model, Plan(maps), seed=seed)


def columns(texts):
    """Returns an array of texts, or a list of two for pairs."""
    arrays = [np.array(x, object) for x in zip(*texts, strict=True)]
    return arrays if len(arrays) > 1 else arrays[0]


def preprocessed(preprocessor, texts):
    x = [list(x) for x in zip(*texts, strict=True)]
    # Without `y`, a tuple would be taken for inputs and labels.
    inputs = preprocessor(tuple(x) if len(x) > 1 else x[0], y=None)
    return {k: ops.convert_to_numpy(x) for k, x in inputs.items()}


def accuracy(model, data):
    """Returns the share of right answers, in batches of similar length."""
    inputs, labels = data
    lengths = inputs["padding_mask"].sum(-1)
    answers = np.empty(len(lengths), int)
    order = np.argsort(lengths, kind="stable")
    for i in range(0, len(order), 64):
        rows = order[i : i + 64]
        longest = -(-lengths[rows].max() // 16) * 16
        batch = {k: x[rows, :longest] for k, x in inputs.items()}
        answers[rows] = model.predict_on_batch(batch).argmax(-1)
    return float(np.mean(answers == np.array(labels)))


if __name__ == "__main__":
    main(args)
