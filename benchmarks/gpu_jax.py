"""What `gpu.py` runs on JAX."""

import time

import jax
import jax.numpy as jnp
import keras

HAS_GPU = jax.default_backend() == "gpu"
NAMES = {
    "card": jax.devices()[0].device_kind if HAS_GPU else "CPU, interpreted",
    "jax": jax.__version__,
}
KERNEL = None


def milliseconds(run):
    """Returns the time of one call."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return 1000 * (time.perf_counter() - start)


def arrays(values, dtype):
    return [jnp.asarray(x, dtype) for x in values]


def runs(attention, arrays, backward):
    """Returns a function that runs attention, and returns gradients if `backward`."""

    def total(*arrays):
        return attention(*arrays).astype("float32").sum()

    function = jax.jit(jax.grad(total, argnums=(0, 1, 2)) if backward else attention)
    return lambda: function(*arrays)


def softmax(causal):
    """Returns JAX's softmax attention, by cuDNN on a GPU."""
    kind = "cudnn" if HAS_GPU else "xla"
    return lambda *arrays: jax.nn.dot_product_attention(
        *arrays, is_causal=causal, implementation=kind
    )


def runs_model(model, inputs, training):
    """Returns a function that runs a model, with gradients if `training`."""

    def loss(trainable, rest, inputs):
        outputs, _ = model.stateless_call(trainable, rest, inputs)
        leaves = keras.tree.flatten(outputs)
        return sum(jnp.square(x.astype("float32")).mean() for x in leaves)

    variables = model.trainable_variables, model.non_trainable_variables
    weights = [[v.value for v in x] for x in variables]
    function = jax.jit(jax.grad(loss) if training else loss)
    return lambda: function(*weights, inputs)
