"""Importing and using the package changes no function or class of other libraries."""

import json
import subprocess
import sys

import keras
import pytest

from tests.environment import environment

pytest.importorskip("keras_hub")
LIBRARIES = {
    "jax": ["keras", "keras_hub", "jax", "jaxlib"],
    "tensorflow": ["keras", "keras_hub", "tensorflow"],
    "torch": ["keras", "keras_hub", "torch"],
}
BACKEND = keras.backend.backend()
COMMON = f"""
import json, sys, types

LIBRARIES = {LIBRARIES[BACKEND]}

def is_code(x):
    return callable(x) or isinstance(x, (classmethod, staticmethod, property))

def attributes():
    "Yields `(name, value)` for functions and classes, and for what classes define."
    seen = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or module is None:
            continue
        for key, x in list(getattr(module, "__dict__", {{}}).items()):
            if not is_code(x):
                continue
            yield f"{{name}}:{{key}}", x
            if not isinstance(x, type) or id(x) in seen:
                continue
            seen.add(id(x))
            if str(getattr(x, "__module__", "")).partition(".")[0] in LIBRARIES:
                for inner, y in list(vars(x).items()):
                    if is_code(y):
                        yield f"{{x.__module__}}:{{x.__qualname__}}.{{inner}}", y
"""
USE = """
import keras, keras_hub, numpy as np, tempfile

def use(change):
    backbone = keras_hub.models.BertBackbone(20, 1, 2, 8, 8, max_sequence_length=6)
    change(backbone)
    task = keras_hub.models.BertMaskedLM(backbone)
    tokens = np.ones((2, 6), "int32")
    inputs = {"token_ids": tokens, "segment_ids": tokens * 0, "padding_mask": tokens}
    inputs["mask_positions"] = tokens[:, :1]
    task.fit(inputs, tokens[:, :1], verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        task.save(f"{folder}/m.keras")
        keras.saving.load_model(f"{folder}/m.keras")
        task.save_weights(f"{folder}/m.weights.h5")
        task.load_weights(f"{folder}/m.weights.h5")
        backbone.save_to_preset(f"{folder}/preset")
        keras_hub.models.Backbone.from_preset(f"{folder}/preset")
"""
SAME = """
use(lambda model: None)
before = dict(attributes())
hooks = list(sys.meta_path)
import keras_rfattn
changed = [x for x, y in attributes() if x in before and before[x] is not y]
use(lambda model: keras_rfattn.replace_attention(model, "favorpp", num_features=8))
changed += [x for x, y in attributes() if x in before and before[x] is not y]
print(json.dumps([len(before), changed, sys.meta_path == hooks]))
"""
DESCRIBED = """
def described(x):
    x = getattr(x, "__func__", getattr(x, "fget", x))
    code = getattr(x, "__code__", None)
    is_python = isinstance(code, types.CodeType)
    place = [code.co_filename, code.co_firstlineno] if is_python else None
    return [type(x).__name__, getattr(x, "__qualname__", None), place]

import keras, keras_hub
ours = [x for x in sys.meta_path if type(x).__module__.startswith("keras_rfattn")]
left = [*map(str, ours), *map(str, getattr(keras_hub.__loader__, "__dict__", ()))]
# The variable of a loop at the top of a module holds whatever came last in some set.
named = [(k, x) for k, x in attributes() if k.endswith(getattr(x, "__name__", ""))]
print(json.dumps([{k: described(x) for k, x in named}, left]))
"""


def run(*parts):
    code = "\n".join(parts)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_function_is_the_object_that_it_was():
    count, changed, has_same_hooks = run(COMMON, USE, SAME)
    assert count > 10_000 and has_same_hooks
    assert not changed


def test_importing_the_package_first_changes_nothing():
    with_package, left = run("import keras_rfattn", COMMON, DESCRIBED)
    without, expected = run(COMMON, DESCRIBED)
    both = with_package.keys() & without.keys()
    assert len(both) > 10_000 and left == expected
    assert not [x for x in both if with_package[x] != without[x]]
