"""Small models of every family, with inputs: builders by name."""

import keras
import keras_hub
import numpy as np

models = keras_hub.models
TEXT = dict(
    vocabulary_size=60,
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=24,
    dropout=0.0,
    max_sequence_length=12,
)
VISION = dict(num_layers=2, num_heads=2, hidden_dim=16)


def _rng():
    return np.random.default_rng(0)


def tokens():
    mask = np.ones((2, 9), dtype="int32")
    mask[1, 6:] = 0
    return {
        "token_ids": _rng().integers(2, 60, (2, 9)).astype("int32"),
        "padding_mask": mask,
    }


def segments():
    return {**tokens(), "segment_ids": np.zeros((2, 9), dtype="int32")}


def sequences():
    x = tokens()
    return {
        "encoder_token_ids": x["token_ids"],
        "encoder_padding_mask": x["padding_mask"],
        "decoder_token_ids": x["token_ids"][:, ::-1][:, :7].copy(),
        "decoder_padding_mask": x["padding_mask"][:, :7],
    }


def images():
    return _rng().uniform(size=(2, 16, 16, 3)).astype("float32")


def pairs():
    return {"images": images(), "token_ids": tokens()["token_ids"]}


def bert():
    backbone = models.BertBackbone(**TEXT)
    return models.BertTextClassifier(backbone, num_classes=3), segments()


def roberta():
    backbone = models.RobertaBackbone(**TEXT)
    return models.RobertaTextClassifier(backbone, num_classes=3), tokens()


def xlm_roberta():
    backbone = models.XLMRobertaBackbone(**TEXT)
    return models.XLMRobertaTextClassifier(backbone, num_classes=3), tokens()


def distil_bert():
    backbone = models.DistilBertBackbone(**TEXT)
    return models.DistilBertTextClassifier(backbone, num_classes=3), tokens()


def albert():
    backbone = models.AlbertBackbone(embedding_dim=8, num_groups=1, **TEXT)
    return models.AlbertTextClassifier(backbone, num_classes=3), segments()


def electra():
    config = dict(TEXT, vocab_size=60, embedding_dim=8)
    config.pop("vocabulary_size")
    return models.ElectraBackbone(**config), segments()


def bart():
    return models.BartSeq2SeqLM(models.BartBackbone(**TEXT)), sequences()


def gpt2():
    return models.GPT2CausalLM(models.GPT2Backbone(**TEXT)), tokens()


def opt():
    return models.OPTCausalLM(models.OPTBackbone(**TEXT)), tokens()


GROUPED = dict(
    vocabulary_size=60, num_layers=2, num_query_heads=4, num_key_value_heads=2,
    hidden_dim=16, intermediate_dim=24, dropout=0.0,
)  # fmt: skip
EXPERTS = dict(
    moe_intermediate_dim=12, num_experts=3, tie_word_embeddings=False,
)  # fmt: skip


def llama(**arguments):
    config = {k: v for k, v in GROUPED.items() if k != "dropout"} | arguments
    return models.LlamaCausalLM(models.LlamaBackbone(**config)), tokens()


def llama3():
    config = {k: v for k, v in GROUPED.items() if k != "dropout"}
    return models.Llama3CausalLM(models.Llama3Backbone(**config)), tokens()


def mistral():
    backbone = models.MistralBackbone(sliding_window=None, **GROUPED)
    return models.MistralCausalLM(backbone), tokens()


def mixtral():
    backbone = models.MixtralBackbone(
        sliding_window=None, num_experts=3, top_k=2, **GROUPED
    )
    return models.MixtralCausalLM(backbone), tokens()


def qwen():
    return models.QwenCausalLM(models.QwenBackbone(**GROUPED)), tokens()


def qwen_moe():
    backbone = models.QwenMoeBackbone(
        shared_expert_intermediate_dim=12, top_k=2, **EXPERTS, **GROUPED
    )
    return models.QwenMoeCausalLM(backbone), tokens()


def qwen3():
    backbone = models.Qwen3Backbone(head_dim=8, sliding_window_size=None, **GROUPED)
    return models.Qwen3CausalLM(backbone), tokens()


def qwen3_moe():
    backbone = models.Qwen3MoeBackbone(
        head_dim=8, top_k=2, sliding_window_size=None,
        norm_top_k_prob=True, **EXPERTS, **GROUPED,
    )  # fmt: skip
    return models.Qwen3MoeCausalLM(backbone), tokens()


def phi3():
    config = {k: v for k, v in GROUPED.items() if k != "dropout"}
    return models.Phi3CausalLM(models.Phi3Backbone(**config)), tokens()


def gpt_neo_x():
    backbone = models.GPTNeoXBackbone(rotary_percentage=0.5, **TEXT)
    return models.GPTNeoXCausalLM(backbone), tokens()


def smollm3():
    backbone = models.SmolLM3Backbone(
        vocabulary_size=60, hidden_dim=16, intermediate_dim=24, num_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attention_bias=False,
        attention_dropout=0.0, rope_layer_enabled_list=[True, False],
        layer_types=["attention"] * 2, mlp_bias=False, layer_norm_epsilon=1e-5,
        max_position_embeddings=64, rope_theta=10000.0, partial_rotary_factor=1.0,
    )  # fmt: skip
    return models.SmolLM3CausalLM(backbone), tokens()


def vit():
    backbone = models.ViTBackbone((16, 16, 3), 4, mlp_dim=24, **VISION)
    return models.ViTImageClassifier(backbone, num_classes=3), images()


def deit():
    backbone = models.DeiTBackbone((16, 16, 3), 4, intermediate_dim=24, **VISION)
    return models.DeiTImageClassifier(backbone, num_classes=3), images()


def clip():
    vision = models.CLIPVisionEncoder(
        4, intermediate_dim=24, image_shape=(16, 16, 3), **VISION
    )
    text = models.CLIPTextEncoder(
        60, 16, intermediate_dim=24, max_sequence_length=9, **VISION
    )
    return models.CLIPBackbone(vision, text, projection_dim=8), pairs()


def siglip():
    vision = models.SigLIPVisionEncoder(
        4, intermediate_dim=24, image_shape=(16, 16, 3), **VISION
    )
    text = models.SigLIPTextEncoder(
        60, 16, intermediate_dim=24, max_sequence_length=9, **VISION
    )
    return models.SigLIPBackbone(vision, text), pairs()


def dinov2():
    backbone = models.DINOV2Backbone(
        4,
        intermediate_dim=24,
        image_shape=(16, 16, 3),
        position_embedding_shape=(16, 16, 3),
        **VISION,
    )
    # Upstream keeps a resized copy of the position table that training does not
    # refresh and loading does: the softmax model does not round-trip either.
    backbone.embeddings.trainable = False
    return backbone, images()


def gemma():
    config = {k: v for k, v in GROUPED.items() if k != "dropout"}
    return models.GemmaCausalLM(models.GemmaBackbone(head_dim=6, **config)), tokens()


def qwen3_5():
    # Layers of its own linear attention between those of softmax.
    backbone = models.Qwen3_5Backbone(
        head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=4,
        linear_value_head_dim=4, sliding_window_size=None, **GROUPED,
    )  # fmt: skip
    return models.Qwen3_5CausalLM(backbone), tokens()


def whisper():
    backbone = models.WhisperBackbone(
        num_mels=8, max_encoder_sequence_length=20, max_decoder_sequence_length=12,
        **{k: v for k, v in TEXT.items() if k != "max_sequence_length"},
    )  # fmt: skip
    x = tokens()
    return backbone, {
        "encoder_features": _rng().normal(size=(2, 20, 8)).astype("float32"),
        "decoder_token_ids": x["token_ids"],
        "decoder_padding_mask": x["padding_mask"],
    }


def moonshine():
    backbone = models.MoonshineBackbone(
        vocabulary_size=60, filter_dim=16, encoder_num_layers=1, decoder_num_layers=2,
        hidden_dim=16, intermediate_dim=24, encoder_num_heads=2, decoder_num_heads=2,
    )  # fmt: skip
    x = tokens()
    mask = np.ones((2, 2048), "int32")
    mask[1, 1200:] = 0
    return backbone, {
        "encoder_input_values": _rng().normal(size=(2, 2048, 1)).astype("float32"),
        "encoder_padding_mask": mask,
        "decoder_token_ids": x["token_ids"],
        "decoder_padding_mask": x["padding_mask"],
    }


def esm():
    config = {k: v for k, v in TEXT.items() if k != "max_sequence_length"}
    x = tokens()
    # Padding goes by the token.
    x["token_ids"][x["padding_mask"] == 0] = 0
    return models.ESMBackbone(**config), {"token_ids": x["token_ids"]}


def roformer_v2():
    config = {k: v for k, v in TEXT.items() if k != "max_sequence_length"}
    x = segments()
    # Padding goes by the token.
    x["token_ids"][x.pop("padding_mask") == 0] = 0
    return models.RoformerV2Backbone(head_size=8, **config), x


def dinov3():
    return models.DINOV3Backbone(
        patch_size=4, intermediate_dim=24, image_shape=(16, 16, 3), **VISION
    ), images()


FAMILIES = {
    "bert": bert,
    "roberta": roberta,
    "xlm_roberta": xlm_roberta,
    "distil_bert": distil_bert,
    "albert": albert,
    "electra": electra,
    "bart": bart,
    "gpt2": gpt2,
    "opt": opt,
    "llama": llama,
    "llama3": llama3,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen": qwen,
    "qwen_moe": qwen_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "phi3": phi3,
    "gpt_neo_x": gpt_neo_x,
    "smollm3": smollm3,
    "vit": vit,
    "deit": deit,
    "clip": clip,
    "siglip": siglip,
    "dinov2": dinov2,
    "gemma": gemma,
    "qwen3_5": qwen3_5,
    "whisper": whisper,
    "moonshine": moonshine,
    "esm": esm,
    "roformer_v2": roformer_v2,
    "dinov3": dinov3,
}


CAPPED = dict(
    num_query_heads=4, num_key_value_heads=2, hidden_dim=16, intermediate_dim=24,
    vocabulary_size=60, head_dim=6, use_post_ffw_norm=True,
    use_post_attention_norm=True, use_sliding_window_attention=True,
    sliding_window_size=3,
)  # fmt: skip


def gemma2():
    backbone = models.GemmaBackbone(
        num_layers=2, attention_logit_soft_cap=2.0, final_logit_soft_cap=30.0, **CAPPED
    )
    return models.GemmaCausalLM(backbone), tokens()


def gemma3(num_layers=6):
    backbone = models.Gemma3Backbone(image_size=16, num_layers=num_layers, **CAPPED)
    return models.Gemma3CausalLM(preprocessor=None, backbone=backbone), tokens()


def embedding_gemma():
    backbone = models.Gemma3Backbone(
        image_size=16, num_layers=6, use_bidirectional_attention=True,
        is_embedding_model=True, pooling_intermediate_dim=12, embedding_dim=8, **CAPPED,
    )  # fmt: skip
    return models.Gemma3TextEmbedder(backbone), tokens()


def gpt_oss(num_layers=2):
    backbone = models.GptOssBackbone(
        num_experts=2, top_k=1, sliding_window=3, **GROUPED | {"num_layers": num_layers}
    )
    return models.GptOssCausalLM(backbone), tokens()


# Models in which some layers have a sliding window and others see all tokens.
HYBRIDS = {
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
    "gemma3": gemma3,
    "embedding_gemma": embedding_gemma,
}


QUERIES_AND_KEYS = tuple(
    f"{x}/kernel"
    for x in (
        "query",
        "key",
        "query_dense",
        "key_dense",
        "q_proj",
        "k_proj",
        "q_dense_layer",
        "k_dense_layer",
    )
) + ("query_key_value/kernel",)


def build(name, **arguments):
    """A model of the family with attention that matters, and its inputs."""
    keras.utils.set_random_seed(0)
    model, inputs = (FAMILIES | HYBRIDS)[name](**arguments)
    rng = _rng()
    for weight in model.trainable_weights:
        # Freshly initialised attention is close to uniform.
        if weight.path.endswith(QUERIES_AND_KEYS):
            weight.assign(rng.normal(size=weight.shape) * 0.7)
    return model, inputs


def outputs(model, inputs):
    """All outputs of a model, flat, as NumPy arrays."""
    flat = keras.tree.flatten(model(inputs, training=False))
    found = [keras.ops.convert_to_numpy(x) for x in flat]
    # Moonshine gives its mask, too.
    return [x for x in found if x.dtype != bool]
