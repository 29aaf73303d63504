"""Makes notebooks from pages of the documentation.

    pip install ".[dev]"
    python docs/notebooks.py

A notebook stands beside its page and is never edited; a test compares the two.
"""

import pathlib

import jupytext

PAGES = pathlib.Path(__file__).parent / "pages"
SOURCES = ("tutorial", "guides/decoder", "guides/share")


def notebook(source):
    """Returns the notebook of a page, `source` without its suffix, as a string."""
    found = jupytext.read(PAGES / f"{source}.md")
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
