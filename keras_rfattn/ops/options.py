"""Options of the attention algorithms, which users choose in addition to the map."""

import dataclasses
import difflib
import inspect

import numpy as np

from keras_rfattn.arguments import check_flag, is_integer, is_number, is_positive
from keras_rfattn.backend import default_block_size

# Implementations by fused kernels, and all of them.
KERNELS = ("pallas", "triton")
IMPLEMENTATIONS = ("auto", "xla", *KERNELS)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an attention algorithm, checked on construction.

    `replace_attention` and the layers take the options as keywords, and `models.Plan`
    gives them to single layers of a model.

    Attributes:
        block_size: Number of tokens in a block of causal attention. `None` chooses 64
            on a CPU, 128 on a GPU and 512 on a TPU. It does not change the result.
        window: Number of tokens in a window of exact attention. The sequence is cut
            into windows, counted from a row's first visible token. Attention within a
            window is exact, and features take over beyond it. Needs self-attention, and
            a map whose kernel is softmax or polynomial. `None` uses features alone.
        sliding: Whether the window before a query's own is exact too (and the window
            after it, without causality).
        max_segments: Largest number of texts in a packed row. `segment_ids` need it
            inside compiled functions, where their values are unknown (see
            `layers.MultiHeadAttention.call`).
        temperature: Positive number. Queries and keys are divided by their norms, and
            their product, a cosine, by the temperature. The map then estimates softmax
            attention of normalized vectors, which differs from the checkpoint's. The
            hybrid maps are made for this. `None` keeps the model's own queries, keys
            and scale.
        implementation: `"auto"`, the fastest that has been timed; `"xla"`, the
            backend's ordinary operations; or kernels of `keras_rfattn.experimental`
            for maps whose features are exponentials: `"pallas"` for TPUs on JAX,
            `"triton"` for NVIDIA GPUs on PyTorch.
        softmax_heads: Indices of key/value heads, counted from 0, that stay softmax
            attention, as in the model, with all query heads that read them. They should
            be heads that look up single tokens; `keras_rfattn.select_heads` finds them.
            They take time quadratic in the length, and they alone keep the keys and
            values of all tokens when the model generates.
        sinks: Number of first tokens of a row that every later query weighs exactly,
            beside the window. They are counted from the row's first visible token.
            Pretrained decoders often attend to the first tokens a lot, so 4 is a good
            choice for them. Needs a window.

    Raises:
        ValueError: If an option is not of its kind, `sliding` is set without a window,
            or there are more sinks than tokens in a window.
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

    @classmethod
    def of_call(cls, function, keywords):
        """Returns the `Options` in the `**keywords` of a call, or refuses a keyword."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in keywords.items():
            if name not in names:
                *others, _ = inspect.signature(function).parameters
                close = difflib.get_close_matches(name, [*others, *names], 1)
                raise TypeError(
                    f"`{name}` must be an argument of `{function.__name__}`, or one of "
                    f"the options {names}. Received: {name}={value!r:.80}."
                    + (f" Did you mean `{close[0]}`?" if close else "")
                )
        return cls(**keywords)

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
            f"Received: softmax_heads={given!r:.80}. Use a `keras_rfattn.models.Plan` "
            "with `Options` to choose the heads of single layers."
        )
    return tuple(sorted(int(x) for x in heads))
