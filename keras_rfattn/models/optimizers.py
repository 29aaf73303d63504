"""Keeps built optimizers in step with the weights that their models train.

An optimizer holds slots, such as moments, for the weights that its model trained when
it was built. Keras fails if the model trains other weights later, and on JAX the model
then loses its weights. Slots are therefore made anew where weights come or go, and the
weights that stay keep theirs.
"""

import contextlib
import gc

import keras

from keras_rfattn.models.holders import holders
from keras_rfattn.models.swap import strategy_scope


@contextlib.contextmanager
def following(layers, training=None, model=None):
    """Context manager that changes trained weights; yields the holders of `layers`.

    `training` are those of the layers whose trained weights change, by default all.
    """
    training = layers if training is None else training
    around = holders(layers, model)
    if any(not _can_follow(x) for x in _with_built_optimizer(training, around)):
        # Models that nobody uses any more may still await garbage collection. They
        # must not cause an error.
        del around
        gc.collect()
        around = holders(layers, model)
    models = _with_built_optimizer(training, around)
    for model in models:
        if not _can_follow(model):
            raise ValueError(
                f"The optimizer of {type(model).__name__} '{model.name}' is built for "
                "other weights than the model trains, or has slots that cannot be told "
                "apart, so that it cannot follow a change of the trained weights. "
                f"Received: {type(model.optimizer).__name__}. Compile the model with "
                "a new optimizer first."
            )
    yield around
    for model in models:
        _follow(model)


def _with_built_optimizer(layers, around):
    """Returns those of the layers, and of what holds them, with a built optimizer."""
    models = [*layers, *holders(layers, among=around)]
    optimizers = ((x, getattr(x, "optimizer", None)) for x in models)
    return [model for model, x in optimizers if x is not None and x.built]


def _parts(optimizer):
    """Returns an optimizer, and the one that it wraps, if any."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, inner]


def _slots(optimizer):
    """Returns `(lists, single)`: slots by attribute, one for each weight or alone."""
    count, lists, single = len(optimizer._trainable_variables), {}, {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables", *_LASTING):
            continue
        if isinstance(value, keras.Variable):
            single[name] = value
        elif isinstance(value, list) and len(value) == count:
            if all(x is None or isinstance(x, keras.Variable) for x in value):
                lists[name] = list(value)
    return lists, single


# Attributes of variables that an optimizer has before it is built.
_LASTING = ("_iterations", "_learning_rate")


def _lasting(optimizer):
    return {id(getattr(optimizer, name)) for name in _LASTING}


def _can_follow(model):
    optimizer = model.optimizer
    if [*map(id, optimizer._trainable_variables)] != [
        *map(id, model.trainable_variables)
    ]:
        return False
    for part in _parts(optimizer):
        lists, single = _slots(part)
        known = {id(x) for x in [*sum(lists.values(), []), *single.values()]}
        known |= _lasting(part)
        of_keras = type(part).__module__.startswith("keras.")
        if not of_keras or any(id(x) not in known for x in part._variables):
            return False
    return True


def _follow(model):
    """Builds an optimizer anew; weights that it knew keep their slots' values."""
    optimizer, weights = model.optimizer, model.trainable_variables
    places = {id(v): i for i, v in enumerate(optimizer._trainable_variables)}
    if places.keys() == {id(v) for v in weights}:
        return
    before = [(part, _slots(part)) for part in _parts(optimizer)]
    for part, _ in before:
        lasting = _lasting(part)
        for variable in list(part._variables):
            if id(variable) not in lasting:
                part._tracker.untrack(variable)
        part._trainable_variables_indices = {}
        part.built = False
    with strategy_scope(model):
        optimizer.build(weights)
    for part, (lists, single) in before:
        for name, value in single.items():
            getattr(part, name).assign(value)
        for name, slots in lists.items():
            for weight, slot in zip(weights, getattr(part, name), strict=True):
                place = places.get(id(weight))
                if place is not None and slot is not None:
                    slot.assign(slots[place])
                elif name == "_model_variables_moving_average":
                    slot.assign(weight)
