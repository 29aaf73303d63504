"""Decodes one token by a compiled program, on PyTorch and for tasks that ask for it."""

import contextlib

from keras import ops

from keras_rfattn.backend.layers import compiles_steps, programs
from keras_rfattn.layers.replaced_call import replacing_call
from keras_rfattn.models.notes import notes_of
from keras_rfattn.models.positions import tables_of


def weights_of_steps(task):
    """Returns the tensors of a task's variables, `None` if steps are not compiled."""
    return [x.value for x in task.variables] if compiles_steps(task) else None


def run_step(function, given, token_ids, cache, cache_update_index, *args, **kwargs):
    """Runs a function that overrides `call_with_cache`, for one token per row.

    Args:
        function: The overriding function (see `generation.overriding`).
        given: Its first arguments: the task, the task's own method and the
            `generation.Generating`. After `task.compile(jit_compile=True)` the function
            is compiled.
        token_ids: Integers `(B, 1)`.
        cache: `generation.Cache`.
        cache_update_index: Position of the token.
        *args: Further arguments of the task's own method.
        **kwargs: Further keyword arguments of the task's own method.

    Returns:
        The result of the function.
    """
    task, original, known = given
    # A program would not ask those who observe a layer, or answer in its place.
    observed = any(x.layer.recorder is not None for x in known.sites if x.is_linear)
    if observed or not compiles_steps(task):
        return function(*given, token_ids, cache, cache_update_index, *args, **kwargs)
    notes = notes_of(task)
    notes.steps = notes.steps or programs()

    def run(prompt, args, kwargs):
        with looking_up_positions(task):
            return function(task, original, known._replace(**prompt), *args, **kwargs)

    prompt = {"hidden": known.hidden, "end": known.end, "origin": known.origin}
    start = ops.convert_to_tensor(cache_update_index, dtype="int32")
    weights = known.weights or weights_of_steps(task)
    arguments = prompt, (token_ids, cache, start, *args), kwargs
    return notes.steps.run(run, arguments, weights)


@contextlib.contextmanager
def looking_up_positions(task):
    """Context manager in which learned positions are looked up, instead of sliced.

    On PyTorch, KerasHub reads the first index of the slice, which no program can do.
    """

    def around(call):
        def looked_up(inputs, start_index=0, positions=None):
            if positions is None:
                count = ops.shape(inputs)[-2]
                positions = start_index + ops.arange(count, dtype="int32")
            return call(inputs, positions=positions)

        return looked_up

    with contextlib.ExitStack() as stack:
        for table in tables_of(task):
            stack.enter_context(replacing_call(table, around))
        yield
