"""Time the training of a vision transformer by its number of patches.

Chefs' Random Tables, figure 4, right (Likhosherstov et al., 2022): training steps per
second of a small ViT with softmax, FAVOR+ and FAVOR++, which take turns. The paper's
numbers of patches are 8², 16², 32², 40² and 44².

    python recipes/papers/time_vit.py

Cost: ten minutes on one core. Seen: docs/pages/reproductions/crt.md.
"""

import pathlib
import statistics
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

MAPS, PATCH, BATCH = ["favorplus", "favorpp"], 4, 4

parser = make_parser(__doc__, grids=[8, 16, 32, 44], num_features=16, steps=5)
args = parse(parser, grids=[2], steps=1)

import keras
import keras_hub
import numpy as np

import keras_rfattn


def main(args):
    for grid in args.grids:
        side = grid * PATCH
        x, y = np.zeros((BATCH, side, side, 3), "float32"), np.zeros(BATCH, "int32")
        models = {arm: classifier(args, arm, side) for arm in ("softmax", *MAPS)}
        times = {arm: [] for arm in models}
        for step in range(args.steps + 1):
            for arm, model in models.items():
                # Warm-up step, as the previous model has changed the state of memory.
                model.train_on_batch(x, y)
                begin = time.perf_counter()
                model.train_on_batch(x, y)
                if step:
                    times[arm].append(time.perf_counter() - begin)
        rates = {arm: 1 / statistics.median(x) for arm, x in times.items()}
        tell(args, {"patches": grid**2, "steps per second": rates})


def classifier(args, arm, side):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(side, side, 3), patch_size=PATCH, num_layers=4, num_heads=2,
        hidden_dim=64, mlp_dim=128, dropout_rate=0.0, attention_dropout=0.0,
    )  # fmt: skip
    pooled = keras.ops.mean(backbone.output[:, 1:], axis=1)
    model = keras.Model(backbone.input, keras.layers.Dense(10)(pooled))
    if arm in MAPS:
        keras_rfattn.replace_attention(
            model, arm, num_features=args.num_features, seed=0
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss)
    return model


if __name__ == "__main__":
    main(args)
