"""Computes log-probabilities of tokens, with logits only where they are needed."""

import keras
import numpy as np
from keras import ops

from keras_rfattn.backend import without_gradients
from keras_rfattn.backend.layers import compiled_for_inference
from keras_rfattn.layers.checks import check_model, title

# Number of tokens of a row whose logits are computed at once, which limits memory.
CHUNK = 512


class Scorer:
    """Scores tokens under a model, of which it computes only these tokens' logits.

    Args:
        model: A KerasHub `CausalLM`, or a model or function from tokens to logits.
    """

    def __init__(self, model):
        self.body, self.head = _parts(model)
        self.score = self._score
        embedding = getattr(getattr(model, "backbone", model), "token_embedding", None)
        self.vocabulary_size = getattr(embedding, "input_dim", None)
        if isinstance(model, keras.layers.Layer):
            self.body = compiled_for_inference(self.body, model)
            self.score = compiled_for_inference(self._score, model)

    def __call__(self, ids, mask, places, targets):
        """Scores the tokens that follow given places.

        Args:
            ids: Integers of shape `(B, T)`.
            mask: 1 for a token and 0 for padding, of the same shape.
            places: Integers of shape `(B, A)`, indices of tokens of a row.
            targets: Integers of shape `(B, A)`, the tokens that follow these.

        Returns:
            `(log_probs, is_right)`, NumPy arrays of shape `(B, A)`: the log-probability
            of each target, and whether it is the most probable token.
        """
        if self.vocabulary_size is not None:
            _check_tokens(ids, self.vocabulary_size)
        with without_gradients():
            x = ops.convert_to_tensor(self.body(_tensor(ids), _tensor(mask)))
            if len(x.shape) != 3 or tuple(x.shape[:2]) != ids.shape:
                raise ValueError(
                    "`model` must return logits of shape (batch, time, "
                    f"vocabulary_size). Received: shape {tuple(x.shape)} for tokens of "
                    f"shape {ids.shape}."
                )
            if self.vocabulary_size is None:
                _check_tokens(ids, x.shape[2])
            results = []
            for i in range(0, places.shape[1], CHUNK):
                part = slice(i, i + CHUNK)
                scores = self.score(
                    x, _tensor(places[:, part]), _tensor(targets[:, part])
                )
                # At once, so that no more than one chunk waits for the device.
                results.append([ops.convert_to_numpy(score) for score in scores])
        return [np.concatenate(parts, axis=1) for parts in zip(*results, strict=True)]

    def _score(self, x, places, targets):
        logits = self.head(ops.take_along_axis(x, places[:, :, None], axis=1))
        log_probs = ops.log_softmax(ops.cast(logits, "float32"))
        chosen = ops.take_along_axis(log_probs, targets[:, :, None], axis=2)
        best = ops.cast(ops.argmax(logits, axis=-1), "int32")
        return chosen[:, :, 0], ops.equal(best, targets)


def _parts(model):
    """Returns functions `(body, head)`; `head(body(ids, mask))` are logits."""
    is_layer = isinstance(model, keras.layers.Layer)
    if callable(model) and not is_layer and not isinstance(model, type):
        return lambda ids, mask: model(ids), lambda x: x
    check_model(model)
    backbone = getattr(model, "backbone", model)
    if hasattr(backbone, "token_embedding"):
        return (
            lambda ids, mask: backbone(
                {"token_ids": ids, "padding_mask": mask}, training=False
            ),
            lambda x: backbone.token_embedding(x, reverse=True),
        )
    if backbone is not model:
        raise TypeError(
            "`model` must be a CausalLM whose backbone has a `token_embedding`. "
            f"Received: {title(model)}. Use a function from tokens to logits."
        )
    return lambda ids, mask: model(ids, training=False), lambda x: x


def _check_tokens(ids, vocabulary_size):
    """Raises `ValueError` if there is a token that a model does not know."""
    if ids.max() >= vocabulary_size:
        raise ValueError(
            f"`model` must know all tokens. Received: the token {ids.max()}, and a "
            f"vocabulary of {vocabulary_size} tokens. Use the tokenizer of the model."
        )


def _tensor(x):
    return ops.convert_to_tensor(x, dtype="int32")
