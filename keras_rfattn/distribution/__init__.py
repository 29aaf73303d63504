"""Distributes a model with linear attention over devices (`keras.distribution`).

    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], devices)
    layouts = keras_rfattn.distribution.layout_map(model, mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    keras_rfattn.distribution.distribute(model, layouts)

`keras.distribution.DataParallel` needs no call of this module.
"""

from keras_rfattn.distribution.layouts import distribute, layout_map

__all__ = ["distribute", "layout_map"]
