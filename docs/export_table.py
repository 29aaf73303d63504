"""Runs every export and writes the tables of `docs/pages/export_table.md`.

    KERAS_BACKEND=jax python docs/export_table.py

Each run adds the rows of one backend that are missing, which takes tens of minutes for
all of them. Delete rows from the page to have them run again.
"""

import pathlib
import re
import sys

import keras

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pages" / "export_table.md"


def marks(backend):
    """What stands before and after the table of a backend."""
    return tuple(f"<!-- exports of {backend}: {x} -->" for x in ("begin", "end"))


def rows(text, backend):
    """The rows of a backend's table on the page: `{(format, case): cells}`."""
    begin, end = marks(backend)
    table = text.split(begin)[1].split(end)[0].strip().splitlines()[2:]
    cells = [[x.strip() for x in row.strip("|").split("|")] for row in table]
    return {(form.strip("`"), case): found for form, case, *found in cells}


def cell(form, case, shape, exports):
    """A cell: what linear attention does, and softmax where that differs."""
    arguments = form, exports.CASES[case], exports.SHAPES[shape]
    linear = exports.answer(*arguments, "favorplus")
    if linear == "yes":
        return "yes"
    if exports.answer(*arguments, None) != "yes":
        return "no, nor softmax"
    return f"no: {linear.split(':')[0]}"


def main():
    """Adds the missing rows of the backend at hand, one after the other."""
    sys.path.insert(0, str(ROOT))
    from tests.models import exports

    backend = keras.backend.backend()
    begin, end = marks(backend)
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.S)
    shapes = list(exports.SHAPES)
    lines = [
        f"| format | attention | {' | '.join(shapes)} |",
        "|---" * (2 + len(shapes)) + "|",
    ]
    known = rows(PAGE.read_text(), backend)
    wanted = [(f, c) for f in exports.FORMATS[backend] for c in exports.CASES]
    for key in wanted:
        if key not in known:
            known[key] = [cell(*key, shape, exports) for shape in shapes]
            print(*key, known[key], flush=True)
        found = [k for k in wanted if k in known]
        body = [f"| `{k[0]}` | {k[1]} | {' | '.join(known[k])} |" for k in found]
        table = "\n".join([begin, *lines, *body, end])
        PAGE.write_text(pattern.sub(lambda _, x=table: x, PAGE.read_text()))


if __name__ == "__main__":
    main()
