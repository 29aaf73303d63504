"""Which key/value heads stay softmax, and why: the result of `select_heads`."""

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from keras_rfattn.arguments import is_number

FORMAT = 1


@dataclass(frozen=True)
class HeadSelection(Mapping):
    """A dict from paths of layers to key/value heads, made by `select_heads`.

    `replace_attention(..., softmax_heads=selection)` keeps these heads softmax, and
    `restore_attention(..., include=selection)` makes them softmax in a linear model.
    It prints as a table of layers and heads, in which the selected heads have a star.

    Attributes:
        scores: Dict from the path of each linear layer to a list with the score of each
            key/value head, in percent of all positive scores: how much of the loss
            softmax in this head removes.
        share: Share of all key/value heads that stay softmax.
        details: Dict from `"data"` and `"answers"` to the scores from these data alone.
        seconds: Duration of the selection.
    """

    scores: dict
    share: float
    details: dict = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self):
        if not is_number(self.share) or not 0 < self.share < 1:
            raise ValueError(
                "`share` must be a number between 0 and 1, the share of key/value "
                f"heads that stay softmax. Received: share={self.share!r}."
            )

    @property
    def heads(self):
        """Dict from paths to lists of the selected key/value heads."""
        ranked = [
            (score, path, head)
            for path, scores in self.scores.items()
            for head, score in enumerate(scores)
        ]
        # Python's sort is stable, so that equal scores are in the order of the model.
        ranked.sort(key=lambda entry: -entry[0])
        count = min(max(1, round(self.share * len(ranked))), len(ranked) - 1)
        selected = {path: [] for path in self.scores}
        for _, path, head in ranked[:count]:
            selected[path].append(head)
        return {path: sorted(heads) for path, heads in selected.items() if heads}

    def __getitem__(self, path):
        return self.heads[path]

    def __iter__(self):
        return iter(self.heads)

    def __len__(self):
        return len(self.heads)

    def with_share(self, share):
        """Returns the selection of another share of heads, by the same scores."""
        return replace(self, share=share)

    def save(self, path: str | os.PathLike):
        """Writes the selection to a JSON file."""
        described = {"format": FORMAT, **asdict(self)}
        pathlib.Path(path).write_text(json.dumps(described, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike):
        """Returns the selection that `save` wrote to a JSON file."""
        described = json.loads(pathlib.Path(path).read_text())
        if not isinstance(described, dict) or described.pop("format", None) != FORMAT:
            raise ValueError(
                f"{str(path)!r} must be a file that `HeadSelection.save` wrote. "
                f"Received: {described!r:.200}."
            )
        return cls(**described)

    def __str__(self):
        selected, total = self.heads, sum(map(len, self.scores.values()))
        count = sum(map(len, selected.values()))
        width = max(map(len, self.scores))
        lines = [
            f"{count} of {total} key/value heads stay softmax, in {len(selected)} of "
            f"{len(self.scores)} layers (selected in {self.seconds / 60:.1f} minutes).",
            "Share of each head in what softmax removes from the loss, in percent:",
        ]
        for path, scores in self.scores.items():
            cells = (
                f"{score:7.1f}{'*' if head in selected.get(path, ()) else ' '}"
                for head, score in enumerate(scores)
            )
            lines.append(f"  {path:<{width}}{''.join(cells).rstrip()}")
        return "\n".join(lines)

    __repr__ = __str__
    # Equality and hash are those of a dict of heads.
    __eq__, __hash__ = Mapping.__eq__, None
