"""Plants known mistakes, one at a time, and asks whether some test fails.

    KERAS_BACKEND=torch python tests/mutants.py

Works on a copy. Every mistake is one found in public implementations; all must be
killed.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
# Name: (file, what stands there, what it becomes, tests that should see it).
MUTANTS = {
    "unsigned QR": (
        "projections/orthogonal.py",
        'q = q * np.sign(np.einsum("bii->bi", r))[:, None, :]',
        "pass",
        "tests/projections",
    ),
    "padding in a statistic": (
        "feature_maps/favorpp.py",
        "    if mask is None:\n        return _of_finite",
        "    if True:\n        return _of_finite",
        "tests/feature_maps/test_statistics.py",
    ),
    "a reference that knows the future": (
        "ops/causal_block.py",
        "mask & (count == 1)",
        "mask & (count == ops.max(count, axis=-1, keepdims=True))",
        "tests/ops/test_isolation.py",
    ),
    "one seed for all layers": (
        "models/replace.py",
        "template.reseeded(derive_seed(seed, site.index))",
        "template.reseeded(seed)",
        "tests/models/test_replace.py",
    ),
    "no guard on signed denominators": (
        "ops/sums.py",
        "    if features.is_signed:\n        floor",
        "    if False:\n        floor",
        "tests/ops/test_sums.py",
    ),
    "key mask ignored in the normalizer": (
        "ops/features.py",
        "return ops.where(mask[..., None], key.log_scale, LOWEST)",
        "return key.log_scale",
        "tests/ops/test_bidirectional.py",
    ),
    "queries scaled twice": (
        "layers/attend.py",
        "query, key = query * side, key * side\n        stats",
        "query, key = query * side * side, key * side\n        stats",
        "tests/layers/test_attention_layers.py",
    ),
    "a sketch without its root of r": (
        "feature_maps/polysketch.py",
        "sketch = sketch / math.sqrt(self.num_features)",
        "pass",
        "tests/feature_maps/test_polynomial.py",
    ),
}


def run(name):
    """The first test that fails of a mistake, or `None`."""
    file, before, after, tests = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        for part in ("keras_rfattn", "tests", "pyproject.toml", "CONTRIBUTING.md"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, pathlib.Path(folder) / part)
        path = pathlib.Path(folder) / "keras_rfattn" / file
        text = path.read_text()
        if text.count(before) != 1:
            raise SystemExit(f"{name}: {file} has {text.count(before)} of {before!r}")
        path.write_text(text.replace(before, after))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", tests],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": folder},
        )  # fmt: skip
    found = re.search(r"^FAILED (\S+)", done.stdout, re.M)
    return found and found.group(1)


def main():
    survived = []
    for name in MUTANTS:
        killer = run(name)
        print(
            f"{name:38} {'killed by ' + killer if killer else 'SURVIVED'}", flush=True
        )
        survived += [] if killer else [name]
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
