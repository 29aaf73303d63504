"""Sequences over the devices of a mesh, a stretch of tokens on each."""

import keras


class SequenceParallel(keras.distribution.ModelParallel):
    """`keras.distribution.ModelParallel` that divides sequences, too.

        mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "sequence"], devices)
        keras.distribution.set_distribution(SequenceParallel(
            layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"))

    Each device holds a stretch of tokens. Linear attention exchanges sums, whose size
    does not depend on the length, and is what it is on one device up to rounding; all
    else that a transformer does concerns one token. JAX.

    Axis 1 of the data is divided, if it is a multiple of the number of devices; where
    queries or keys of a layer are not, or it has softmax attention, the compiler
    gathers what it needs.

    Args:
        layout_map: `keras.distribution.LayoutMap`, of no entry where weights are to be
            on every device; or what `layout_map` gives, for both.
        batch_dim_name: Name of the mesh's axis for the batch, its first by default.
        sequence_dim_name: Name of the mesh's axis for tokens.
        **kwargs: Of `ModelParallel`.

    Raises:
        ValueError: If the mesh has no such axis, or the batch's is the same.
        NotImplementedError: On another backend than JAX.
    """

    def __init__(
        self, *, layout_map=None, batch_dim_name=None, sequence_dim_name="sequence",
        **kwargs,
    ):  # fmt: skip
        if keras.backend.backend() != "jax":
            raise NotImplementedError(
                "Sequence parallelism needs the JAX backend. Received: "
                f"{keras.backend.backend()!r}."
            )
        super().__init__(layout_map=layout_map, batch_dim_name=batch_dim_name, **kwargs)
        names = list(self.device_mesh.axis_names)
        if sequence_dim_name not in names or sequence_dim_name == self.batch_dim_name:
            raise ValueError(
                f"`sequence_dim_name` must be an axis of the mesh, {names}, and not "
                f"the batch's, {self.batch_dim_name!r}. Received: "
                f"sequence_dim_name={sequence_dim_name!r}."
            )
        self.sequence_dim_name = sequence_dim_name
        self._size = self.device_mesh.shape[names.index(sequence_dim_name)]

    def get_data_layout(self, data_shape):
        """The layout of an array of the data: batch, then tokens."""
        axes = list(super().get_data_layout(data_shape).axes)
        if len(data_shape) > 1 and data_shape[1] and data_shape[1] % self._size == 0:
            axes[1] = self.sequence_dim_name
        return keras.distribution.TensorLayout(axes, self.device_mesh)
