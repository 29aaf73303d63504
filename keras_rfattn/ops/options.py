"""Options of the attention algorithms, which users choose in addition to the map."""

import dataclasses

import numpy as np

from keras_rfattn.arguments import check_flag, is_integer, is_number, is_positive
from keras_rfattn.backend import default_block_size

# Implementations by fused kernels, and all of them.
KERNELS = ("pallas", "triton")
IMPLEMENTATIONS = ("auto", "xla", *KERNELS)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an attention algorithm, checked on construction.

    Attributes:
        block_size: Number of tokens in a block of causal attention. `None` chooses 64
            on a CPU, 128 on a GPU and 512 on a TPU. It does not change the result.
        window: Number of tokens in a window of exact attention. The sequence is cut
            into windows, counted from a row's first visible token. Attention within a
            window is exact, and features take over beyond it. `None` uses features
            alone.
        sliding: Whether the window before a query's own is exact too (and the window
            after it, without causality).
        sinks: Number of first tokens of a row that every later query weighs exactly,
            beside the window. They are counted from the row's first visible token.
        max_segments: Largest number of texts in a packed row. `segment_ids` need it
            inside compiled functions, where their values are unknown.
        implementation: `"auto"`, the fastest that has been timed; `"xla"`, the
            backend's ordinary operations; or kernels of `keras_rfattn.experimental`:
            `"pallas"` for TPUs on JAX, `"triton"` for NVIDIA GPUs on PyTorch.
        temperature: Positive number. Queries and keys are divided by their norms, and
            their product, a cosine, by the temperature. `None` keeps the model's own
            queries, keys and scale.
        softmax_heads: Indices of query heads that stay softmax attention, as in the
            model. These heads take time quadratic in the length, and a layer with any
            of them keeps keys and values when it generates.

    Raises:
        ValueError: If a number is not a positive integer, `sliding` is not a boolean,
            `sliding` is set without a window, `sinks` is not an integer of at least 0
            or exceeds the window, `temperature` is not positive,
            `softmax_heads` are not distinct non-negative integers, or `implementation`
            is unknown.
    """

    block_size: int | None = None
    window: int | None = None
    sliding: bool = False
    max_segments: int | None = None
    temperature: float | None = None
    implementation: str = "auto"
    softmax_heads: tuple = ()
    sinks: int = 0

    def __post_init__(self):
        kinds = {
            "block_size": ("integer", is_integer),
            "window": ("number of tokens", is_integer),
            "max_segments": ("integer", is_integer),
            "temperature": ("number", is_number),
        }
        for name, (kind, is_kind) in kinds.items():
            value = getattr(self, name)
            if value is not None and not (is_kind(value) and is_positive(value)):
                raise ValueError(
                    f"`{name}` must be a positive {kind} or `None`. "
                    f"Received: {name}={value!r}."
                )
        object.__setattr__(self, "softmax_heads", _heads(self.softmax_heads))
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"`implementation` must be one of {IMPLEMENTATIONS}. "
                f"Received: implementation={self.implementation!r}."
            )
        check_flag("sliding", self.sliding)
        if self.sliding and self.window is None:
            raise ValueError(
                "`sliding` needs a `window`. Received: sliding=True, window=None. Pass "
                "a number of tokens as `window`, or sliding=False."
            )
        if not is_integer(self.sinks) or self.sinks < 0:
            raise ValueError(
                "`sinks` must be a number of tokens, 0 for none. "
                f"Received: sinks={self.sinks!r}."
            )
        if self.window is not None and self.sinks > self.window:
            raise ValueError(
                "`sinks` must be at most `window`, because windows count from the same "
                f"token. Received: sinks={self.sinks}, window={self.window}. Use a "
                "larger window, or fewer sinks."
            )
        for field in dataclasses.fields(self):
            # NumPy scalars cannot be written to a config.
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())

    @property
    def asks_for_kernels(self):
        """Whether `implementation` is one by fused kernels."""
        return self.implementation in KERNELS

    @property
    def block_length(self):
        """The `block_size`, or the default for the device if it is `None`."""
        return default_block_size() if self.block_size is None else self.block_size

    @classmethod
    def take(cls, arguments):
        """Removes the options from a dict of keyword arguments; returns `Options`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: arguments.pop(name) for name in names if name in arguments})

    def config(self):
        """Returns the options as a dict, for configs."""
        found = dataclasses.asdict(self)
        heads, sinks = found.pop("softmax_heads"), found.pop("sinks")
        # Left out if empty, so that older versions can read the config.
        recent = {"softmax_heads": list(heads), "sinks": sinks}
        return {**found, **{name: x for name, x in recent.items() if x}}


def _heads(given):
    is_listed = isinstance(given, (list, tuple, range, np.ndarray))
    heads = list(given) if is_listed else []
    are_heads = all(is_integer(x) and x >= 0 for x in heads)
    if not is_listed or not are_heads or len({*heads}) < len(heads):
        raise ValueError(
            "`softmax_heads` must be distinct non-negative integers. "
            f"Received: softmax_heads={given!r:.80}."
        )
    return tuple(sorted(int(x) for x in heads))
