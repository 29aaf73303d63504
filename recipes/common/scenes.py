"""Simulates scenes for robots with a depth camera; not a recipe itself."""

import numpy as np
from scipy import special

ROWS, COLUMNS = 24, 32
# Lengths in meters. The expert keeps a margin that the robot itself does not need.
OBSTACLES, CAMERA, RANGE, RADIUS, MARGIN = 6, 0.5, 8.0, 0.2, 0.1
STRIDE, REACHED, AHEAD = 0.25, 0.4, 3.0
# An angle's probability falls to about a third for each `SOFTNESS` radians. A way that
# is blocked at once costs as much as `BLOCKED` radians.
SOFTNESS, BLOCKED = 0.1, 4.0
STEERING = np.deg2rad(np.linspace(-40, 40, 17))


class Scenes:
    """Scenes with boxes and cylinders on the ground, a goal, and a robot each."""

    def __init__(self, count, generator):
        shape, uniform = (count, OBSTACLES), generator.uniform
        self.center = np.stack([uniform(1, 5, shape), uniform(-2, 2, shape)], -1)
        self.half = uniform(0.15, 0.45, (*shape, 2))
        self.angle, self.height = uniform(0, np.pi, shape), uniform(0.6, 1.5, shape)
        self.is_round = generator.random(shape) < 0.5
        self.goal = np.stack([np.full(count, 6.0), uniform(-2, 2, count)], -1)
        self.place = np.zeros((count, 2))
        self.heading = np.zeros(count)

    def scatter(self, generator):
        """Places robots at random, facing roughly towards the goal."""
        count = len(self.goal)
        self.place = generator.uniform((0, -2), (5, 2), (count, 2))
        self.heading += self.toward_goal()[0] + generator.normal(0, 0.4, count)
        return self

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

    def move(self, choices):
        self.heading = self.heading + STEERING[choices]
        way = np.stack([np.cos(self.heading), np.sin(self.heading)], -1)
        self.place = self.place + STRIDE * way

    def arrivals(self):
        return self.toward_goal()[1] < REACHED

    def has_crashed(self):
        return self.cast(np.array([[1.0, 0, 0]]), RADIUS)[:, 0] == 0


def turned(x, angle):
    """Returns points `(..., 2)` in coordinates that are rotated by an angle."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([cos * x[..., 0] + sin * x[..., 1],
                     cos * x[..., 1] - sin * x[..., 0]], -1)  # fmt: skip
