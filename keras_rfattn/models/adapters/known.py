"""One row a foreign class: what surgery must know of it. Imports nothing.

Rows go by class name, so that no library has to be imported to refuse a class of it.
Attention classes without a row are refused, as their mathematics is not known;
subclasses of a class that can be linear are too, unless they leave its computation
alone. What a class of Keras becomes stands in `swap`; those of a library become linear
when it is imported (`keras_hub.py`).
"""

from typing import NamedTuple

KERAS, HUB, CV = "keras", "keras_hub", "keras_cv"


class Known(NamedTuple):
    """What is known of an attention class, or of a block that holds attention.

    Attributes:
        package: What it belongs to, by its import name.
        module: Of an attention class that can be linear, and of a block with `masks`,
            where it is found; `None` for others.
        refused: Why linear attention cannot take its place.
        causal: Of a block, whether its attention is causal; `None` where each call
            decides.
        masks: Of a block, name of the mixin in its library's file that builds its masks
            as facts.
        builds_mask: Of a block that hands its attention a dense mask of its own
            making, what the mask does.
        mixin: Of an attention class that can be linear, name of the mixin in its
            library's file that makes it so.
        takes_dense: Of an attention class, whether its blocks build the causal mask
            instead of asking for it.
        is_pooling: Of a block, whether it attends with one query a sequence, where
            softmax is linear already, and exact.
    """

    package: str
    module: str | None = None
    refused: str | None = None
    causal: bool | None = None
    masks: str | None = None
    mixin: str = "CachedAttention"
    builds_mask: str = ""
    takes_dense: bool = False
    is_pooling: bool = False


def _attention(place, mixin="RotaryAttention", takes_dense=True):
    """The row of an attention class with a mixin of its own.

    By default that of decoders with rotary embeddings and grouped heads.
    """
    module = f"keras_hub.src.models.{place}"
    return Known(HUB, module, mixin=mixin, takes_dense=takes_dense)


def _decoder(place, masks="DecoderMasks"):
    """The row of the block that holds it."""
    return Known(HUB, f"keras_hub.src.models.{place}", masks=masks)


ATTENTION = {
    "MultiHeadAttention": Known(KERAS, "keras.layers"),
    "GroupedQueryAttention": Known(KERAS, "keras.layers"),
    "CachedMultiHeadAttention": Known(HUB, "keras_hub.layers", takes_dense=True),
    "WhisperCachedMultiHeadAttention": Known(
        HUB,
        "keras_hub.src.models.whisper.whisper_cached_multi_head_attention",
        takes_dense=True,
    ),
    "AdditiveAttention": Known(KERAS, refused="additive scores, not a dot product"),
    "Attention": Known(
        KERAS,
        refused="a single head without projections; use MultiHeadAttention",
    ),
    "Attention2d": Known(HUB, refused="attention over images (MobileNetV5)"),
    "BloomAttention": Known(HUB, refused="ALiBi position bias"),
    "CachedGemma3Attention": Known(
        HUB, refused="sliding windows and query-key soft cap"
    ),
    "CachedGemmaAttention": _attention("gemma.gemma_attention", "GemmaAttention"),
    "CachedMistralAttention": _attention("mistral.mistral_attention"),
    "CachedMixtralAttention": _attention("mixtral.mixtral_attention"),
    "DINOV3Attention": _attention(
        "dinov3.dinov3_layers", "DINOV3Attention", takes_dense=False
    ),
    "EsmSelfAttention": _attention(
        "esm.esm_attention", "EsmAttention", takes_dense=False
    ),
    "GPTNeoXAttention": _attention("gpt_neo_x.gpt_neo_x_attention", "GPTNeoXAttention"),
    "LlamaAttention": _attention("llama.llama_attention"),
    "MoonshineMultiHeadAttention": _attention(
        "moonshine.moonshine_multi_head_attention", "MoonshineAttention"
    ),
    "PaliGemmaVitAttention": _attention(
        "pali_gemma.pali_gemma_vit", "PaliGemmaVitAttention", takes_dense=False
    ),
    "Phi3Attention": _attention("phi3.phi3_attention"),
    "QwenAttention": _attention("qwen.qwen_attention"),
    "QwenMoeAttention": _attention("qwen_moe.qwen_moe_attention"),
    "Qwen3Attention": _attention("qwen3.qwen3_attention"),
    "Qwen3MoeAttention": _attention("qwen3_moe.qwen3_moe_attention"),
    "Qwen3_5Attention": _attention("qwen3_5.qwen3_5_attention"),
    "RoformerAttention": _attention(
        "roformer_v2.roformer_v2_attention", "RoformerAttention", takes_dense=False
    ),
    "SmolLM3Attention": _attention("smollm3.smollm3_layers"),
    "CLIPAttention": Known(
        CV, refused="KerasCV's own CLIP; use the KerasHub CLIPBackbone"
    ),
    "Conv2DMultiHeadAttention": Known(HUB, refused="one head over an image (VAE)"),
    "DFineMultiheadAttention": Known(
        HUB, refused="softmax inside its own call, with masks of denoising groups"
    ),
    "DFineMultiscaleDeformableAttention": Known(HUB, refused="deformable sampling"),
    "DisentangledSelfAttention": Known(
        HUB, refused="disentangled relative positions (DeBERTa)"
    ),
    "FalconAttention": Known(HUB, refused="ALiBi position bias"),
    "FluxRoPEAttention": Known(
        HUB, refused="softmax inside its own call, on queries and keys of its block"
    ),
    "Gemma3VisionAttention": Known(HUB, refused="softmax inside its own call"),
    "Gemma3nAudioAttention": Known(HUB, refused="relative positions and soft cap"),
    "Gemma3nTextAttention": Known(
        HUB, refused="sliding windows, and keys shared between layers"
    ),
    "Gemma4AudioAttention": Known(HUB, refused="relative positions, in chunks"),
    "Gemma4TextAttention": Known(
        HUB, refused="sliding windows, and keys shared between layers"
    ),
    "Gemma4VisionAttention": Known(HUB, refused="soft cap and a scale of its own"),
    "GptOssAttention": Known(HUB, refused="attention sinks and sliding windows"),
    "MMDiTBlock": Known(HUB, refused="joint attention of two streams inside its block"),
    "MultiQueryAttention2d": Known(
        HUB, refused="attention over images with reduced keys (MobileNetV5)"
    ),
    "MultiHeadAttentionWithDownsampling": Known(
        HUB, refused="downsampled two-way attention (SAM)"
    ),
    "MultiHeadAttentionWithRelativePE": Known(
        HUB, refused="decomposed relative position bias (ViTDet)"
    ),
    "QFormerAttention": Known(
        HUB, refused="a few learned queries, for which softmax is linear already"
    ),
    "Qwen3_5VisionAttention": Known(
        HUB, refused="softmax inside its own call, image by image"
    ),
    "SAM3Attention": Known(HUB, refused="softmax inside its own call, with biases"),
    "SAM3RoPEAttention": Known(HUB, refused="windows over images (SAM 3)"),
    "SegFormerMultiheadAttention": Known(
        HUB, refused="spatially reduced keys (SegFormer)"
    ),
    "T5Gemma2Attention": Known(HUB, refused="soft cap and sliding windows"),
    "T5Gemma2MergedAttention": Known(HUB, refused="soft cap and sliding windows"),
    "T5GemmaAttention": Known(HUB, refused="soft cap and sliding windows"),
    "T5MultiHeadAttention": Known(HUB, refused="relative position bias"),
    "TwoStreamRelativeAttention": Known(
        HUB, refused="relative positions and two streams (XLNet)"
    ),
    "VideoSwinWindowAttention": Known(CV, refused="shifted windows"),
    "VideoPrismAttention": Known(HUB, refused="soft cap on its logits"),
    "WindowAttention": Known(
        CV, refused="shifted windows with relative position bias (Swin)"
    ),
}

BLOCKS = {
    "TransformerDecoder": Known(HUB, "keras_hub.layers", masks="DecoderMasks"),
    # Before Gemma's, whose subclass it is.
    "PaliGemmaDecoderBlock": _decoder(
        "pali_gemma.pali_gemma_decoder_block", "PaliGemmaMasks"
    ),
    "GemmaDecoderBlock": _decoder("gemma.gemma_decoder_block", "GemmaMasks"),
    "GPTNeoXDecoder": _decoder("gpt_neo_x.gpt_neo_x_decoder"),
    "LlamaTransformerDecoder": _decoder("llama.llama_decoder"),
    "MistralTransformerDecoder": _decoder("mistral.mistral_transformer_decoder"),
    "MixtralTransformerDecoder": _decoder("mixtral.mixtral_decoder"),
    "MoonshineDecoderBlock": _decoder("moonshine.moonshine_decoder"),
    "Phi3Decoder": _decoder("phi3.phi3_decoder"),
    "QwenTransformerDecoder": _decoder("qwen.qwen_decoder"),
    "QwenMoeTransformerDecoder": _decoder(
        "qwen_moe.qwen_moe_decoder", "SparseDecoderMasks"
    ),
    "Qwen3TransformerDecoder": _decoder("qwen3.qwen3_decoder"),
    "Qwen3MoeTransformerDecoder": _decoder(
        "qwen3_moe.qwen3_moe_decoder", "SparseDecoderMasks"
    ),
    "Qwen3_5TransformerDecoder": _decoder("qwen3_5.qwen3_5_decoder"),
    "SmolLM3DecoderLayer": _decoder("smollm3.smollm3_layers"),
    "DINOV2Attention": Known(HUB, causal=False),
    "DINOV3Layer": Known(HUB, causal=False),
    "ESMEncoder": Known(HUB, causal=False),
    "RoformerV2Encoder": Known(HUB, causal=False),
    "MoonshineEncoderBlock": Known(HUB, causal=False),
    "DeiTEncoderBlock": Known(HUB, causal=False),
    "PaliGemmaVitEncoderBlock": Known(HUB, causal=False),
    "EdRecEncoderBlock": Known(HUB, causal=False),
    # KerasCV has one of that name too, and it is alike.
    "TransformerEncoder": Known(HUB, causal=False),
    "ViTEncoderBlock": Known(HUB, causal=False),
    "WhisperEncoder": Known(HUB, causal=False),
    "SigLIPMultiHeadAttentionPooling": Known(HUB, is_pooling=True),
    "MultiHeadAttentionPooling": Known(HUB, is_pooling=True),
    "EdRecDecoderBlock": Known(HUB, builds_mask="of a meaning not known here"),
    "PARSeqDecoderBlock": Known(HUB, builds_mask="of a meaning not known here"),
}

# What attention classes call the normalization of their queries.
QUERY_NORMALIZATIONS = (
    "query_norm", "_query_norm", "q_norm", "_query_dense_layer_norm",
)  # fmt: skip

# What saved models may be of, and what installs it.
INSTALL = {HUB: "'keras-rfattn[hub]'", CV: "'keras-rfattn[cv]'"}

NOTHING = Known("")


def attention(cls):
    """The row of an attention class or of its nearest parent that has one."""
    for base in cls.__mro__:
        if base.__name__ in ATTENTION:
            return ATTENTION[base.__name__]
    return NOTHING


def block(cls):
    """The row of a block class, by its own name alone."""
    return BLOCKS.get(cls.__name__, NOTHING)
