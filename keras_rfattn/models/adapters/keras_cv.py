"""Adapter for KerasCV, whose development has ended.

KerasCV's `TransformerEncoder` holds a `keras.layers.MultiHeadAttention`, so it needs
no adapter. Its ViT runs on TensorFlow only. On other backends use the KerasHub ViT, to
which `convert_vit` copies the weights.
"""

import keras


def convert_vit(source: keras.Model) -> keras.Model:
    """Converts a KerasCV ViT to a KerasHub ViT with the same weights.

    The KerasCV model takes pixels from 0 to 255 (or 0 to 1 without rescaling). The
    KerasHub model takes pixels from -1 to 1, which KerasCV's own rescaling layers
    compute. KerasHub uses the exact GELU and KerasCV its tanh approximation, so the
    outputs agree to about three digits.

    Args:
        source: A ViT of `keras_cv.models.legacy.vit`, with its softmax attention.

    Returns:
        A `keras_hub.models.ViTBackbone`, or a `ViTImageClassifier` if `source` has a
        classification head (`include_top`).

    Raises:
        ImportError: If KerasHub is not installed.
        TypeError: If `source` is not a KerasCV ViT.
        ValueError: If the attention of `source` was replaced.
    """
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError(
            "`convert_vit` returns a KerasHub model. Install KerasHub with "
            "`pip install 'keras-rfattn[hub]'`."
        ) from error
    names = {
        cls.__name__ for cls in type(source).__mro__ if "keras_cv" in cls.__module__
    }
    if "ViT" not in names:
        raise TypeError(
            "`source` must be a ViT of keras_cv.models.legacy. Received: "
            f"source={source!r} of type {type(source).__name__}."
        )
    if any("/feature_map/" in w.path for w in source.weights):
        raise ValueError(
            "`source` must have softmax attention. Received: a ViT with linear "
            "attention. Call `restore_attention` first, convert, and replace attention "
            "in the result."
        )
    backbone = keras_hub.models.ViTBackbone(
        image_shape=tuple(source.input.shape[1:]),
        patch_size=source.patch_size,
        num_layers=source.transformer_layer_num,
        num_heads=source.num_heads,
        hidden_dim=source.project_dim,
        mlp_dim=source.mlp_dim,
        dropout_rate=source.mlp_dropout,
        attention_dropout=source.attention_dropout,
    )
    _copy(source, backbone)
    if not source.include_top:
        return backbone
    classifier = keras_hub.models.ViTImageClassifier(
        backbone,
        num_classes=source.num_classes,
        pooling="token",
        activation=source.classifier_activation,
    )
    head = [x for x in source.layers if isinstance(x, keras.layers.Dense)][-1]
    classifier.output_dense.set_weights(head.get_weights())
    return classifier


def _copy(source, backbone):
    """Copies weights layer by layer; `set_weights` checks their shapes."""
    embedding = _only(source, "PatchingAndEmbedding")
    blocks = [x for x in source.layers if type(x).__name__ == "TransformerEncoder"]
    norm = [x for x in source.layers if isinstance(x, keras.layers.LayerNormalization)][
        -1
    ]
    patching = _only(backbone, "ViTPatchingAndEmbedding")
    encoder = _only(backbone, "ViTEncoder")
    patching.class_token.assign(embedding.class_token)
    _transfer(embedding.projection, patching.patch_embedding)
    _transfer(embedding.position_embedding, patching.position_embedding)
    for old, new in zip(blocks, encoder.encoder_layers, strict=True):
        _transfer(old.layer_norm1, new.layer_norm_1)
        _transfer(old.attn, new.mha)
        _transfer(old.layer_norm2, new.layer_norm_2)
        _transfer(old.dense1, new.mlp.dense_1)
        _transfer(old.dense2, new.mlp.dense_2)
    _transfer(norm, encoder.layer_norm)


def _transfer(old, new):
    new.set_weights([keras.ops.convert_to_numpy(w) for w in old.weights])


def _only(model, name):
    return next(x for x in model._flatten_layers() if type(x).__name__ == name)
