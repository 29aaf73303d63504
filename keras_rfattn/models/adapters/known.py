"""Table of what replacement must know about each class of Keras and its libraries.

This module imports no library. Rows are found by class name, so a class can be refused
without importing its library. Attention classes without a row are refused, because
their mathematics is not known. Subclasses of a class that can be linear are refused
too, unless they leave its computation unchanged. `swap` holds the linear classes of
Keras; those of KerasHub are created when it is imported (`keras_hub.py`).
"""

from typing import NamedTuple

KERAS, HUB, CV = "keras", "keras_hub", "keras_cv"


class Known(NamedTuple):
    """Facts about an attention class, or about a block that holds attention."""

    package: str
    # Why an attention class cannot be linear.
    refused: str | None = None
    # The mixin that makes an attention class linear.
    mixin: str | None = None
    # Whether its blocks build a dense mask, and do not pass `use_causal_mask`.
    takes_dense: bool = False
    # Whether a block is causal; `None` if each call decides.
    causal: bool | None = None
    # The mixin that builds the `AttentionMask` of a block.
    masks: str | None = None
    # Why the dense mask of a block rules linear attention out.
    builds_mask: str = ""
    # Whether a block has one query, for which softmax takes linear time already.
    is_pooling: bool = False


ATTENTION = {"MultiHeadAttention": Known(KERAS), "GroupedQueryAttention": Known(KERAS)}
# Attention whose blocks build dense masks: class -> mixin.
DENSE = {
    "CachedMultiHeadAttention": "CachedAttention",
    "WhisperCachedMultiHeadAttention": "CachedAttention",
    "CachedGemmaAttention": "GemmaAttention",
    "CachedGemma3Attention": "GemmaAttention",
    "CachedMistralAttention": "RotaryAttention",
    "CachedMixtralAttention": "RotaryAttention",
    "GPTNeoXAttention": "GPTNeoXAttention",
    "GptOssAttention": "GptOssAttention",
    "LlamaAttention": "RotaryAttention",
    "MoonshineMultiHeadAttention": "MoonshineAttention",
    "Phi3Attention": "RotaryAttention",
    "QwenAttention": "RotaryAttention",
    "QwenMoeAttention": "RotaryAttention",
    "Qwen3Attention": "RotaryAttention",
    "Qwen3MoeAttention": "RotaryAttention",
    "Qwen3_5Attention": "RotaryAttention",
    "SmolLM3Attention": "RotaryAttention",
}
ATTENTION |= {x: Known(HUB, mixin=y, takes_dense=True) for x, y in DENSE.items()}
# Attention of encoders: class -> mixin.
OF_ENCODERS = {
    "DINOV3Attention": "DINOV3Attention",
    "EsmSelfAttention": "EsmAttention",
    "PaliGemmaVitAttention": "PaliGemmaVitAttention",
    "RoformerAttention": "RoformerAttention",
}
ATTENTION |= {x: Known(HUB, mixin=y) for x, y in OF_ENCODERS.items()}

# Attention classes that are refused, and why.
REFUSED_KERAS = {
    "AdditiveAttention": "additive scores, not a dot product",
    "Attention": "a single head without projections; use MultiHeadAttention",
}
REFUSED_HUB = {
    "Attention2d": "attention over images (MobileNetV5)",
    "BloomAttention": "ALiBi position bias",
    "Conv2DMultiHeadAttention": "one head over an image (VAE)",
    "DFineMultiheadAttention": "softmax inside its own call, "
    "with masks of denoising groups",
    "DFineMultiscaleDeformableAttention": "deformable sampling",
    "DisentangledSelfAttention": "disentangled relative positions (DeBERTa)",
    "FalconAttention": "ALiBi position bias",
    "FluxRoPEAttention": "softmax inside its own call, "
    "on queries and keys of its block",
    "Gemma3VisionAttention": "softmax inside its own call",
    "Gemma3nAudioAttention": "relative positions and soft cap",
    "Gemma3nTextAttention": "some layers reuse the keys and values of another layer, "
    "from a cache that a state of sums replaces",
    "Gemma4AudioAttention": "relative positions, in chunks",
    "Gemma4TextAttention": "some layers reuse the keys and values of another layer, "
    "from a cache that a state of sums replaces",
    "Gemma4VisionAttention": "soft cap and a scale of its own",
    "MMDiTBlock": "joint attention of two streams inside its block",
    "MultiQueryAttention2d": "attention over images with reduced keys (MobileNetV5)",
    "MultiHeadAttentionWithDownsampling": "downsampled two-way attention (SAM)",
    "MultiHeadAttentionWithRelativePE": "decomposed relative position bias (ViTDet)",
    "QFormerAttention": "a few learned queries, for which softmax is linear already",
    "Qwen3_5VisionAttention": "softmax inside its own call, image by image",
    "SAM3Attention": "softmax inside its own call, with biases",
    "SAM3RoPEAttention": "windows over images (SAM 3)",
    "SegFormerMultiheadAttention": "spatially reduced keys (SegFormer)",
    "T5Gemma2Attention": "its blocks add masks that mix padding and sliding windows",
    "T5Gemma2MergedAttention": "self-attention and cross-attention in one softmax",
    "T5GemmaAttention": "its blocks add masks that mix padding and sliding windows, "
    "and its logits have a soft cap",
    "T5MultiHeadAttention": "relative position bias",
    "TwoStreamRelativeAttention": "relative positions and two streams (XLNet)",
    "VideoPrismAttention": "soft cap on its logits",
}
REFUSED_CV = {
    "CLIPAttention": "KerasCV's own CLIP; use the KerasHub CLIPBackbone",
    "VideoSwinWindowAttention": "shifted windows",
    "WindowAttention": "shifted windows with relative position bias (Swin)",
}
REFUSED = {KERAS: REFUSED_KERAS, HUB: REFUSED_HUB, CV: REFUSED_CV}
ATTENTION |= {
    name: Known(package, refused=reason)
    for package, reasons in REFUSED.items()
    for name, reason in reasons.items()
}

DECODERS = (
    "GPTNeoXDecoder", "GptOssTransformerDecoder", "LlamaTransformerDecoder",
    "MistralTransformerDecoder", "MixtralTransformerDecoder", "MoonshineDecoderBlock",
    "Phi3Decoder", "Qwen3TransformerDecoder", "Qwen3_5TransformerDecoder",
    "QwenTransformerDecoder", "SmolLM3DecoderLayer", "TransformerDecoder",
)  # fmt: skip
BLOCKS = {
    "PaliGemmaDecoderBlock": Known(HUB, masks="PaliGemmaMasks"),
    "GemmaDecoderBlock": Known(HUB, masks="GemmaMasks"),
    "Gemma3DecoderBlock": Known(HUB, masks="Gemma3Masks"),
    "QwenMoeTransformerDecoder": Known(HUB, masks="SparseMasks"),
    "Qwen3MoeTransformerDecoder": Known(HUB, masks="SparseMasks"),
    "SigLIPMultiHeadAttentionPooling": Known(HUB, is_pooling=True),
    "MultiHeadAttentionPooling": Known(HUB, is_pooling=True),
    "EdRecDecoderBlock": Known(HUB, builds_mask="whose meaning is unknown"),
    "PARSeqDecoderBlock": Known(HUB, builds_mask="whose meaning is unknown"),
}
BLOCKS |= {name: Known(HUB, masks="DecoderMasks") for name in DECODERS}
# Blocks of encoders. KerasCV has a `TransformerEncoder` too, for which the same holds.
ENCODERS = (
    "DINOV2Attention", "DINOV3Layer", "DeiTEncoderBlock", "ESMEncoder",
    "EdRecEncoderBlock", "MoonshineEncoderBlock", "PaliGemmaVitEncoderBlock",
    "RoformerV2Encoder", "TransformerEncoder", "ViTEncoderBlock", "WhisperEncoder",
)  # fmt: skip
BLOCKS |= {name: Known(HUB, causal=False) for name in ENCODERS}

# Library of a saved model -> requirement for pip that installs it.
INSTALL = {HUB: "'keras-rfattn[hub]'", CV: "'keras-rfattn[cv]'"}

NOTHING = Known("")


def attention(cls):
    """Returns the row of an attention class, or of its nearest base with a row."""
    return next(
        (ATTENTION[x.__name__] for x in cls.__mro__ if x.__name__ in ATTENTION), NOTHING
    )


def block(cls):
    """Returns the row of a block class, by its own name only."""
    return BLOCKS.get(cls.__name__, NOTHING)


def masks(cls):
    """Returns the name of the mixin for a block class, or for its nearest base."""
    rows = (BLOCKS.get(x.__name__, NOTHING) for x in cls.__mro__ if is_of_hub(x))
    return next((row.masks for row in rows if row.masks), None)


def is_of_hub(cls):
    """Returns whether a class is one of KerasHub."""
    return cls.__module__.startswith(f"{HUB}.")
