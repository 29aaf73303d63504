"""A mechanism for each layer, for `replace_attention`."""

import fnmatch
from dataclasses import dataclass

from keras_rfattn.feature_maps.registry import check_identifier


@dataclass(frozen=True)
class Plan:
    """Which map each attention layer gets.

    Attributes:
        maps: Dict from a layer's path (or a pattern, `fnmatch`) to what
            `replace_attention` takes as `feature_map`, or `None` to keep softmax. Of
            several patterns that match the first counts; a layer that none matches
            keeps softmax.

    Raises:
        ValueError: If `maps` is no dict from strings, is empty or has an unknown name.
        TypeError: If a value is nothing that `replace_attention` takes.
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

    def of(self, path):
        """The map for a layer, or `None`."""
        return first_match(self.maps, path)


def first_match(found, path, default=None):
    """What a dict from patterns has for a layer's path, by the first that matches."""
    return next((x for p, x in found.items() if matches(path, p)), default)


def matches(path, pattern):
    """Whether a layer's path is a pattern, or matches it."""
    return path == pattern or fnmatch.fnmatch(path, pattern)
