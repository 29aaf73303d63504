"""Writes the table of attention classes into `docs/pages/models.md`.

    python docs/models_table.py

The rows are those of `keras_rfattn/models/adapters/known.py`.
"""

import pathlib
import re

from keras_rfattn.models.adapters import known

PAGE = pathlib.Path(__file__).parent / "pages" / "models.md"
BEGIN, END = (f"<!-- attention classes: {x} -->" for x in ("begin", "end"))


def table():
    """The rows, classes that can be linear first."""
    rows = sorted(known.ATTENTION.items(), key=lambda x: (x[1].refused is not None, x))
    lines = ["| library | class | linear attention |", "|---|---|---|"]
    for name, row in rows:
        answer = "yes" if row.refused is None else f"refused: {row.refused}"
        lines.append(f"| `{row.package}` | `{name}` | {answer} |")
    return "\n".join(lines)


def written(text):
    """The page with the table in its place."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.S)
    return pattern.sub(f"{BEGIN}\n{table()}\n{END}", text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
