"""Transcribes speech with a Whisper of KerasHub, and scores words; not a recipe itself.

KerasHub has the backbone of Whisper, but no task that generates text.
"""

import functools
import re

import keras
import keras_hub
import numpy as np
import tokenizers
from common.spoken_digits import distance
from common.whisper_ctranslate2 import END, PROMPT, Whisper
from keras import ops

from keras_rfattn.backend import without_gradients

DIGITS = "zero one two three four five six seven eight nine".split()


def encoder(backbone, frames=None, positions="continue"):
    """Returns the encoder of a backbone as a model, which shares the layers.

    Args:
        backbone: A `WhisperBackbone`.
        frames: Largest number of frames after the second convolution. The default is
            the backbone's own number (1500, for 30 s).
        positions: What the positions beyond the backbone's own ones are: `"continue"`
            goes on with Whisper's formula, and `"tile"` repeats the table.

    Returns:
        A model from features `(batch, 2 · frames, mels)` to `(batch, frames, hidden)`.
    """
    features = backbone.input["encoder_features"]
    own = backbone.max_encoder_sequence_length // 2
    if frames is None or frames <= own:
        return keras.Model(features, backbone.output["encoder_sequence_output"])
    table = backbone.encoder_position_embedding.position_embeddings
    table = ops.convert_to_numpy(table)
    if positions == "tile":
        table = np.tile(table, (-(-frames // own), 1))[:frames]
    else:
        table = np.concatenate([table, sinusoids(frames, table.shape[1])[own:]])
    embedding = keras_hub.layers.PositionEmbedding(frames, trainable=False)
    gelu = functools.partial(keras.activations.gelu, approximate=False)
    x = gelu(backbone.encoder_conv_layer_1(features))
    x = gelu(backbone.encoder_conv_layer_2(backbone.encoder_padder(x)))
    x = x + embedding(x)
    embedding.position_embeddings.assign(table)
    for layer in backbone.encoder_transformer_layers:
        x = layer(x)
    return keras.Model(features, backbone.encoder_layer_norm(x))


def sinusoids(length, width):
    """Returns the positions of Whisper's encoder, of shape `(length, width)`."""
    rates = np.exp(-np.log(10000) * np.arange(width // 2) / (width // 2 - 1))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype("float32")


def transcribe(whisper, encoded, max_tokens=224):
    """Returns transcripts by greedy decoding, without timestamps.

    Args:
        whisper: A `whisper_ctranslate2.Whisper`.
        encoded: Outputs of the encoder, of shape `(batch, frames, hidden)`.
        max_tokens: Largest number of tokens of a transcript. Half of the decoder's
            positions is OpenAI's limit.

    Returns:
        A list of strings.
    """
    backbone, tokenizer = whisper.backbone, whisper.tokenizer
    end = tokenizer.token_to_id(END)
    prompt = [tokenizer.token_to_id(x) for x in PROMPT]
    forbidden, first = _forbidden(whisper, end)
    batch, frames = encoded.shape[:2]
    size = backbone.hidden_dim // backbone.num_heads
    room = min(len(prompt) + max_tokens, backbone.max_decoder_sequence_length)
    caches = [
        [ops.zeros((batch, 2, n, backbone.num_heads, size)) for n in (room, frames)]
        for _ in backbone.decoder_transformer_layers
    ]
    tokens, start, written = np.tile(prompt, (batch, 1)), 0, []
    is_done = np.zeros(batch, bool)
    while start + tokens.shape[1] < room and not is_done.all():
        logits = _logits(backbone, encoded, tokens, start, caches)
        logits[:, forbidden] = -np.inf
        if not written:
            logits[:, first] = -np.inf
        found = np.where(is_done, end, logits.argmax(-1))
        is_done |= found == end
        written.append(found)
        start, tokens = start + tokens.shape[1], found[:, None]
    rows = np.stack(written, axis=1)
    return [tokenizer.decode([x for x in row if x != end]).strip() for row in rows]


def _forbidden(whisper, end):
    """Returns tokens that are forbidden everywhere, and at the start of a transcript.

    Timestamps and the other special tokens follow the end of the text.
    """
    special = range(end + 1, whisper.backbone.vocabulary_size)
    return [*whisper.suppressed, *special], whisper.suppressed_first


def _logits(backbone, encoded, tokens, start, caches):
    """Returns logits `(batch, vocabulary)` after the last token, and fills `caches`."""
    with without_gradients():
        x = backbone.decoder_embeddings(tokens, start_index=start)
        for i, layer in enumerate(backbone.decoder_transformer_layers):
            own, cross = caches[i]
            x, own, cross = layer(
                x, encoded, self_attention_cache=own,
                self_attention_cache_update_index=start, cross_attention_cache=cross,
                # Keys and values of the encoder's outputs are computed once.
                cross_attention_cache_update_index=None if start else 0,
            )  # fmt: skip
            caches[i] = own, cross
        x = backbone.decoder_layer_norm(x[:, -1])
        logits = backbone.token_embedding(x, reverse=True)
        return ops.convert_to_numpy(logits).copy()


def made_up(mels=8, seconds=1):
    """Returns a small `Whisper` that is not trained, with a token for each byte."""
    special = [END, *PROMPT]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *special])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.WhisperBackbone(
        vocabulary_size=len(vocabulary), num_layers=1, num_heads=2, hidden_dim=16,
        intermediate_dim=32, num_mels=mels, max_encoder_sequence_length=100 * seconds,
        max_decoder_sequence_length=12,
    )  # fmt: skip
    converter = keras_hub.layers.WhisperAudioConverter(
        num_mels=mels, max_audio_length=seconds
    )
    return Whisper(backbone, tokenizer, converter, [], [])


def words(text):
    """Returns the words of a text in lower case, with digits in full.

    A number of several digits is read digit by digit.
    """
    text = re.sub(r"\d", lambda x: f" {DIGITS[int(x[0])]} ", text.lower())
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text)


def word_errors(found, expected):
    """Returns the number of edits from lists of texts to others, and of their words.

    Args:
        found: List of strings.
        expected: List of strings, one for each of `found`.

    Returns:
        `(edits, words)`: insertions, deletions and substitutions, and the number of
        words in `expected`. Their quotient is the word error rate.
    """
    pairs = [(words(a), words(b)) for a, b in zip(found, expected, strict=True)]
    edits = sum(distance(a, np.array(b, dtype=object)) for a, b in pairs)
    return edits, sum(len(b) for _, b in pairs)
