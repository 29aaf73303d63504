"""Train a robot policy on depth images with hybrid and with wide positive features.

Hybrid Random Features, section 4.4 and figure 4 (Choromanski et al., 2022), reduced: an
angular hybrid of 8 x 8 random vectors should do as well as FAVOR+ of 256, with fewer
multiplications. A small vision Transformer imitates an expert, which replaces the
paper's simulator and evolution strategies. Scenes of boxes and cylinders are ray-cast
to depth images of 32 x 24 pixels, as in the paper, and cut into patches. The expert
knows the scene. It gives each of 17 steering angles a probability, which depends on how
free its way is and how near to the goal it leads. The output at the goal's token has to
predict this distribution (cross entropy).

    KERAS_BACKEND=torch python recipes/papers/imitate_policy.py --seeds 0 1 2 3 4

Queries and keys have length one (`temperature=1`), as in the paper. This holds for both
maps, for FAVOR+ with as many multiplications as the hybrid, and for their exact
counterpart, "softmax_unit". Hybrids of more vectors, and of more for the angle
("8x32"), show which of these the hybrid lacks. Controls are softmax, uniform attention
(the mean of V), no attention, the expert itself, and going straight for the goal. The
recipe prints the agreement with the most probable angle on new scenes, the deviation
from it in degrees, and how often a robot so steered reaches the goal. Sizes, steps,
rate and the expert's probabilities were set with softmax and no attention, on scenes of
another seed.

Multiplications are those of attention for a token in a head: queries and keys with
random vectors, products that turn projections into features, and features with values.
The hybrid's width is 4 m (n + 1) = 288, above 256: it saves only projections. "ranking"
counts one value per token, because the paper's quadruped uses attention only to rank
tokens. At 49 tokens softmax takes fewer multiplications than any map. It takes more
than the hybrid above 322 tokens, and more than FAVOR+ above 528.
Cost: 7 minutes a seed on one busy core. For results see docs/pages/lab/hrf.md.
"""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.flags import make_parser, parse

UNIT = {"temperature": 1.0}
PATCH = 4
TOKENS = 1 + 24 * 32 // PATCH**2
HYBRIDS = {
    "hybrid_angular": {"num_features": 8, "num_coefficients": 8},
    "hybrid_angular-16x8": {"num_features": 16, "num_coefficients": 8},
    "hybrid_angular-32x8": {"num_features": 32, "num_coefficients": 8},
    "hybrid_angular-8x32": {"num_features": 8, "num_coefficients": 32},
}
MECHANISMS = {
    **{arm: ("hybrid_angular", sizes, UNIT) for arm, sizes in HYBRIDS.items()},
    "favorplus-256": ("favorplus", {"num_features": 256}, UNIT),
    "favorplus-158": ("favorplus", {"num_features": 158}, UNIT),
    # Attention is exact within a window, and one window holds all tokens.
    "softmax_unit": ("favorplus", {"num_features": 1}, {**UNIT, "window": TOKENS}),
}
ARMS = [*MECHANISMS, "softmax", "uniform", "no_attention"]
LAYERS, HEADS, DIM = 2, 2, 64
BATCH, RATE, WEIGHT_DECAY, MOVES = 32, 2e-3, 1e-2, 40

# Flags are parsed before the slow imports.
parser = make_parser(__doc__, arms=ARMS, seeds=[0], results="imitate_policy.jsonl")
parser.set_defaults(steps=800, trained=8000, tested=1000, episodes=200)
args = parse(
    parser, steps=2, trained=64, tested=32, episodes=8,
    arms=["hybrid_angular", "softmax_unit", "no_attention"],
)  # fmt: skip

import keras
import keras_hub
import numpy as np
from common import controls
from common.results import tell
from common.scenes import STEERING, Scenes
from common.schedules import cosine
from keras import layers, ops


def observations(count, generator):
    """Returns observations in scenes without a collision, and expert probabilities."""
    found, left = [], count
    while left > 0:
        scenes = Scenes(500, generator).scatter(generator)
        free = ~scenes.has_crashed()
        rows = {**scenes.observe(), "chances": scenes.expert()}
        found.append({name: x[free][:left] for name, x in rows.items()})
        left -= free.sum()
    found = {name: np.concatenate([x[name] for x in found]) for name in found[0]}
    return found, found.pop("chances")


def success(choose, count):
    """Returns the share of robots that reach the goal without a collision."""
    scenes = Scenes(count, np.random.default_rng(1_000_000))
    starts = ~scenes.has_crashed()
    alive, arrived = starts.copy(), np.zeros(count, bool)
    for _ in range(MOVES):
        scenes.move(choose(scenes))
        alive &= arrived | ~scenes.has_crashed()
        arrived |= scenes.arrivals() & alive
    return float(arrived.sum() / starts.sum())


def policy(seed):
    """Builds a model of the logits of angles, from the output at the goal's token."""
    keras.utils.set_random_seed(seed)
    image = keras.Input((24, 32, 1), name="image")
    goal = keras.Input((len(STEERING) + 1,), name="goal")
    x = layers.Reshape((TOKENS - 1, DIM))(layers.Conv2D(DIM, PATCH, PATCH)(image))
    x = x + keras_hub.layers.PositionEmbedding(TOKENS - 1)(x)
    x = ops.concatenate([layers.Dense(DIM)(goal)[:, None], x], axis=1)
    for _ in range(LAYERS):
        x = keras_hub.layers.TransformerEncoder(
            2 * DIM, HEADS, activation="gelu", normalize_first=True
        )(x)
    x = layers.LayerNormalization()(x[:, 0])
    return keras.Model([image, goal], layers.Dense(len(STEERING))(x))


def multiplications(arm, values=DIM // HEADS):
    """Returns the multiplications of attention per token and head, by value size."""
    dim = DIM // HEADS
    if arm == "no_attention":
        return 0
    if arm == "uniform":
        return values
    if arm.startswith("softmax"):
        return TOKENS * (dim + values)
    vectors = width = products = MECHANISMS[arm][1]["num_features"]
    if arm in HYBRIDS:
        coefficients = HYBRIDS[arm]["num_coefficients"]
        width = 4 * vectors * (coefficients + 1)
        vectors, products = vectors + coefficients, width
    # Counted twice, for keys and for queries. A token has its values and one more, for
    # the denominator.
    return 2 * (vectors * dim + products + width * (values + 1))


def main(args):
    rows = []

    def judge(row, choose, test):
        chosen, wanted = choose(test[0]), test[1].argmax(-1)
        row["agreement"] = float(np.mean(chosen == wanted))
        row["success"] = success(lambda scenes: choose(scenes.observe()), args.episodes)
        away = np.abs(STEERING[chosen] - STEERING[wanted])
        rows.append(row | {"degrees": float(np.rad2deg(away.mean()))})
        tell(args, rows[-1])

    for seed in args.seeds:
        generator = np.random.default_rng(seed)
        train = observations(args.trained, generator)
        test = observations(args.tested, generator)
        judge({"seed": seed, "start": "given", "arm": "straight"}, straight_on, test)
        for arm in args.arms:
            begin, model = time.time(), policy(seed)
            row = {"seed": seed, "start": "imitating", "arm": arm}
            row |= controls.set_attention(model, arm, MECHANISMS.get(arm), seed)
            row["multiplications"] = multiplications(arm)
            row["ranking"] = multiplications(arm, values=1)
            row["loss"] = fit(model, *train, args.steps, seed)
            row["minutes"] = (time.time() - begin) / 60
            judge(row, lambda x, m=model: np.argmax(m.predict(x, verbose=0), -1), test)
    expert = success(lambda scenes: scenes.expert().argmax(-1), args.episodes)
    print(f"the expert reaches the goal in a share of {expert:.3f}")
    names = "width", "multiplications", "ranking", "agreement", "success", "degrees"
    others = "favorplus-256", "favorplus-158", "uniform", "no_attention"
    pairs = [("hybrid_angular", arm) for arm in others]
    pairs = [[("imitating", arm) for arm in pair] for pair in pairs]
    controls.summarize(rows, names, pairs)


def straight_on(x):
    """Returns the indices of the angles nearest to that of the goal."""
    return np.argmax(x["goal"][:, :-1], -1)


def fit(model, x, chances, steps, seed):
    rate = cosine(RATE, steps)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0), loss)
    generator = np.random.default_rng(seed)

    def batches():
        while True:
            some = generator.integers(len(chances), size=BATCH)
            yield {name: part[some] for name, part in x.items()}, chances[some]

    history = model.fit(batches(), steps_per_epoch=steps, verbose=2, shuffle=False)
    return history.history["loss"][-1]


if __name__ == "__main__":
    main(args)
