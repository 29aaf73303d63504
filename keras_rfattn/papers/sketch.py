"""Random sketches of the kernel `(q · k)^p` ("polysketch", "polysketch_linear")."""

import math

import keras
from keras import ops

from keras_rfattn.backend import precise_einsum
from keras_rfattn.feature_maps.polynomial import (
    DEFAULT_DEGREE,
    DEFAULT_SKETCH_SIZE,
    Sketch,
)
from keras_rfattn.feature_maps.projected import ProjectedFeatureMap
from keras_rfattn.ops.features import Squared
from keras_rfattn.ops.kernel_attention import unit


@keras.saving.register_keras_serializable("keras_rfattn")
class PolySketch(Sketch, ProjectedFeatureMap):
    """Random polynomial sketch, non-negative (algorithm 1).

    Each transformation multiplies by a Gaussian matrix of r columns, and each product
    is divided by √r, so that `E[S(x) · S(y)] = (x · y)^{p/2}`. The square of
    `S(x) · S(y)` is biased upwards by the variance of the sketch. For degree 2, no
    sketch is needed and features are exact.

    Args:
        num_features: Sketch size r, 32 by default. Features have width r².
        degree: Degree p of the kernel, a power of 2 that is at least 2. Defaults to 4.
        projection: How the matrices are drawn: `"gaussian"` (default), `"orthogonal"`
            or a `keras_rfattn.projections.Projection`.
        seed: Seed of the vectors, a non-negative integer. If `None`, it is drawn from
            Keras' global seed generator.

    Raises:
        ValueError: If `num_features` is not a positive integer, `degree` is not a power
            of 2 that is at least 2, or `projection` is unknown.

    Reference:
        Kacham et al., "PolySketchFormer" (2024), algorithm 1 and theorem 1.1.

    Examples:
        >>> from keras_rfattn import layers, papers
        >>> feature_map = papers.PolySketch(num_features=4, degree=4, seed=0)
        >>> layer = layers.MultiHeadAttention(2, 8, feature_map=feature_map)
        >>> x = np.ones((1, 10, 16), "float32")
        >>> tuple(layer(x, x).shape), feature_map.output_dim
        ((1, 10, 16), 16)
    """

    default_num_features = DEFAULT_SKETCH_SIZE
    # Whether the matrices are trained.
    trains = False

    def __init__(
        self, num_features=None, degree=DEFAULT_DEGREE, projection="gaussian", **kwargs
    ):
        super().__init__(
            degree, num_features=num_features, projection=projection, **kwargs
        )

    def add_vectors(self):
        shapes, dim = [], self.head_dim
        for count in self.levels():
            shapes.append((count, dim, self.num_features))
            dim = self.num_features
        add = self.add_trained if self.trains else self.add_fixed
        self.matrices = [
            add(f"matrices_{level}", self.initializer(0, level), shape)
            for level, shape in enumerate(shapes)
        ]

    def assign_vectors(self, draw):
        for level, matrices in enumerate(self.matrices):
            matrices.assign(self.initializer(draw, level)(matrices.shape))

    def key_features(self, x):
        x, log_norm = unit(x)
        sketch = ops.repeat(ops.expand_dims(x, -2), self.degree // 2, axis=-2)
        for matrices in self.matrices:
            sketch = precise_einsum("...ch,chr->...cr", sketch, matrices)
            sketch = sketch[..., 0::2, :] * sketch[..., 1::2, :]
            sketch = sketch / math.sqrt(self.num_features)
        sketch, log_size = unit(sketch[..., 0, :])
        return Squared(sketch, self.degree * log_norm + 2 * log_size)


@keras.saving.register_keras_serializable("keras_rfattn")
class PolySketchLinear(PolySketch):
    """Learned linear polynomial sketch: `PolySketch` with trained matrices.

    Before training, it equals `PolySketch` with the same arguments.

    Reference:
        Kacham et al., "PolySketchFormer" (2024), section 2.3, matrices G.
    """

    trains = True
