"""Decodes a token on PyTorch by one program for all transformer blocks that are alike.

Measured: a Llama of SmolLM2-135M's shape on one CPU core, batch 1 (the guide
"Compilation and precision" has the table). Not measured: any GPU, other models, larger
batches, and softmax compiled in the same way. A row of a results page in which it beats
compiled softmax, on a GPU or at a long context, would bring it into core.

Core does not know of it: `compiled_steps` replaces the `call` of the blocks for the
current thread. A block runs once to record its operations, with its weights as inputs.
Blocks with equal records share a program of TorchInductor, the compiler behind
`torch.compile`.
"""

import contextlib
import warnings
import weakref
from functools import partial

import keras
import torch
import torch._inductor
from keras.src.backend import AutocastScope
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from keras_rfattn.backend.torch import is_plain
from keras_rfattn.layers.call_context import context_of
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.decoding import CACHES, Decoder
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.layers.replaced_call import replacing_call
from keras_rfattn.models.survey import survey

# Number of kinds of calls, such as batch sizes, whose programs each block keeps.
KEPT_KINDS = 4


@contextlib.contextmanager
def compiled_steps(model):
    """Context manager in which a model decodes single tokens by compiled programs."""
    backend = keras.backend.backend()
    if backend != "torch":
        raise ValueError(
            "Keras' backend must be PyTorch, because other backends compile the whole "
            f"loop of `generate`. Received: {backend!r}. Use `generate` alone."
        )
    blocks = {x.parent for x in survey(model) if x.is_linear and x.causal}
    if not blocks:
        raise ValueError(
            f"`model` must have causal linear attention. Received: {title(model)}, "
            "which has none. Call `keras_rfattn.replace_attention` first."
        )
    # Blocks keep the programs that they use.
    programs = weakref.WeakValueDictionary()
    with contextlib.ExitStack() as stack:
        for block in blocks:
            step = partial(BlockStep, block, programs)
            stack.enter_context(replacing_call(block, step))
        yield


class BlockStep:
    """The `call` of a transformer block, which runs a program for a single token.

    Args:
        block: The block.
        programs: Dict from what a program computes to the program, for all blocks.
        call: The block's own `call`.
    """

    def __init__(self, block, programs, call):
        self.block, self.programs, self.call = block, programs, call
        self.by_kind = {}

    def __call__(self, *args, **kwargs):
        layers = list(self.block._flatten_layers())
        attention = [x for x in layers if isinstance(x, LinearAttention)]
        decoders = [context_of(x).recorder for x in attention]
        is_step = bool(decoders) and all(map(_decodes_one_token, decoders))
        if not is_step or _has_hooks(layers):
            return self.call(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs, list(map(vars, decoders))))
        if _has_mode(leaves):
            return self.call(*args, **kwargs)
        variables = [v for x in layers for v in _variables(x)]
        with AutocastScope(None):
            weights = [v.value for v in variables]
        inputs = [*weights, *filter(_is_tensor, leaves)]
        # KerasHub passes a placeholder as long as the caches of softmax layers.
        blank = next((kwargs[x] for x in CACHES if x in kwargs), None)
        tensors = [(x[:, :, :1] if x is blank else x).contiguous() for x in inputs]
        constants = [repr(x) for x in leaves if not _is_tensor(x)]
        known = [(weakref.ref(x), type(x), x.dtype_policy.name) for x in layers]
        kind = *known, structure, *constants, *map(_layout, tensors)
        if kind not in self.by_kind:
            if len(self.by_kind) == KEPT_KINDS:
                del self.by_kind[next(iter(self.by_kind))]
            function = self._function(attention, variables, leaves, structure)
            self.by_kind[kind] = self._program(function, tensors)
        program = self.by_kind[kind]
        if program is None:
            return self.call(*args, **kwargs)
        output, states = program(tensors, inputs)
        for decoder, state in zip(decoders, states, strict=True):
            decoder.state = state
        return output

    def _function(self, attention, variables, leaves, structure):
        """Returns this call as a function of all tensors that it reads."""

        def function(*tensors):
            given = iter(tensors[len(variables) :])
            inputs = [next(given) if _is_tensor(x) else x for x in leaves]
            args, kwargs, attributes = tree_unflatten(inputs, structure)
            decoders = [Decoder(**x) for x in attributes]
            values = list(zip(variables, tensors, strict=False))
            with contextlib.ExitStack() as stack:
                stack.enter_context(keras.StatelessScope(state_mapping=values))
                for layer, decoder in zip(attention, decoders, strict=True):
                    context = context_of(layer).replace(recorder=decoder)
                    stack.enter_context(context.active())
                output = self.call(*args, **kwargs)
            return tree_flatten((output, [x.state for x in decoders]))

        return function

    def _program(self, function, tensors):
        """Returns the program of a function, `None` if it cannot be compiled."""
        # Inputs that are one tensor in this call may be two in another.
        tensors = [x.detach() for x in tensors]
        with Operations(tensors) as operations:
            outputs, structure = function(*tensors)
        # Numbers of the inputs that are returned as they are.
        sources = [operations.inputs.get(id(x)) for x in outputs]
        key = operations.text(outputs), *map(_layout, tensors)
        if key in self.programs:
            return self.programs[key]

        def computed(*tensors):
            outputs, _ = function(*tensors)
            return [x for x, i in zip(outputs, sources, strict=True) if i is None]

        try:
            run = torch._inductor.compile(make_fx(computed)(*tensors), tensors)
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(
                "PyTorch cannot compile a transformer block, which decodes uncompiled: "
                f"{reason}",
                stacklevel=2,
            )
            return None

        def program(tensors, inputs):
            results = iter(run(*tensors))
            leaves = [next(results) if i is None else inputs[i] for i in sources]
            return tree_unflatten(leaves, structure)

        return self.programs.setdefault(key, program)


class Operations(TorchDispatchMode):
    """Records the operations of a function, to recognize another that does the same."""

    def __init__(self, inputs):
        super().__init__()
        self.inputs = {id(x): i for i, x in enumerate(inputs)}
        self.numbers, self.lines = dict(self.inputs), []
        # While they live, no other tensors have their ids.
        self.tensors = list(inputs)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        self.lines.append(f"{operation} {self._described((args, kwargs))}")
        for x in tree_flatten(output)[0]:
            self.numbers.setdefault(id(x), len(self.numbers))
            self.tensors.append(x)
        return output

    def text(self, outputs):
        """Returns a text that is the same for functions that do the same."""
        return "\n".join([*self.lines, self._described(outputs)])

    def _described(self, arguments):
        leaves, structure = tree_flatten(arguments)
        return f"{[self._name(x) for x in leaves]} {structure}"

    def _name(self, x):
        if not _is_tensor(x):
            return repr(x)
        # A tensor that no operation made is a constant.
        number = self.numbers.get(id(x))
        return f"{_layout(x)} {x.tolist()}" if number is None else f"%{number}"


def _decodes_one_token(recorder):
    is_step = isinstance(recorder, Decoder) and recorder.state is not None
    return is_step and recorder.enters is None and recorder.visible.shape[1] == 1


# What programs would ignore.


def _has_hooks(layers):
    return any(x._forward_hooks or x._forward_pre_hooks for x in layers)


def _has_mode(leaves):
    tensors = [x for x in leaves if _is_tensor(x)]
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    if any(torch.is_autocast_enabled(x) for x in {x.device.type for x in tensors}):
        return True
    is_masked = any(getattr(x, "_keras_mask", None) is not None for x in tensors)
    return is_masked or not is_plain(*tensors)


def _variables(layer):
    # `Layer.variables` would walk through all layers below, in each of them.
    return layer._trainable_variables + layer._non_trainable_variables


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


def _layout(x):
    return x.shape, x.stride(), x.dtype, x.device
