"""The decoder-only Transformer++ of the PolySketchFormer paper."""

from keras_rfattn.models.transformer_pp.model import transformer_pp

__all__ = ["transformer_pp"]
