"""How the Mosaic GPU kernels divide the work of one call.

A sequence is cut into parts of several blocks, and features into tiles. `sum_tokens`
sums each part, `scanned` adds up the parts before (or after) each part, and the other
kernels walk through a part block by block, starting from these sums. Each tile is
attention of its own, and the outputs are joined afterwards by their denominators.
"""

import functools
import os
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keras_rfattn.fused.mosaic.blocks import SIZE, numbers

# The axes of the grid: a row of the batch, a key/value head, a tile of features and a
# part of the sequence.
AXES = ("batch", "head", "tile", "part")


class Plan(NamedTuple):
    """The sizes of one call.

    Attributes:
        batch: Number B of rows of the batch.
        heads: Number K of key/value heads.
        groups: Number of query heads for each of them.
        tiles: Number of tiles of features.
        blocks: Number of blocks in a part.
        is_shared: Whether all rows of the batch have one map.
        is_causal: Whether query i sees only keys `j <= i`.
    """

    batch: int
    heads: int
    groups: int
    tiles: int
    blocks: int
    is_shared: bool
    is_causal: bool

    def parts(self, length):
        """Returns the number of parts of a sequence."""
        return -(-length // (SIZE * self.blocks))

    def run(self, name, body, length, out_type, scratch, arrays):
        """Runs a kernel for all parts of a sequence; a program is one Pallas thread.

        Args:
            name: Name of the kernel.
            body: Function of the plan, of the number of blocks, and of references to
                the arrays, the outputs and the scratch.
            length: Number of tokens in the sequence.
            out_type: Shape or list of shapes of the outputs.
            scratch: Dict of types of memory.
            arrays: Arrays in the memory of the device.
        """
        kernel = plgpu.kernel(
            functools.partial(body, self, length // SIZE),
            out_type=out_type,
            scratch_types=scratch,
            grid=(self.batch, self.heads, self.tiles, self.parts(length)),
            grid_names=AXES,
            kernel_name=name,
            interpret=_interpreter(),
            # Half of the default, so that heads of 128 fit in shared memory.
            compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024),
        )
        return kernel(*arrays)


def _interpreter():
    """Returns the parameters of the interpreter, if kernels shall run in it.

    It looks for races, fills memory with NaN and refuses to read beyond it.
    """
    if os.environ.get("MOSAIC_INTERPRET") != "1":
        return None
    return plgpu.InterpretGPUParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )


class Place(NamedTuple):
    """Which part of the work a program does.

    Attributes:
        batch: Row of the batch.
        head: Key/value head.
        tile: Tile of features.
        part: Part of the sequence.
        first: First block of the part.
        owner: Row of the batch that has the map.
    """

    batch: Any
    head: Any
    tile: Any
    part: Any
    first: Any
    owner: Any

    @classmethod
    def current(cls, plan):
        """Returns the place of the program that calls."""
        batch, head, tile, part = (lax.axis_index(x) for x in AXES)
        owner = 0 if plan.is_shared else batch
        return cls(batch, head, tile, part, part * plan.blocks, owner)

    @property
    def features(self):
        """The features of the tile."""
        return pl.ds(self.tile * SIZE, SIZE)

    def load_map(self, vectors, parts, loaded):
        """Loads two parts of the vectors `(64, H)` of the tile."""
        for ref, part in zip(vectors, parts, strict=True):
            own = ref.at[self.owner, self.head, self.features]
            plgpu.copy_gmem_to_smem(own, part, loaded)
        plgpu.barrier_wait(loaded)

    def load_bias(self, bias, layout):
        """Loads the biases of the tile."""
        return numbers(bias.at[self.owner, self.head, self.features], layout)
