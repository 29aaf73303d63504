"""Loads a softmax preset and replaces its attention in one call."""

from keras_rfattn.feature_maps.arguments import check_flag
from keras_rfattn.models.matching import check_mechanism
from keras_rfattn.models.replace import replace_attention
from keras_rfattn.ops.options import Options


def from_preset(
    preset,
    feature_map="favorpp_learned",
    *,
    task=None,
    num_features=None,
    include=None,
    exclude=None,
    seed=None,
    softmax_heads=None,
    drop_sliding_window=False,
    drop_soft_cap=False,
    **kwargs,
):
    """Loads a KerasHub preset and makes its attention linear.

    A preset that was saved after `replace_attention` does not need this function:
    import both packages and use KerasHub's `from_preset`.

    Args:
        preset: A preset that KerasHub's `from_preset` accepts: a built-in name
            (`"bert_base_en"`), a folder (KerasHub's or Hugging Face's), or a
            `"kaggle://"`, `"hf://"` or `"modelscope://"` handle.
        feature_map: Name of a mechanism, a `FeatureMap`, its config or a
            `models.Plan`; see `replace_attention`.
        task: A KerasHub task class or its name (`"TextClassifier"`, `"CausalLM"`).
            `None` loads only the backbone.
        num_features: Number of random vectors per head, for a map given by name.
            Defaults to twice the head dim for most maps.
        include: Layers to replace; see `replace_attention`.
        exclude: Layers to keep softmax; see `replace_attention`.
        seed: Seed of the random vectors; see `replace_attention`.
        softmax_heads: Dict from layer paths or patterns to the query heads that stay
            softmax; see `replace_attention`.
        drop_sliding_window: Whether to replace layers with a sliding window too; see
            `replace_attention`.
        drop_soft_cap: Whether to replace layers with a soft cap on their logits; see
            `replace_attention`.
        **kwargs: Options of `replace_attention` (`window`, `sliding`, `block_size`).
            All other arguments, such as `num_classes`, are passed to KerasHub's
            `from_preset`.

    Returns:
        A KerasHub backbone or task with linear attention.

    Raises:
        ImportError: If KerasHub is not installed.
        ValueError: If `task` is unknown, or `replace_attention` raises.

    Examples:
        >>> import keras_hub
        >>> softmax = keras_hub.models.BertBackbone(
        ...     vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8,
        ...     intermediate_dim=16, max_sequence_length=8)
        >>> softmax.save_to_preset("tiny_bert")
        >>> model = keras_rfattn.from_preset("tiny_bert", "favorplus", num_features=16)
        >>> keras_rfattn.describe_attention(model).rows[0].mechanism
        'favorplus'
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
    # Raises for invalid arguments before gigabytes of weights are loaded.
    check_mechanism(feature_map, num_features, seed)
    check_flag("drop_sliding_window", drop_sliding_window)
    check_flag("drop_soft_cap", drop_soft_cap)
    model = loader.from_preset(preset, **kwargs)
    return replace_attention(
        model,
        feature_map,
        num_features=num_features,
        include=include,
        exclude=exclude,
        seed=seed,
        softmax_heads=softmax_heads,
        drop_sliding_window=drop_sliding_window,
        drop_soft_cap=drop_soft_cap,
        **options.config(),
    )
