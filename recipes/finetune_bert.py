"""Make a fine-tuned BERT linear without its labels: SST-2, MRPC or STS.

The recipe fine-tunes the softmax checkpoint of replace_bert_attention.py, makes its
attention linear, and uptrains it on the texts of the task without labels.
finetune_linear_bert.py does so in the other order.

    python recipes/finetune_bert.py --data-dir DIR --task sst2 \
        --mechanism favorpp_learned --num-features 64 --tune-steps 100 --steps 300

DIR holds sst2/, mrpc/ and sts/ (formats: common/sentences.py). `--num-features` takes
one number, or one for each layer (0 keeps softmax), and `--softmax-heads` keeps single
heads softmax. Arms: the fine-tuned softmax model, the same made linear and uptrained
("uptrained") or not ("replaced"), `one_feature` (weights that do not depend on the
query, trained in the same way), and a linear model whose weights are fine-tuned from
random ones ("scratch"). Differences have 95 % intervals over rows and seeds.

Cost: some minutes a seed on one core. Seen: docs/pages/lab/uptraining.md.
"""

import pathlib

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="hedgehog", seeds=[0],
    stages=["calibrate", "attention", "features"], results="finetune_bert.jsonl",
)  # fmt: skip
parser.add_argument("--task", choices=["sst2", "mrpc", "sts"], default="sst2")
parser.add_argument("--num-features", nargs="+", type=int,
                    help="one, or one for each layer (0: softmax)")  # fmt: skip
parser.add_argument("--softmax-heads", nargs="+", default=[], help="layer:head")
parser.add_argument("--steps", type=int, default=600, help="of uptraining")
parser.add_argument("--tune-steps", type=int, default=300, help="of fine-tuning")
parser.set_defaults(stride=1)  # evaluates every n-th row
args = parse(parser, steps=2, tune_steps=2, stride=20)

import keras
from common.control_maps import OneFeature
from common.sentences import load
from common.tuning import compare, reinitialize

import keras_rfattn
from keras_rfattn import feature_maps
from keras_rfattn.models import Plan


def main(args):
    compare(args, arms)


def arms(args, task, seed):
    """Yields each arm with its classifier."""
    keras.utils.set_random_seed(seed)
    model = task.fine_tuned(*load(), seed)
    yield "softmax", model
    # The old optimizer has no slots for the weights of the maps.
    model.compile()
    softmax = model.get_weights()
    for arm in ("uptrained", "one_feature"):
        mechanism = args.mechanism if arm == "uptrained" else arm
        make_linear(args, model, mechanism, seed)
        if arm == "uptrained":
            yield "replaced", model
        report = keras_rfattn.uptrain(
            model, task.texts(), steps=args.steps, stages=args.stages, seed=seed,
            objective="features", preprocessor=task.preprocessor(), verbose=2,
        )  # fmt: skip
        print(report, flush=True)
        yield arm, model
        keras_rfattn.restore_attention(model)
        model.set_weights(softmax)
    keras.utils.set_random_seed(seed)
    backbone, tokenizer = load()
    make_linear(args, backbone, args.mechanism, seed)
    reinitialize(backbone, seed)
    yield "scratch", task.fine_tuned(backbone, tokenizer, seed)


def make_linear(args, model, mechanism, seed):
    """Replaces attention with one width, or one per layer; width 0 keeps softmax."""

    def feature_map(num_features):
        if num_features == 0:
            return None
        if mechanism == "one_feature":
            return OneFeature()
        return feature_maps.get(mechanism, num_features=num_features)

    paths = [row.path for row in keras_rfattn.describe_attention(model).rows]
    widths = args.num_features or [None]
    widths = len(paths) * widths if len(widths) == 1 else widths
    if len(widths) != len(paths):
        raise SystemExit(
            f"--num-features takes one number, or one for each of {len(paths)} layers. "
            f"Received: {widths}."
        )
    heads = {}
    for name in args.softmax_heads:
        layer, head = map(int, name.split(":"))
        heads.setdefault(paths[layer], []).append(head)
    plan = Plan(dict(zip(paths, map(feature_map, widths), strict=True)))
    keras_rfattn.replace_attention(model, plan, seed=seed, softmax_heads=heads)


if __name__ == "__main__":
    main(args)
