"""Table of what replacement must know about each class of Keras and its libraries.

This module imports no library. Rows are found by class name, so a class can be refused
without importing its library. Attention classes without a row are refused, because
their mathematics is not known. Subclasses of a class that can be linear are refused
too, unless they leave its computation unchanged. `swap` holds the linear classes of
Keras; the linear classes of a library are created when it is imported
(`keras_hub.py`).
"""

from typing import NamedTuple

KERAS, HUB, CV = "keras", "keras_hub", "keras_cv"


class Known(NamedTuple):
    """Facts about an attention class, or about a block that holds attention."""

    package: str
    # Set for an attention class that can be linear, and for a block with `masks`.
    module: str | None = None
    # For an attention class: why it cannot be linear, the mixin that makes it linear,
    # and whether its blocks build a dense mask instead of passing `use_causal_mask`.
    refused: str | None = None
    mixin: str = "CachedAttention"
    takes_dense: bool = False
    # For a block: whether it is causal (`None` if each call decides), the mixin that
    # builds its `AttentionMask`, and what a dense mask of its own does.
    causal: bool | None = None
    masks: str | None = None
    builds_mask: str = ""
    # For a block: whether it has one query, for which softmax is linear already.
    is_pooling: bool = False


def _attention(place, mixin="RotaryAttention"):
    """Creates the row of a KerasHub attention class whose blocks build dense masks."""
    module = f"keras_hub.src.models.{place}"
    return Known(HUB, module, mixin=mixin, takes_dense=True)


def _encoder(place, mixin):
    """Creates the row of a KerasHub attention class of encoders."""
    return Known(HUB, f"keras_hub.src.models.{place}", mixin=mixin)


def _decoder(place, masks="DecoderMasks"):
    """Creates the row of a KerasHub decoder block."""
    return Known(HUB, f"keras_hub.src.models.{place}", masks=masks)


ATTENTION = {
    "MultiHeadAttention": Known(KERAS, "keras.layers"),
    "GroupedQueryAttention": Known(KERAS, "keras.layers"),
    "CachedMultiHeadAttention": Known(HUB, "keras_hub.layers", takes_dense=True),
    "WhisperCachedMultiHeadAttention": _attention(
        "whisper.whisper_cached_multi_head_attention", "CachedAttention"
    ),
    "CachedGemmaAttention": _attention("gemma.gemma_attention", "GemmaAttention"),
    "CachedGemma3Attention": _attention("gemma3.gemma3_attention", "GemmaAttention"),
    "CachedMistralAttention": _attention("mistral.mistral_attention"),
    "CachedMixtralAttention": _attention("mixtral.mixtral_attention"),
    "DINOV3Attention": _encoder("dinov3.dinov3_layers", "DINOV3Attention"),
    "EsmSelfAttention": _encoder("esm.esm_attention", "EsmAttention"),
    "GPTNeoXAttention": _attention("gpt_neo_x.gpt_neo_x_attention", "GPTNeoXAttention"),
    "GptOssAttention": _attention("gpt_oss.gpt_oss_attention", "GptOssAttention"),
    "LlamaAttention": _attention("llama.llama_attention"),
    "MoonshineMultiHeadAttention": _attention(
        "moonshine.moonshine_multi_head_attention", "MoonshineAttention"
    ),
    "PaliGemmaVitAttention": _encoder(
        "pali_gemma.pali_gemma_vit", "PaliGemmaVitAttention"
    ),
    "Phi3Attention": _attention("phi3.phi3_attention"),
    "QwenAttention": _attention("qwen.qwen_attention"),
    "QwenMoeAttention": _attention("qwen_moe.qwen_moe_attention"),
    "Qwen3Attention": _attention("qwen3.qwen3_attention"),
    "Qwen3MoeAttention": _attention("qwen3_moe.qwen3_moe_attention"),
    "Qwen3_5Attention": _attention("qwen3_5.qwen3_5_attention"),
    "RoformerAttention": _encoder(
        "roformer_v2.roformer_v2_attention", "RoformerAttention"
    ),
    "SmolLM3Attention": _attention("smollm3.smollm3_layers"),
}

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

BLOCKS = {
    "TransformerDecoder": Known(HUB, "keras_hub.layers", masks="DecoderMasks"),
    # A subclass of Gemma's block: the first class that matches counts.
    "PaliGemmaDecoderBlock": _decoder(
        "pali_gemma.pali_gemma_decoder_block", "PaliGemmaMasks"
    ),
    "GemmaDecoderBlock": _decoder("gemma.gemma_decoder_block", "GemmaMasks"),
    "Gemma3DecoderBlock": _decoder("gemma3.gemma3_decoder_block", "Gemma3Masks"),
    "GPTNeoXDecoder": _decoder("gpt_neo_x.gpt_neo_x_decoder"),
    "GptOssTransformerDecoder": _decoder("gpt_oss.gpt_oss_decoder"),
    "LlamaTransformerDecoder": _decoder("llama.llama_decoder"),
    "MistralTransformerDecoder": _decoder("mistral.mistral_transformer_decoder"),
    "MixtralTransformerDecoder": _decoder("mixtral.mixtral_decoder"),
    "MoonshineDecoderBlock": _decoder("moonshine.moonshine_decoder"),
    "Phi3Decoder": _decoder("phi3.phi3_decoder"),
    "QwenTransformerDecoder": _decoder("qwen.qwen_decoder"),
    "QwenMoeTransformerDecoder": _decoder("qwen_moe.qwen_moe_decoder", "SparseMasks"),
    "Qwen3TransformerDecoder": _decoder("qwen3.qwen3_decoder"),
    "Qwen3MoeTransformerDecoder": _decoder(
        "qwen3_moe.qwen3_moe_decoder", "SparseMasks"
    ),
    "Qwen3_5TransformerDecoder": _decoder("qwen3_5.qwen3_5_decoder"),
    "SmolLM3DecoderLayer": _decoder("smollm3.smollm3_layers"),
    "SigLIPMultiHeadAttentionPooling": Known(HUB, is_pooling=True),
    "MultiHeadAttentionPooling": Known(HUB, is_pooling=True),
    "EdRecDecoderBlock": Known(HUB, builds_mask="whose meaning is unknown"),
    "PARSeqDecoderBlock": Known(HUB, builds_mask="whose meaning is unknown"),
}

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
    for base in cls.__mro__:
        if base.__name__ in ATTENTION:
            return ATTENTION[base.__name__]
    return NOTHING


def block(cls):
    """Returns the row of a block class, by its own name only."""
    return BLOCKS.get(cls.__name__, NOTHING)
