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

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> plan = keras_rfattn.models.Plan({"multi_head_*": "favorplus"})
        >>> model = keras_rfattn.replace_attention(model, plan)
        >>> keras_rfattn.describe_attention(model).rows[0].mechanism
        'favorplus'
    """

    maps: dict

    def __post_init__(self):
        if not isinstance(self.maps, dict) or not self.maps:
            raise ValueError(
                "`maps` must be a dict that maps layer paths to feature maps. "
                f"Received: maps={self.maps!r}."
            )
        for path, feature_map in self.maps.items():
            if not isinstance(path, str):
                raise ValueError(
                    "`maps` must be a dict whose keys are layer paths, as strings. "
                    f"Received: the key {path!r} of type {type(path).__name__}."
                )
            if feature_map is not None:
                check_identifier(feature_map)
