"""Makes notebooks from pages of the documentation.

    pip install ".[dev]"
    python docs/notebooks.py

A notebook stands beside its page and is never edited; a test compares the two.
"""

import pathlib
from typing import NamedTuple

import jupytext

PAGES = pathlib.Path(__file__).parent / "pages"


class Header(NamedTuple):
    """What keras.io shows below the title of a notebook."""

    created: str
    modified: str
    description: str


SOURCES = {
    "tutorial": Header(
        "2026/11/28",
        "2026/11/29",
        "Make the attention of MiniLM linear, train its feature maps, save and share.",
    ),
    "guides/decoder": Header(
        "2026/11/28",
        "2026/11/29",
        "Make a causal language model linear, uptrain it, measure it, and generate.",
    ),
    "guides/share": Header(
        "2026/11/28",
        "2026/11/29",
        "Save trained feature maps, and load them on their softmax checkpoint.",
    ),
}
AUTHOR = "the keras_rfattn authors"
ACCELERATOR = "None"


def header(source):
    """Returns the Markdown of a header in the form of keras.io."""
    lines = {
        "Author": AUTHOR,
        "Date created": SOURCES[source].created,
        "Last modified": SOURCES[source].modified,
        "Description": SOURCES[source].description,
        "Accelerator": ACCELERATOR,
    }
    return "<br>\n".join(f"**{name}:** {text}" for name, text in lines.items())


def notebook(source):
    """Returns the notebook of a page, `source` without its suffix, as a string."""
    found = jupytext.read(PAGES / f"{source}.md")
    title, text = found.cells[0].source.split("\n\n", 1)
    found.cells[0].source = "\n\n".join([title, header(source), text])
    found.metadata = {"kernelspec": {"display_name": "Python 3", "name": "python3"}}
    for number, cell in enumerate(found.cells):
        # By default, they are random.
        cell["id"] = f"cell-{number}"
    return jupytext.writes(found, fmt="ipynb")


if __name__ == "__main__":
    for source in SOURCES:
        path = PAGES / f"{source}.ipynb"
        path.write_text(notebook(source), encoding="utf-8")
        print(path)
