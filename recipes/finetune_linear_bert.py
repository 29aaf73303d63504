"""Fine-tune a BERT that was made linear and uptrained before: SST-2, MRPC or STS.

The recipe makes the checkpoint of replace_bert_attention.py linear, uptrains it as
uptrain_bert.py does, and then fine-tunes all weights on a task. finetune_bert.py does
so in the other order, which keeps more quality.

    python recipes/finetune_linear_bert.py --data-dir DIR --task sst2 \
        --mechanism favorpp_learned --num-features 64 --tune-steps 100

DIR holds sst2/, mrpc/, sts/ and wikitext2/ (formats: common/sentences.py). With the
`--checkpoints` of uptrain_bert.py and the same flags, uptraining is not repeated. Arms,
all fine-tuned in the same way: softmax, linear and uptrained ("uptrained"), linear only
("replaced"), and linear from random weights ("scratch"). Differences have 95 %
intervals over rows and seeds.

Cost: that of uptrain_bert.py, and some minutes a seed for fine-tuning.
Seen: docs/pages/lab/uptraining.md.
"""

import pathlib

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
name = "finetune_linear_bert.jsonl"
parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="hedgehog", seeds=[0], results=name
)
parser.add_argument("--task", choices=["sst2", "mrpc", "sts"], default="sst2")
parser.add_argument("--num-features", type=int)
parser.add_argument("--steps", type=int, default=600, help="of uptraining")
parser.add_argument("--tune-steps", type=int, default=300, help="of fine-tuning")
parser.add_argument("--checkpoints", help="folder: interrupted runs resume from it")
parser.set_defaults(stride=1)  # evaluates every n-th row
args = parse(parser, steps=2, tune_steps=2, stride=20)

import keras
from common.sentences import load, uptrain_on_texts
from common.tuning import compare, reinitialize

import keras_rfattn


def main(args):
    compare(args, arms)


def arms(args, task, seed):
    """Yields each arm with its classifier."""
    for arm in ("softmax", "replaced", "uptrained", "scratch"):
        # This also seeds dropout.
        keras.utils.set_random_seed(seed)
        backbone, tokenizer = load()
        if arm != "softmax":
            keras_rfattn.replace_attention(
                backbone, args.mechanism, num_features=args.num_features, seed=seed
            )
        if arm == "uptrained":
            uptrain_on_texts(
                backbone, tokenizer, args.data_dir, seed, args.checkpoints,
                steps=args.steps,
            )  # fmt: skip
        if arm == "scratch":
            reinitialize(backbone, seed)
        yield arm, task.fine_tuned(backbone, tokenizer, seed)


if __name__ == "__main__":
    main(args)
