"""Saves trained feature maps, finds them and applies them."""

from keras_rfattn.maps.load import load_maps
from keras_rfattn.maps.save import save_maps
from keras_rfattn.maps.shipped import pretrained_maps

__all__ = ["load_maps", "pretrained_maps", "save_maps"]
