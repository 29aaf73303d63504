"""Compiles functions of PyTorch tensors from a trace of their operations.

`torch.compile` translates the Python code of a function. It takes about ten seconds for
each layer of a Keras model, and checks at every call whether anything that the code
reads has changed. A trace runs the function once and records its operations, as
`jax.jit` does. TorchInductor, the compiler behind `torch.compile`, takes these.
"""

import warnings

import keras
import torch
import torch._inductor
from torch.fx.experimental.proxy_tensor import make_fx

from keras_rfattn.backend.torch import is_plain


class Programs:
    """The compiled programs of one model, by the arguments that they take."""

    def __init__(self):
        self.programs = {}

    def run(self, function, arguments, weights):
        """Calls a function by its program, which the first call compiles.

        A function that cannot be compiled runs as it is, after a warning.

        Args:
            function: Function of nested structures of tensors. Its only effect must be
                its result, a nested structure of tensors.
            arguments: Tuple of the arguments. All values in them that are not tensors
                are constants of the program.
            weights: List of the tensors that the function reads besides. A program
                keeps reading the same tensors; with other tensors a new one is
                compiled.

        Returns:
            The function's result.
        """
        if _has_mode() or not is_plain(*keras.tree.flatten(arguments)):
            return function(*arguments)
        key = _kind(arguments), tuple(map(id, weights))
        if key not in self.programs:
            # The weights are kept, so that no other tensor can have the id of one.
            self.programs[key] = _compiled(function, arguments), list(weights)
        program = self.programs[key][0] or function
        return program(*arguments)


def _has_mode():
    """Returns whether PyTorch is in a mode that programs know nothing of."""
    is_cast = any(torch.is_autocast_enabled(x) for x in ("cpu", "cuda"))
    return is_cast or torch.is_grad_enabled() or torch.is_inference_mode_enabled()


def _kind(arguments):
    """Returns the structure of arguments, the types of tensors, and other values."""

    def kind(x):
        return (x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else x

    return tuple((path, kind(x)) for path, x in keras.tree.flatten_with_path(arguments))


def _compiled(function, arguments):
    """Returns the program of a function, or `None` if it cannot be compiled."""
    result = []
    tensors = _tensors(keras.tree.flatten(arguments))

    def record(tensors):
        given = iter(tensors)
        leaves = keras.tree.flatten(arguments)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in leaves]
        output = function(*keras.tree.pack_sequence_as(arguments, leaves))
        result.append(keras.tree.map_structure(lambda x: 0, output))
        return keras.tree.flatten(output)

    try:
        trace = _with_constants(make_fx(record)(tensors))
        trace = torch._inductor.compile(trace, [tensors])
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(
            f"PyTorch cannot compile a step of generation, which runs uncompiled: "
            f"{reason} `compile(jit_compile=False)` avoids the attempt.",
            stacklevel=2,
        )
        return None

    def program(*arguments):
        output = trace(_tensors(keras.tree.flatten(arguments)))
        return keras.tree.pack_sequence_as(result[0], output)

    return program


def _tensors(leaves):
    # Programs take tensors of the strides that they were compiled for.
    return [x.contiguous() for x in leaves if isinstance(x, torch.Tensor)]


def _with_constants(trace):
    """Computes once what depends on neither inputs nor weights, and returns the trace.

    Keras turns Python numbers into tensors, and sending one to a GPU waits for the GPU.
    """
    graph, constants = trace.graph, {}
    changed = _changed(graph)
    for node in graph.nodes:
        if node in changed or not _is_constant(node, constants):
            continue
        known = {**constants, **_numbers(trace, node)}
        given = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
        constants[node] = node.target(*given[0], **given[1])
    for i, (node, value) in enumerate(constants.items()):
        if isinstance(value, torch.Tensor) and not set(node.users) <= set(constants):
            name = f"constant_{i}"
            trace.register_buffer(name, value)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(name))
    graph.eliminate_dead_code()
    trace.recompile()
    return trace


def _is_constant(node, constants):
    """Returns whether an operation depends on Python numbers or constants alone."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    is_number = node.target is torch.ops.aten.lift_fresh_copy.default
    return is_number or all(x in constants for x in node.all_input_nodes)


def _changed(graph):
    """Returns the nodes whose memory an operation overwrites, perhaps by a view."""
    found = set()
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        is_view = node.target is torch.ops.aten._unsafe_view.default or any(
            x.alias_info is not None for x in schema.returns
        )
        if schema.is_mutable or is_view and node in found:
            found |= {node, *node.all_input_nodes}
    return found


def _numbers(trace, node):
    """Returns the values of the attributes of a trace that an operation reads."""
    read = [x for x in node.all_input_nodes if x.op == "get_attr"]
    return {x: getattr(trace, x.target) for x in read}
