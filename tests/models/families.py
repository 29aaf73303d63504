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
    "vit": vit,
    "deit": deit,
    "clip": clip,
    "siglip": siglip,
    "dinov2": dinov2,
}


def build(name):
    """A model of the family with attention that matters, and its inputs."""
    keras.utils.set_random_seed(0)
    model, inputs = FAMILIES[name]()
    rng = _rng()
    for weight in model.trainable_weights:
        # Freshly initialised attention is close to uniform.
        if weight.path.endswith(("query/kernel", "key/kernel")):
            weight.assign(rng.normal(size=weight.shape) * 0.7)
    return model, inputs


def outputs(model, inputs):
    """All outputs of a model, flat, as NumPy arrays."""
    flat = keras.tree.flatten(model(inputs, training=False))
    return [keras.ops.convert_to_numpy(x) for x in flat]
