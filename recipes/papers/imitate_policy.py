"""Train a robot policy on depth images with hybrid and with wide positive features.

Hybrid Random Features, section 4.4 and figure 4 (Choromanski et al., 2022), reduced: an
angular hybrid of 8 x 8 random vectors should do as well as FAVOR+ of 256. A small
vision Transformer imitates an expert, which replaces the paper's simulator and
evolution strategies, on ray-cast depth images of scenes of boxes and cylinders. The
expert gives each of 17 steering angles a probability, which depends on how free its way
is and how near to the goal it leads; the policy predicts it (cross entropy).

    KERAS_BACKEND=torch python recipes/papers/imitate_policy.py --seeds 0 1 2 3 4

Queries and keys have length one (`temperature=1`), as in the paper. Controls are
softmax, uniform attention (the mean of V) and no attention. Rows have the cross entropy
in training, the agreement with the most probable angle on new scenes, and the deviation
from it in degrees.
Cost: 6 minutes a seed on one busy core. Seen: docs/pages/reproductions/hrf.md.
"""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

UNIT = {"temperature": 1.0}
PATCH = 4
TOKENS = 1 + 24 * 32 // PATCH**2
EIGHT, SIXTEEN = ({"num_features": m, "num_coefficients": 8} for m in (8, 16))
MECHANISMS = {
    "hybrid_angular": ("hybrid_angular", EIGHT, UNIT),
    "hybrid_angular-16x8": ("hybrid_angular", SIXTEEN, UNIT),
    "favorplus-256": ("favorplus", {"num_features": 256}, UNIT),
}
ARMS = [*MECHANISMS, "softmax", "uniform", "no_attention"]
LAYERS, HEADS, DIM = 2, 2, 64
BATCH, RATE, WEIGHT_DECAY = 32, 2e-3, 1e-2

parser = make_parser(__doc__, arms=ARMS, seeds=[0])
parser.set_defaults(steps=800, trained=8000, tested=1000)
args = parse(
    parser, steps=2, trained=64, tested=32,
    arms=["hybrid_angular", "no_attention"],
)  # fmt: skip

import keras
import keras_hub
import numpy as np
from common import controls
from keras import layers, ops
from scipy import special

ROWS, COLUMNS = 24, 32
# Lengths in meters. The expert keeps a margin that the robot itself does not need.
OBSTACLES, CAMERA, RANGE, RADIUS, MARGIN, AHEAD = 6, 0.5, 8.0, 0.2, 0.1, 3.0
# An angle's probability falls to about a third for each `SOFTNESS` radians. A way that
# is blocked at once costs as much as `BLOCKED` radians.
SOFTNESS, BLOCKED = 0.1, 4.0
STEERING = np.deg2rad(np.linspace(-40, 40, 17))


def main(args):
    for seed in args.seeds:
        generator = np.random.default_rng(seed)
        train = observations(args.trained, generator)
        test = observations(args.tested, generator)
        for arm in args.arms:
            begin, model = time.time(), policy(seed)
            row = {"seed": seed, "arm": arm}
            row |= controls.set_attention(model, arm, MECHANISMS.get(arm), seed)
            row["loss"] = fit(model, *train, args.steps, seed)
            chosen = np.argmax(model.predict(test[0], verbose=0), -1)
            best = test[1].argmax(-1)
            row["agreement"] = float(np.mean(chosen == best))
            away = np.abs(STEERING[chosen] - STEERING[best])
            row["degrees"] = float(np.rad2deg(away.mean()))
            row["minutes"] = (time.time() - begin) / 60
            tell(args, row)


def policy(seed):
    """Builds a model of the logits of angles, from the output at the goal's token."""
    keras.utils.set_random_seed(seed)
    image = keras.Input((ROWS, COLUMNS, 1), name="image")
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


def fit(model, x, chances, steps, seed):
    """Trains a policy; returns the cross entropy in training."""
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=RATE, warmup_steps=steps // 10 + 1
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0), loss)
    generator = np.random.default_rng(seed)

    def batches():
        while True:
            rows = generator.integers(len(chances), size=BATCH)
            yield {name: part[rows] for name, part in x.items()}, chances[rows]

    history = model.fit(batches(), steps_per_epoch=steps, verbose=2, shuffle=False)
    return history.history["loss"][-1]


def observations(count, generator):
    """Returns observations in scenes without a collision, and expert probabilities."""
    parts, left = [], count
    while left > 0:
        scenes = Scenes(500, generator)
        free = scenes.cast(np.array([[1.0, 0, 0]]), RADIUS)[:, 0] > 0
        rows = {**scenes.observe(), "chances": scenes.expert()}
        parts.append({name: x[free][:left] for name, x in rows.items()})
        left -= free.sum()
    x = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return x, x.pop("chances")


class Scenes:
    """Scenes with boxes and cylinders on the ground, a goal, and a robot each."""

    def __init__(self, count, generator):
        shape, uniform = (count, OBSTACLES), generator.uniform
        self.center = np.stack([uniform(1, 5, shape), uniform(-2, 2, shape)], -1)
        self.half = uniform(0.15, 0.45, (*shape, 2))
        self.angle, self.height = uniform(0, np.pi, shape), uniform(0.6, 1.5, shape)
        self.is_round = generator.random(shape) < 0.5
        self.goal = np.stack([np.full(count, 6.0), uniform(-2, 2, count)], -1)
        # Robots stand at random places, and face roughly towards the goal.
        self.place = uniform((0, -2), (5, 2), (count, 2))
        self.heading = np.zeros(count)
        self.heading = self.toward_goal()[0] + generator.normal(0, 0.4, count)

    def toward_goal(self):
        """Returns `(angle, distance)` of the goal relative to the robots."""
        x, y = turned(self.goal - self.place, self.heading).T
        return np.arctan2(y, x), np.hypot(x, y)

    def cast(self, rays, margin=0.0):
        """Returns distances to obstacles along rays `(R, 3)`, in lengths of the ray."""
        center = turned(self.center - self.place[:, None], self.heading[:, None])
        center, angle = center[:, None], (self.angle - self.heading[:, None])[:, None]
        half, ray = self.half[:, None] + margin, rays[:, None, :2]
        # First the two intersections with a cylinder, then those with a box, where the
        # intervals of its two slabs overlap.
        along, square = np.sum(ray * center, -1), np.sum(ray**2, -1)
        room = along**2 - square * (np.sum(center**2, -1) - half[..., 0] ** 2)
        root = np.sqrt(np.maximum(room, 0))
        near, far = (along - root) / square, (along + root) / square
        middle, step = turned(center, angle), turned(ray, angle)
        step = np.where(np.abs(step) < 1e-9, 1e-9, step)
        ends = np.stack([(middle - half) / step, (middle + half) / step])
        first, last = ends.min(0).max(-1), ends.max(0).min(-1)
        is_round = self.is_round[:, None]
        is_hit = np.where(is_round, room > 0, first < last)
        near = np.maximum(np.where(is_round, near, first), 0)
        is_hit &= np.where(is_round, far, last) > 0
        top = CAMERA + near * rays[:, None, 2]
        is_hit &= (top >= 0) & (top <= self.height[:, None])
        return np.where(is_hit, near, np.inf).min(-1)

    def observe(self):
        """Returns policy inputs: depth images, and the goal as a bump over angles."""
        column, row = np.meshgrid(
            np.linspace(-1, 1, COLUMNS), np.linspace(0.75, -0.75, ROWS)
        )
        rays = np.stack([np.ones_like(row), -column, row], -1).reshape(-1, 3)
        # Upward rays get a distance to the ground far beyond the camera's range.
        ground = -CAMERA / np.minimum(rays[:, 2], -1e-9)
        depth = np.minimum(np.minimum(self.cast(rays), ground), RANGE) / RANGE
        angle, distance = self.toward_goal()
        angle = np.clip(angle, STEERING[0], STEERING[-1])[:, None]
        bumps = np.exp(-(((angle - STEERING) / np.deg2rad(5)) ** 2))
        goal = np.concatenate([bumps, distance[:, None] / RANGE], -1)
        image = depth.reshape(-1, ROWS, COLUMNS, 1)
        return {"image": np.float32(image), "goal": np.float32(goal)}

    def expert(self):
        """Returns probabilities of angles, high for a free way close to the goal."""
        rays = np.stack([np.cos(STEERING), np.sin(STEERING), 0 * STEERING], -1)
        angle, distance = self.toward_goal()
        needed = np.minimum(distance, AHEAD)[:, None]
        free = np.minimum(self.cast(rays, RADIUS + MARGIN), needed) / needed
        costs = np.abs(STEERING - angle[:, None]) + BLOCKED * (1 - free)
        return np.float32(special.softmax(-costs / SOFTNESS, axis=-1))


def turned(x, angle):
    """Returns points `(..., 2)` in coordinates that are rotated by an angle."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([cos * x[..., 0] + sin * x[..., 1],
                     cos * x[..., 1] - sin * x[..., 0]], -1)  # fmt: skip


if __name__ == "__main__":
    main(args)
