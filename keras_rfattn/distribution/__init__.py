"""Many devices, by `keras.distribution`: where the weights of a linear model lie.

    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], devices)
    layouts = keras_rfattn.distribution.layout_map(model, mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    keras_rfattn.distribution.distribute(model, layouts)

`keras.distribution.DataParallel` needs none of it. `SequenceParallel` divides
sequences, for texts that no device could hold.
"""

from keras_rfattn.distribution.layouts import distribute
from keras_rfattn.distribution.layouts import layout_map
from keras_rfattn.distribution.sequence import SequenceParallel

__all__ = ["SequenceParallel", "distribute", "layout_map"]
