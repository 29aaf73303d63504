"""Assigns a feature map to each attention layer, for `replace_attention`."""

from dataclasses import dataclass

from keras_rfattn.feature_maps.registry import check_identifier


@dataclass(frozen=True)
class Plan:
    """Assignment of feature maps to attention layers.

    Attributes:
        maps: Dict from a layer's path, or a pattern (`fnmatch`), to a feature map in
            any form that `replace_attention` accepts, or to `None` to keep softmax. If
            several patterns match a layer, the first one counts. A layer that no
            pattern matches keeps softmax.

    Raises:
        ValueError: If `maps` is not a dict with string keys, is empty, or names an
            unknown feature map.
        TypeError: If `replace_attention` does not accept the type of a value.
    """

    maps: dict

    def __post_init__(self):
        if not isinstance(self.maps, dict) or not self.maps:
            raise ValueError(
                "`maps` must be a dict from layer paths to feature maps, not empty. "
                f"Received: maps={self.maps!r}."
            )
        for path, feature_map in self.maps.items():
            if not isinstance(path, str):
                raise ValueError(
                    "`maps` must be a dict from layer paths, which are strings. "
                    f"Received: the key {path!r} of type {type(path).__name__}."
                )
            if feature_map is not None:
                check_identifier(feature_map)
