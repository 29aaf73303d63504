"""Loading a softmax preset and replacing its attention in one call."""

from keras_rfattn.feature_maps.arguments import check_seed
from keras_rfattn.feature_maps.registry import check_identifier
from keras_rfattn.models.plan import Plan
from keras_rfattn.models.replace import replace_attention
from keras_rfattn.ops.options import Options


def from_preset(
    preset,
    feature_map="favorpp",
    *,
    task=None,
    num_features=None,
    include=None,
    exclude=None,
    seed=None,
    softmax_heads=None,
    **kwargs,
):
    """Loads a KerasHub preset and makes its attention linear.

    A preset that was saved after `replace_attention` needs no call of its own:
    import both packages and use KerasHub's `from_preset`.

    Args:
        preset: What KerasHub's `from_preset` takes: a built-in name
            (`"bert_base_en"`), a folder (KerasHub's or Hugging Face's), or a
            `"kaggle://"`, `"hf://"` or `"modelscope://"` handle.
        feature_map: The mechanism; see `replace_attention`.
        task: A KerasHub task class or its name (`"TextClassifier"`, `"CausalLM"`);
            the backbone alone if `None`.
        num_features: See `replace_attention`.
        include: See `replace_attention`.
        exclude: See `replace_attention`.
        seed: See `replace_attention`.
        softmax_heads: See `replace_attention`.
        **kwargs: The options of `replace_attention` (`window`, `sliding`,
            `block_size`); all else is passed to KerasHub's `from_preset`, such as
            `num_classes`.

    Returns:
        A KerasHub backbone or task.

    Raises:
        ImportError: If KerasHub is not installed.
        ValueError: If `task` is unknown, or as `replace_attention`.
    """
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError(
            "Presets need KerasHub. Install it with `pip install 'keras-rfattn[hub]'`."
        ) from error
    loader = keras_hub.models.Backbone if task is None else task
    if isinstance(task, str):
        loader = getattr(keras_hub.models, task, None)
    if not hasattr(loader, "from_preset"):
        raise ValueError(
            "`task` must be a KerasHub task class or its name, such as "
            f"'TextClassifier' or 'CausalLM'. Received: task={task!r}."
        )
    options = Options.take(kwargs)
    # A wrong mechanism is told before gigabytes are loaded.
    if isinstance(getattr(feature_map, "plan", feature_map), Plan):
        check_seed(seed)
    else:
        check_identifier(feature_map, num_features, seed)
    model = loader.from_preset(preset, **kwargs)
    return replace_attention(
        model,
        feature_map,
        num_features=num_features,
        include=include,
        exclude=exclude,
        seed=seed,
        softmax_heads=softmax_heads,
        **options.config(),
    )
