"""Splits sequences over the devices of a mesh, a segment of tokens on each."""

import keras

from keras_rfattn.backend.devices import backend_name, divides_sequences


class SequenceParallel(keras.distribution.ModelParallel):
    """`keras.distribution.ModelParallel` that also splits sequences; needs JAX.

        mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "sequence"], devices)
        keras.distribution.set_distribution(SequenceParallel(
            layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"))

    Each device holds a contiguous segment of tokens. For linear attention the devices
    only exchange sums, whose size does not depend on the sequence length; the result
    equals that of one device up to rounding. All other parts of a transformer work on
    each token separately.

    Axis 1 of the data is split if its length is a multiple of the number of devices.
    Where the queries or keys of a layer cannot be split like this, or the layer has
    softmax attention, the compiler gathers the tokens it needs.

    Args:
        layout_map: `keras.distribution.LayoutMap`. Leave it empty to keep all weights
            on every device, or pass the result of `layout_map` to split weights too.
        batch_dim_name: Name of the mesh axis for the batch; the first axis by default.
        sequence_dim_name: Name of the mesh axis for tokens.
        **kwargs: Further arguments of `ModelParallel`.

    Raises:
        ValueError: If the mesh has no axis `sequence_dim_name`, or this axis is also
            the batch axis.
        NotImplementedError: If the backend is not JAX.
    """

    def __init__(
        self, *, layout_map=None, batch_dim_name=None, sequence_dim_name="sequence",
        **kwargs,
    ):  # fmt: skip
        if not divides_sequences():
            raise NotImplementedError(
                "Sequence parallelism needs the JAX backend. Received: "
                f"{backend_name()!r}."
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
        """Returns the layout of a data array: batch on axis 0, tokens on axis 1."""
        axes = list(super().get_data_layout(data_shape).axes)
        if len(data_shape) > 1 and data_shape[1] and data_shape[1] % self._size == 0:
            axes[1] = self.sequence_dim_name
        return keras.distribution.TensorLayout(axes, self.device_mesh)
