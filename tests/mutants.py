"""Plants known mistakes, one at a time, and asks whether some test fails.

    KERAS_BACKEND=torch python tests/mutants.py [NAME ...]

Every mistake is one found in public implementations; tests must kill all of them.
Works on a copy. Mistakes are given as syntax, so that formatting, comments and
neighbouring lines may change freely; `tests/test_mutants.py` checks that each is still
found. Exits with status 1 if a mistake survives or cannot be tried.
"""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        file: Path below `keras_rfattn`.
        function: Name of the function that is changed.
        before: The expression or statement that stands there, exactly once.
        after: What it becomes.
        tests: File or test below `tests` that should see it, in a few seconds.
    """

    file: str
    function: str
    before: str
    after: str
    tests: str


MUTANTS = {
    "unsigned QR": Mutant(
        "projections/base.py", "haar", "np.sign", "np.ones_like",
        "projections/test_projections.py"
        "::test_every_entry_is_positive_half_the_time[orthogonal]",
    ),
    "padding in a statistic": Mutant(
        "feature_maps/fits.py", "_masked_moments", "mask is None", "True",
        "feature_maps/test_fits.py::test_mean_over_the_pairs_of_real_tokens",
    ),
    "a gradient through the statistic": Mutant(
        "feature_maps/fits.py", "mean_square_of_rows",
        "ops.stop_gradient(q_square + k_square + 2 * q_mean * k_mean)",
        "q_square + k_square + 2 * q_mean * k_mean",
        "feature_maps/test_exponential.py"
        "::test_gradients_of_a_bound_call_hold_its_statistic_fixed",
    ),
    "one A for all rows of a batch": Mutant(
        "feature_maps/exponential.py", "bind",
        "self.best_a(side**2 * squares)",
        "self.best_a(side**2 * ops.mean(squares, axis=0, keepdims=True))",
        "feature_maps/test_exponential.py::test_rows_are_bound_one_by_one",
    ),
    "an A bound to tokens before they are scaled": Mutant(
        "feature_maps/exponential.py", "bind", "side**2 * squares", "squares",
        "feature_maps/test_exponential.py::test_is_the_function_in_its_docstring",
    ),
    "causal attention bound to its sequence": Mutant(
        "feature_maps/exponential.py", "bind",
        "self.measures_sequence and not causal", "self.measures_sequence",
        "feature_maps/test_exponential.py"
        "::test_only_self_attention_that_sees_everything_is_bound",
    ),
    "cross-attention bound to its sequence": Mutant(
        "layers/attention.py", "prepared", "causal or not mask.self_attention",
        "causal",
        "feature_maps/test_exponential.py"
        "::test_only_self_attention_that_sees_everything_is_bound",
    ),
    "the same center for both sides": Mutant(
        "feature_maps/exponential.py", "_fold", "ops.flip(centers, axis=2)",
        "centers",
        "feature_maps/test_exponential.py::test_is_the_function_in_its_docstring",
    ),
    "a folded bias without half of the centers": Mutant(
        "feature_maps/exponential.py", "_fold", "products + linear",
        "products + products",
        "feature_maps/test_exponential.py"
        "::test_features_of_tokens_are_those_of_the_docstring",
    ),
    "features of a subclass left out": Mutant(
        "feature_maps/exponential.py", "bind", "not self.has_exponents", "False",
        "feature_maps/test_shared_programs.py",
    ),
    "windows without the common exponent of queries": Mutant(
        "ops/windows.py", "local_attention", "(query_features, key_features)",
        "(query_features.relative(), key_features)",
        "feature_maps/test_exponential.py"
        "::test_windows_weigh_features_as_they_weigh_the_kernel",
    ),
    "a redraw of the same vectors": Mutant(
        "feature_maps/exponential.py", "assign_vectors", "self.random_vectors(draw)",
        "self.random_vectors(0)",
        "feature_maps/test_exponential.py"
        "::test_redraw_keeps_the_fit_and_draws_other_vectors",
    ),
    "samples of one sequence in place of their mean": Mutant(
        "feature_maps/fits.py", "mean_of", "samples", "samples[:1]",
        "feature_maps/test_fits.py::test_samples_have_equal_weights",
    ),
    "keys without the inverse of the queries' matrix": Mutant(
        "feature_maps/fits.py", "dense", "np.stack([matrix, key_matrix], axis=1)",
        "np.stack([matrix, matrix], axis=1)",
        "feature_maps/test_fits.py::test_dense_keeps_products",
    ),
    "sinks counted twice": Mutant(
        "ops/windows.py", "in_windows", "position >= local.sinks", "position >= 0",
        "ops/test_sinks.py::test_matches_the_definition",
    ),
    "a window that never joins the far ones": Mutant(
        "ops/near.py", "extend_near",
        "merge_sums(far, _where(turn.begins, leaving, none))", "far",
        "ops/test_windowed_state.py::test_token_by_token_is_the_parallel_pass",
    ),
    "normalized tokens recorded before they are scaled": Mutant(
        "layers/recording.py", "__call__", "local.query, local.key, 1.0",
        "*call.prepared()[:2], 1.0",
        "layers/test_temperature.py::test_what_is_recorded_is_what_features_are_of",
    ),
    "a reference that knows the future": Mutant(
        "ops/causal_block.py", "_reference", "log_scale[..., 0, :]",
        "log_scale[..., -1, :]",
        "ops/test_isolation.py::test_larger_keys_of_the_future_change_nothing",
    ),
    "a reference that knows masked keys' future": Mutant(
        "ops/causal_block.py", "_reference",
        "ops.amin(first, axis=-1, keepdims=True)",
        "ops.max(ops.where(mask, position, 0), axis=-1, keepdims=True)",
        "ops/test_isolation.py::test_the_future_changes_nothing",
    ),
    "one seed for all layers": Mutant(
        "models/replace.py", "replace_attention",
        "derive_seed(base_seed, site.index)", "base_seed",
        "models/test_replace.py"
        "::test_layers_draw_different_vectors_and_seeds_reproduce",
    ),
    "no guard on signed denominators": Mutant(
        "ops/sums.py", "guarded", "features.is_signed", "False",
        "ops/test_sums.py::test_guard_of_a_signed_denominator",
    ),
    "key mask ignored in the normalizer": Mutant(
        "ops/features.py", "hidden", "mask is None", "True",
        "ops/test_bidirectional.py::test_hidden_keys_may_hold_anything",
    ),
    "queries scaled twice": Mutant(
        "layers/attention.py", "prepared", "math.sqrt(self.scale)", "self.scale",
        "layers/test_attention_layers.py::test_wide_features_approach_softmax",
    ),
    "a sketch without its root of r": Mutant(
        "papers/sketch.py", "key_features",
        "sketch / math.sqrt(self.num_features)", "sketch",
        "feature_maps/test_polynomial.py"
        "::test_products_of_a_degree_two_sketch_have_its_mean_and_variance",
    ),
    "NaN turned into a number": Mutant(
        "layers/not_finite.py", "marked", "float('nan')", "0.0",
        "layers/test_not_finite.py::test_gradients_know_too",
    ),
    "a state that forgets": Mutant(
        "layers/not_finite.py", "remembered",
        "numerator + ops.cast(mark, numerator.dtype)", "numerator",
        "layers/test_not_finite.py::test_a_state_remembers",
    ),
    "padding of a packed text among its tokens": Mutant(
        "ops/packing.py", "by_text", "ops.logical_and(real, texts.unpack(x))",
        "texts.unpack(x)", "layers/test_packed_masks.py::test_values_at_hand",
    ),
    "a call context that outlives its call": Mutant(
        "layers/call_context.py", "holding", "self.value = before", "pass",
        "layers/test_interceptor.py::test_the_context_of_a_thread_comes_first",
    ),
    "weights that PyTorch does not count": Mutant(
        "models/holders.py", "refresh", "track_variables_anew(layer)", "None",
        "models/test_holders.py"
        "::test_pytorch_counts_the_weights_of_the_models_around",
    ),
    "a trained map fitted again": Mutant(
        "feature_maps/weights.py", "check_not_trained", "feature_map.was_trained",
        "False", "uptraining/test_trained_maps.py"
        "::test_a_trained_map_is_not_adapted",
    ),
    "files of another mechanism not compared": Mutant(
        "layers/fingerprint.py", "_mismatch", "not agrees(layer, store[KEY])", "False",
        "models/test_loading.py::test_files_of_another_configuration_are_refused",
    ),
}  # fmt: skip


class _Swap(ast.NodeTransformer):
    """Replaces what equals `before`, in syntax, inside functions of one name."""

    def __init__(self, mutant):
        self.function = mutant.function
        self.before, self.after = map(_parse, (mutant.before, mutant.after))
        self.depth = self.count = 0

    def visit_FunctionDef(self, node):
        is_wanted = node.name == self.function
        self.depth += is_wanted
        node = self.generic_visit(node)
        self.depth -= is_wanted
        return node

    def visit(self, node):
        if self.depth and ast.dump(node) == ast.dump(self.before):
            self.count += 1
            return self.after
        return super().visit(node)


def _parse(text):
    statement = ast.parse(text).body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


def mutated(mutant):
    """Returns the text of the mutant's file with the mistake in it.

    Raises:
        ValueError: If what the mistake replaces is not in the function exactly once.
    """
    swap = _Swap(mutant)
    tree = swap.visit(ast.parse((ROOT / "keras_rfattn" / mutant.file).read_text()))
    if swap.count != 1:
        raise ValueError(
            f"`{mutant.function}` in {mutant.file} must have {mutant.before!r} exactly "
            f"once. Received: {swap.count} times. Use what stands there now."
        )
    return ast.unparse(ast.fix_missing_locations(tree))


def run_pytest(folder, *tests):
    """Runs tests of the project in `folder`, `full` ones too, up to the first failure.

    Args:
        folder: Path of the project, or of a copy of it.
        *tests: What pytest should run: files, or names of tests.

    Returns:
        The finished process of pytest.
    """
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-xq", "-m", "", "-p", "no:cacheprovider"]
        + list(tests),
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip


def kill(mutant):
    """Returns the first test that fails because of a mistake, or `None` if all pass.

    Raises:
        ValueError: If the mistake cannot be planted.
        RuntimeError: If pytest itself fails.
    """
    text = mutated(mutant)
    with tempfile.TemporaryDirectory() as folder:
        for part in (
            "keras_rfattn", "tests", "conftest.py", "pyproject.toml", "CONTRIBUTING.md"
        ):  # fmt: skip
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, pathlib.Path(folder) / part)
        (pathlib.Path(folder) / "keras_rfattn" / mutant.file).write_text(text)
        done = run_pytest(folder, f"tests/{mutant.tests}")
    if done.returncode == 0:
        return None
    found = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.M)
    if not found:
        raise RuntimeError(
            f"pytest failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return found.group(1)


def main():
    """Tries the mutants named on the command line, or all of them."""
    names = sys.argv[1:] or list(MUTANTS)
    killers = {}
    for name in names:
        try:
            killers[name] = kill(MUTANTS[name])
            text = f"killed by {killers[name]}" if killers[name] else "SURVIVED"
        except (ValueError, RuntimeError) as error:
            killers[name], text = None, f"NOT TRIED: {error}"
        print(f"{name:40} {text}", flush=True)
    killed = [x for x in killers.values() if x]
    done = run_pytest(ROOT, *sorted(set(killed)))
    if done.returncode:
        print(f"These tests fail without a mistake, too:\n{done.stdout[-2000:]}")
    print(f"{len(killed)} of {len(names)} mistakes killed")
    sys.exit(bool(done.returncode or len(killed) < len(names)))


if __name__ == "__main__":
    main()
