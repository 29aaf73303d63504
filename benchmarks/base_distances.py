"""How far roundings and fine-tunes of MiniLM are from the checkpoint.

    python benchmarks/base_distances.py --data-dir DATA

Prints the table of docs/pages/guides/share.md, from which the limits of
`keras_rfattn.load_maps` were chosen: for each variant the largest distance of a weight,
relative to its norm, in %, and the same as 16 random projections estimate it. Weights
that were 0 are left out of it. DATA holds `sst2`. About ten minutes on one core.
"""

import argparse
import math
import os
import pathlib
import sys
import warnings

RECIPES = pathlib.Path(__file__).parents[1] / "recipes"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gguf
import keras
import keras_hub
import numpy as np

import keras_rfattn
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.maps import base as bases
from keras_rfattn.models import stable_names

sys.path.insert(0, str(RECIPES))
from common import sentences

SET = "minilm_favorpp_learned_64"
KINDS = "attention", "matrices", "vectors"


def weights(model):
    """Returns a dict from names to the kind and value of each of a model's weights."""
    owned = stable_names.owned_by_name(model, FeatureMap)
    inside = tuple(f"{path}/" for path in stable_names.sites_by_name(model))
    found = {}
    for name, (variable, layer) in owned.items():
        if bases._is_own(name, variable, layer):
            kind = "attention" if name.startswith(inside) else "matrices"
            kind = kind if variable.name in bases.MATRICES else "vectors"
            sketch = bases._sketch(variable, layer)
            found[name] = kind, bases._value(variable, layer), sketch
    return found


def row(name, original, model):
    """Prints the distances of a variant, and whether the shipped set loads on it."""
    now, cells = weights(model), []
    for kind in KINDS:
        distances, estimates = [0.0], [0.0]
        for key, (its_kind, value, sketch) in original.items():
            norm = np.linalg.norm(value)
            # `load_maps` refuses any change of a weight that was 0.
            if its_kind == kind and norm > 0:
                distances.append(np.linalg.norm(now[key][1] - value) / norm)
                estimates.append(bases._relative(sketch, now[key][2]))
        cells.append(f"{100 * max(distances):6.2f} {100 * max(estimates):6.2f}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            keras_rfattn.load_maps(model, SET)
        result = "loads"
    except ValueError:
        result = "refused"
    print(f"{name:<34}{'   '.join(cells)}   {result}", flush=True)


def as_in_gguf(kind):
    """Returns MiniLM with its matrices rounded in blocks, as a GGUF file holds them."""
    model, _ = sentences.load()
    kind = gguf.GGMLQuantizationType[kind]
    for variable, _ in stable_names.owned_by_name(model, FeatureMap).values():
        inputs = math.prod(variable.shape[:-1])
        # Blocks of 32 along the inputs; embeddings are stored the other way around.
        if variable.name in bases.MATRICES and inputs % 32 == 0:
            value = keras.ops.convert_to_numpy(variable.value)
            rows = np.ascontiguousarray(value.reshape(inputs, -1).T)
            rows = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
            variable.assign(rows.T.reshape(value.shape))
    return model


def tuned(data, rate, steps, rank=None):
    """Returns MiniLM after some steps of training on the sentiment of sentences."""
    keras.utils.set_random_seed(0)
    backbone, tokenizer = sentences.load()
    if rank is not None:
        backbone.enable_lora(rank)
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
    train = sentences.split(data, "sst2", "train")
    chosen = np.random.default_rng(0).choice(len(train), 16 * steps)
    texts, labels = zip(*(train[i] for i in chosen), strict=True)
    preprocessor = sentences.preprocessor(tokenizer, 48)
    x = preprocessor([text[0] for text in texts], y=None)
    x = {k: keras.ops.convert_to_numpy(v) for k, v in x.items()}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    model.fit(x, np.array(labels), batch_size=16, shuffle=False, verbose=0)
    return backbone


def main(data):
    original = weights(sentences.load()[0])
    print(f"{'% (true, estimated)':<34}{'   '.join(f'{x:>13}' for x in KINDS)}")
    for dtype in ("bfloat16", "float16"):
        row(dtype, original, sentences.load(dtype=dtype)[0])
    model, _ = sentences.load()
    model.quantize("int8")
    row("int8", original, model)
    for kind in ("Q8_0", "Q4_1"):
        row(f"GGUF {kind}", original, as_in_gguf(kind))
    for rate, steps in ((1e-5, 10), (1e-5, 100), (1e-4, 100)):
        model = tuned(data, rate, steps)
        row(f"Adam {rate:g}, {steps} steps", original, model)
    model = tuned(data, 1e-4, 100, rank=4)
    row("LoRA of rank 4, Adam 1e-4, 100 steps", original, model)


if __name__ == "__main__":
    main(args.data_dir)
