"""Interrupted anywhere and started again: bit for bit the weights of a whole run."""

import io
import json
import multiprocessing
import os
import signal

import keras
import numpy as np
import pytest

from keras_rfattn.uptraining import Stage, progress
from tests.marks import slow_on_jax
from tests.uptraining import models as m

STEPS = 8
SAVE = progress.save
KILLED_STEPS = 4


def run(folder=None, feature_map="hedgehog", every=1, callbacks=(), **arguments):
    model = m.linear_model(
        feature_map, **({"num_features": 8} if "pp" in feature_map else {})
    )
    if folder is not None:
        callbacks = [m.checkpoint(folder, every), *callbacks]
    report = m.uptrain(model, callbacks=callbacks, **{"steps": STEPS} | arguments)
    return m.weights(model), report


class Stop(keras.callbacks.Callback):
    """Raises after so many steps, stages together."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def broken(folder, steps, callbacks=(), **arguments):
    with pytest.raises(KeyboardInterrupt):
        run(folder, callbacks=[*callbacks, Stop(steps)], **arguments)


def saved_position(folder):
    """Returns how many stages and how many steps of the next are saved."""
    with np.load(folder / "uptrain.npz") as file:
        notes = json.loads(file["header"].tobytes())["notes"]
    return len(notes["results"]), len(notes["errors"])


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.once
@pytest.mark.full
@pytest.mark.parametrize(
    "every, steps", [pytest.param(1, 1, marks=pytest.mark.once), (3, 7)]
)
def test_resumed_compiled_is_unbroken(tmp_path, every, steps):
    expected, whole = run()
    # Twice, in stage "attention" and in stage "features".
    broken(tmp_path, steps, every=every)
    broken(tmp_path, 4, every=every)
    found, report = run(tmp_path, every=every)
    assert same(found, expected)
    # Nor does the report know of the interruption.
    assert report.layers == whole.layers
    for a, b in zip(report.stages, whole.stages, strict=True):
        assert (a.name, a.steps, a.no_attention) == (b.name, b.steps, b.no_attention)
        assert (a.first, a.last) == pytest.approx((b.first, b.last), rel=1e-5)
    # A third call finds nothing left to do.
    assert same(run(tmp_path, every=every)[0], expected)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize(
    "arguments",
    [
        {"feature_map": "favorpp", "stages": m.stages(trainable="query_key")},
        {"feature_map": "favorpp_learned"},
        # Averages take the place of weights after the last step of a stage, the fourth.
        {"use_ema": True},
    ],
)
def test_of_every_kind(tmp_path, arguments):
    arguments = dict(arguments)
    if arguments.pop("use_ema", False):
        arguments["optimizer"] = keras.optimizers.Adam(0.05, use_ema=True)
        broken(tmp_path, 4, **arguments)
    expected, _ = run(**arguments)
    broken(tmp_path, 3, **arguments)
    assert same(run(tmp_path, **arguments)[0], expected)


@pytest.mark.once
def test_a_torn_checkpoint_is_named_and_refused(tmp_path):
    checkpoint, path = m.checkpoint(tmp_path), tmp_path / "uptrain.npz"
    assert progress.load(checkpoint, {"seed": 0}) == ([], {})
    for step in (1, 2):
        progress.save(
            checkpoint, {"seed": 0}, [np.full(1000, step)], {"errors": [step]}
        )
    # One that was not completed.
    (tmp_path / "uptrain.partial").write_bytes(b"half of it")
    (values,), notes = progress.load(checkpoint, {"seed": 0})
    assert values[0] == 2 and notes == {"errors": [2]}
    content = path.read_bytes()
    turned = bytearray(content)
    turned[len(content) // 2] ^= 0xFF
    other = io.BytesIO()
    np.save(other, np.zeros(3))
    for damaged in (content[:-100], b"", bytes(turned), other.getvalue()):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match="must be intact. Received: .*uptrain.npz'"
        ):
            progress.load(checkpoint, {"seed": 0})


class StopEarly(keras.callbacks.Callback):
    """Ends a stage after two steps."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 2:
            self.model.stop_training = True


@pytest.mark.full
@pytest.mark.once
def test_a_stage_that_a_callback_ended_stays_ended(tmp_path):
    expected, report = run(callbacks=[StopEarly()])
    assert [x.steps for x in report.stages] == [2, 2]
    # In the first step of the next stage, of which nothing is saved.
    broken(tmp_path, 3, every=10, callbacks=[StopEarly()])
    found, _ = run(tmp_path, every=10, callbacks=[StopEarly()])
    assert same(found, expected)


class Decay(keras.callbacks.Callback):
    """Changes the learning rate at the end of a step, when it could be saved before."""

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate) * 0.8


@pytest.mark.full
@pytest.mark.once
def test_what_callbacks_change_is_saved(tmp_path):
    # Optimizers' names are counted, in a process as from one to the next.
    arguments = {"optimizer": "adam", "stages": "attention"}
    expected, _ = run(callbacks=[Decay()], **arguments)
    broken(tmp_path, 3, callbacks=[Decay()], **arguments)
    assert same(run(tmp_path, callbacks=[Decay()], **arguments)[0], expected)


@pytest.mark.full
@pytest.mark.once
def test_optimizers_that_differ_are_told_apart(tmp_path):
    def optimizer(steps):
        schedule = keras.optimizers.schedules.CosineDecay(0.01, steps)
        return {"optimizer": keras.optimizers.Adam(schedule), "stages": "attention"}

    broken(tmp_path, 2, **optimizer(8))
    with pytest.raises(
        ValueError, match="optimizer: saved .*'decay_steps': 8.* given .*_steps': 9"
    ):
        run(tmp_path, **optimizer(9))
    run(tmp_path, **optimizer(8))


@pytest.mark.full
@pytest.mark.once
def test_random_states_of_dropout_tell_no_trainings_apart(tmp_path):
    # Each process that loads a checkpoint draws them anew.
    def uptrained(state, *callbacks):
        model = m.linear_model()
        model.dropout = keras.layers.Dropout(0.1, seed=state)
        assert len(model.variables) > len(model.weights)
        callbacks = [m.checkpoint(tmp_path, 1), *callbacks]
        m.uptrain(model, steps=STEPS, callbacks=callbacks)
        return m.weights(model)

    with pytest.raises(KeyboardInterrupt):
        uptrained(1, Stop(3))
    assert same(uptrained(2), run()[0])


@pytest.mark.once
@slow_on_jax
def test_a_foreign_checkpoint_is_named_and_refused(tmp_path):
    broken(tmp_path, 3)
    with pytest.raises(ValueError, match="of another run") as error:
        run(
            tmp_path, seed=1, batch_size=8, optimizer="sgd", steps=STEPS + 1,
            stages=["attention", Stage("features", window_dropout=0)],
        )  # fmt: skip
    lines = str(error.value).splitlines()
    assert "  seed: saved 0, given 1" in lines
    assert "  batch_size: saved 16, given 8" in lines
    assert f"  steps: saved {STEPS}, given {STEPS + 1}" in lines
    assert any(x.startswith("  stages: saved [\"Stage(name='calibrate'") for x in lines)
    assert any(x.startswith("  optimizer: saved None, given ['SGD', {") for x in lines)
    with pytest.raises(ValueError, match=r"first batch of data \(checksum\): saved"):
        run(tmp_path, data=m.tokens()[::-1])
    with pytest.raises(ValueError, match="softmax weights"):
        model = m.linear_model()
        kernel = model.get_layer("attention_0")._query_dense.kernel
        kernel.assign(2 * kernel)
        m.uptrain(model, steps=STEPS, callbacks=m.checkpoint(tmp_path))
    for arguments, line in (
        ({"window": 4}, "layer 1: saved .*'window': None.*, given .*'window': 4"),
        ({"seed": 1}, "layer 0: saved"),
        ({"dtype": "mixed_bfloat16"}, "layer 0: saved .*'float32'.*given .*'bfloat16'"),
    ):
        with pytest.raises(ValueError, match=f"  {line}"):
            model = m.linear_model(**arguments)
            m.uptrain(model, steps=STEPS, callbacks=m.checkpoint(tmp_path))


@pytest.mark.once
def test_the_folder_holds_the_last_checkpoint(tmp_path):
    run(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["uptrain.npz"]
    assert saved_position(tmp_path) == (2, 0)


@pytest.mark.once
@slow_on_jax
def test_a_complete_run_deletes_its_checkpoint(tmp_path):
    expected, folder = run()[0], tmp_path / "backup"

    def backup(**arguments):
        return keras.callbacks.BackupAndRestore(folder, save_freq=1, **arguments)

    broken(None, 6, callbacks=[backup()])
    assert saved_position(folder) == (1, 1)
    assert same(run(callbacks=[backup(delete_checkpoint=False)])[0], expected)
    assert saved_position(folder) == (2, 0)
    run(callbacks=[backup()])
    assert not list(folder.iterdir())


class Doomed:
    """Kills its process at one checkpoint: before, while or after it is saved."""

    def __init__(self, position, phase):
        self.position, self.phase = position, phase

    def install(self):
        progress.save = self

    def __call__(self, backup, identity, values, notes):
        position = len(notes["results"]), len(notes["errors"])
        if position == self.position and self.phase == "before":
            kill()
        if position == self.position and self.phase == "while":
            os.replace = kill
        SAVE(backup, identity, values, notes)
        if position == self.position:
            kill()


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def program(folder, result, *doom):
    if keras.backend.backend() == "jax":
        import jax

        # What the first process compiles, the others read.
        jax.config.update("jax_compilation_cache_dir", str(result.parent / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
    if doom:
        Doomed(*doom).install()
    found, _ = run(folder, "favorpp_learned", steps=2 * KILLED_STEPS)
    np.savez(result, *found)


@pytest.mark.full
@pytest.mark.once
def test_killed_processes_go_on(tmp_path):
    # Imports are done once; every process is forked before anything is computed.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def code(*args):
        process = context.Process(target=program, args=args)
        process.start()
        process.join()
        return process.exitcode

    generator = np.random.default_rng(5)
    dooms = [((1, 0), "while")]
    for stage in (1, 2):
        steps = generator.choice(KILLED_STEPS, 2, replace=False) + 1
        phases = generator.choice(["before", "while", "after"], 2, replace=False)
        dooms += [
            # The last step of a stage is kept as the beginning of the next.
            ((stage, int(step)) if step < KILLED_STEPS else (stage + 1, 0), phase)
            for step, phase in zip(sorted(steps), phases, strict=True)
        ]
    expected, result = tmp_path / "expected.npz", tmp_path / "result.npz"
    assert code(tmp_path / "whole", expected) == 0
    for doom in dooms:
        assert code(tmp_path / "killed", result, *doom) == -signal.SIGKILL, doom
    assert code(tmp_path / "killed", result) == 0
    with np.load(expected) as a, np.load(result) as b:
        assert a.files == b.files and len(a.files) > 5
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name])
