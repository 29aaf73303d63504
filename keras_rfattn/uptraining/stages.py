"""What a stage of `uptrain` trains, and how: the public class `Stage`."""

import math
from dataclasses import dataclass, fields

from keras_rfattn.arguments import check_choice, check_sizes, is_number

# Names of the stages, in the order in which they run, and the options of each.
OPTIONS = {
    "calibrate": (),
    "attention": ("trainable", "window_dropout", "max_rows"),
    "features": ("trainable", "window_dropout", "objective"),
}


@dataclass(frozen=True)
class Stage:
    """A stage of `keras_rfattn.uptrain`, with its options.

    Args:
        name: `"calibrate"` fits maps to the first batches, without gradients and
            options; it keeps maps that were trained or calibrated. `"attention"` trains
            every layer against the softmax attention of the same layer, on the inputs
            that the layer has in the softmax model; the loss is the relative squared
            error of outputs plus the divergence of attention rows. `"features"` trains
            the linear model end to end against the softmax model.
        trainable: What trains: `"maps"` (weights of feature maps only), `"query_key"`
            (maps, and trainable weights of the query and key projections: after
            `enable_lora` their adapters) or `"all"` (maps and all other trainable
            weights of the model; stage `"features"` only).
        objective: What stage `"features"` compares: `"features"` (last hidden states,
            of the backbone if the model is a task), `"logits"`, or `"auto"`: logits
            for language models, hidden states for other models.
        window_dropout: Share of sequences (stage `"attention"`) or batches (stage
            `"features"`) for which a layer leaves its window out, so that its
            features learn too.
        max_rows: Largest number of query rows of a sequence, evenly spread, that stage
            `"attention"` compares; its time and memory are proportional to it. 128
            halves the time of a step for a decoder at 1024 tokens.

    Examples:
        >>> from keras_rfattn.uptraining import Stage
        >>> stages = ["attention", Stage("features", trainable="query_key")]
    """

    name: str
    trainable: str = "maps"
    objective: str = "auto"
    window_dropout: float = 0.25
    max_rows: int = 512

    def __post_init__(self):
        check_choice("name", self.name, tuple(OPTIONS))
        check_choice("trainable", self.trainable, ("maps", "query_key", "all"))
        check_choice("objective", self.objective, ("auto", "features", "logits"))
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in OPTIONS[self.name] and value != field.default:
                raise ValueError(
                    f"Options of stage {self.name!r} must be some of "
                    f"{OPTIONS[self.name]}. Received: {field.name}={value!r}."
                )
        if (self.name, self.trainable) == ("attention", "all"):
            raise ValueError(
                "`trainable` must be 'maps' or 'query_key' in stage 'attention', which "
                "compares layers. Received: trainable='all'."
            )
        if not is_number(self.window_dropout) or not 0 <= self.window_dropout < 1:
            raise ValueError(
                "`window_dropout` must be in [0, 1). "
                f"Received: window_dropout={self.window_dropout!r}."
            )
        check_sizes(max_rows=self.max_rows)


def checked_stages(given):
    """Returns a tuple of `Stage`s from a stage or a sequence of stages and names."""
    listed = given if isinstance(given, (list, tuple)) else (given,)
    stages = tuple(x if isinstance(x, Stage) else Stage(x) for x in listed)
    names = tuple(stage.name for stage in stages)
    if not names or names != tuple(x for x in OPTIONS if x in names):
        raise ValueError(
            f"`stages` must be some of {tuple(OPTIONS)}, each at most once and in this "
            f"order. Received: stages={given!r}."
        )
    return stages


def planned(stages, steps, layers):
    """Returns a list of `(stage, its first step, the step after its last)`."""
    names = {stage.name for stage in stages}
    middle = steps if "attention" in names else 0
    if {"attention", "features"} <= names:
        middle = math.ceil(steps / 2)
    spans = {"calibrate": (0, 0), "attention": (0, middle), "features": (middle, steps)}
    learns = any(layer.feature_map.is_adaptive for layer in layers)
    return [(x, *spans[x.name]) for x in stages if x.name != "calibrate" or learns]
