"""KerasHub: presets, tokenizers, generation, causality, refusals."""

import importlib.util
import json

import keras
import keras_hub
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.models import generation, swap
from tests import helpers as h
from tests.marks import MAP_FORMS, first, first_on_jax
from tests.models import families

models = keras_hub.models
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "quick", "fox"]


def causal_lm(scale=1.0):
    model, inputs = families.build("gpt2")
    for weight in model.weights:
        if weight.path.endswith(("query/kernel", "key/kernel")):
            weight.assign(weight * scale)
    return model, inputs


def bert_task():
    tokenizer = models.BertTokenizer(vocabulary=VOCABULARY)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=7)
    backbone = models.BertBackbone(**{**families.TEXT, "vocabulary_size": 8})
    return models.BertTextClassifier(backbone, 2, preprocessor=preprocessor)


def gpt2_task():
    merges = ["Ġ q", "u i", "c k", "ui ck", "Ġq uick", "Ġ f", "o x", "Ġf ox"]
    parts = [
        part for merge in merges for part in (*merge.split(), merge.replace(" ", ""))
    ]
    words = ["<|endoftext|>", "a", *dict.fromkeys(parts)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = models.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    backbone = models.GPT2Backbone(**families.TEXT)
    return models.GPT2CausalLM(backbone, preprocessor=preprocessor)


def predict(model, inputs):
    return np.asarray(model.predict(inputs, verbose=0))


OTHERS = [x for x in h.NAMES if x != "favorpp"]


@pytest.mark.parametrize(
    ("name", "scale"),
    first(
        [("favorpp", 1.0), *((x, 20.0) for x in MAP_FORMS), *((x, 1.0) for x in OTHERS)]
    ),
)
def test_other_future_tokens_change_nothing_before(name, scale):
    model, inputs = causal_lm(scale)
    keras_rfattn.replace_attention(model, name, seed=0)
    output = predict(model, inputs)
    assert np.isfinite(output).all()
    other = dict(inputs, token_ids=inputs["token_ids"].copy())
    other["token_ids"][:, 5:] = 2 + (other["token_ids"][:, 5:] + 7) % 50
    changed = predict(model, other)
    np.testing.assert_array_equal(changed[:, :5], output[:, :5])
    assert np.any(changed[:, 5:] != output[:, 5:])


def test_padding_content_changes_nothing():
    for name in ("bert", "gpt2"):
        model, inputs = families.build(name)
        keras_rfattn.replace_attention(model, "favorpp", num_features=32, seed=0)
        other = dict(inputs, token_ids=inputs["token_ids"].copy())
        hidden = inputs["padding_mask"] == 0
        assert hidden.any()
        other["token_ids"][hidden] = 41
        a, b = predict(model, inputs), predict(model, other)
        if a.ndim == 3:
            a, b = a[~hidden], b[~hidden]
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("make", [bert_task, gpt2_task])
def test_presets_bring_tokenizer_and_preprocessor(make, tmp_path):
    model = make()
    softmax = str(tmp_path / "softmax")
    model.save_to_preset(softmax)
    keras_rfattn.replace_attention(model, "favorpp", num_features=16, seed=0)
    expected = model.predict(["a quick fox"], verbose=0)
    folder = str(tmp_path / "linear")
    model.save_to_preset(folder)

    cls = type(model).original_class
    tokenizer_cls = type(model.preprocessor.tokenizer).original_class
    preprocessor_cls = type(model.preprocessor).original_class
    loaded = cls.from_preset(folder)
    np.testing.assert_array_equal(loaded.predict(["a quick fox"], verbose=0), expected)
    tokenizer = tokenizer_cls.from_preset(folder)
    assert list(tokenizer("a quick fox")) == list(
        model.preprocessor.tokenizer("a quick fox")
    )
    preprocessor = preprocessor_cls.from_preset(folder)
    assert preprocessor.sequence_length == model.preprocessor.sequence_length
    # A softmax preset loads as before.
    plain = cls.from_preset(softmax)
    assert type(plain) is cls
    assert not keras_rfattn.describe_attention(plain).replaced
    assert type(tokenizer_cls.from_preset(softmax)) is tokenizer_cls
    keras_rfattn.restore_attention(model)
    assert type(model.preprocessor.tokenizer) is tokenizer_cls
    assert type(model.preprocessor) is preprocessor_cls


@pytest.mark.full
@pytest.mark.once
@pytest.mark.smoke
def test_new_head_on_a_linear_preset(tmp_path):
    model = bert_task()
    keras_rfattn.replace_attention(model, "elu")
    model.save_to_preset(str(tmp_path))
    other = models.TextClassifier.from_preset(str(tmp_path), num_classes=5)
    assert other.predict(["a fox"], verbose=0).shape == (1, 5)
    assert len(keras_rfattn.describe_attention(other).replaced) == 2
    assert isinstance(models.MaskedLM.from_preset(str(tmp_path)), models.BertMaskedLM)


@pytest.mark.smoke
def test_an_edited_preset_never_loads_as_softmax(tmp_path):
    backbone = models.GPT2Backbone(**families.TEXT)
    keras_rfattn.replace_attention(backbone, "favorplus", num_features=8)
    backbone.save_to_preset(str(tmp_path))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["config"]["attention"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="attention"):
        models.GPT2Backbone.from_preset(str(tmp_path))
    config["registered_name"] = "keras_hub>GPT2Backbone"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="2 objects could not be loaded.*query"):
        models.GPT2Backbone.from_preset(str(tmp_path))


def test_tasks_that_share_a_backbone_follow_it():
    backbone = models.BertBackbone(**families.TEXT)
    first = models.BertTextClassifier(backbone, num_classes=2)
    second = models.BertMaskedLM(backbone)
    keras_rfattn.replace_attention(first, "elu")
    for task in (first, second):
        config = task.get_config()
        assert "attention" in config["backbone"]["config"]
        # The backbone says it once. A revived task has the same config.
        assert config == type(task).from_config(task.get_config()).get_config()
    keras_rfattn.restore_attention(first)
    assert type(second) is models.BertMaskedLM


def made_late(family, **arguments):
    """A task around a backbone whose attention was linear already, and its inputs."""
    model, inputs = families.build(family)
    keras_rfattn.replace_attention(model.backbone, **arguments, seed=0)
    late = swap.original_class(model)(backbone=model.backbone)
    late.compile(sampler="greedy")
    model.compile(sampler="greedy")
    prompt = dict(inputs, padding_mask=inputs["token_ids"] * 0)
    prompt["padding_mask"][:, :4] = prompt["padding_mask"][0, :6] = 1
    return model, late, prompt


@pytest.mark.parametrize("family", first(["llama", "gpt2", "gemma", "gpt_neo_x"]))
def test_a_task_made_around_a_linear_backbone(family):
    model, late, prompt = made_late(family, feature_map="favorpp", num_features=16)
    assert type(late) is swap.original_class(model) is not type(model)
    first, second = (
        np.asarray(x.generate(dict(prompt), stop_token_ids=None)["token_ids"])
        for x in (model, late)
    )
    h.assert_same(first, second)
    with pytest.raises(TypeError, match=r"Call `keras_rfattn.register\(task\)`"):
        keras_rfattn.generation.prefill(late, prompt["token_ids"])
    keras_rfattn.register(late)
    assert type(late) is type(model)
    cache = late._build_cache(keras.ops.convert_to_tensor(prompt["token_ids"]))[1]
    assert isinstance(cache, generation.Cache)
    again = late.generate(dict(prompt), stop_token_ids=None)["token_ids"]
    h.assert_same(first, np.asarray(again))
    keras_rfattn.restore_attention(model.backbone)
    assert type(late) is type(model) is swap.original_class(model)


def test_a_preset_of_a_task_made_around_a_linear_backbone(tmp_path):
    model = bert_task()
    keras_rfattn.replace_attention(model.backbone, "favorplus", num_features=8, seed=0)
    late = models.BertTextClassifier(model.backbone, 3, model.preprocessor)
    assert type(late) is models.BertTextClassifier
    expected = late.predict(["a quick fox"], verbose=0)
    late.save_to_preset(str(tmp_path))
    loaded = models.TextClassifier.from_preset(str(tmp_path))
    np.testing.assert_array_equal(loaded.predict(["a quick fox"], verbose=0), expected)
    assert loaded.preprocessor.sequence_length == 7
    assert keras_rfattn.describe_attention(loaded).replaced


@pytest.mark.parametrize("family", first(["gpt2", "opt"]))
def test_generation_equals_greedy_search_without_a_cache(family):
    model, inputs = families.build(family)
    keras_rfattn.replace_attention(model, "favorpp", num_features=32, seed=0)
    prompt = {
        "token_ids": inputs["token_ids"].copy(),
        "padding_mask": np.zeros((2, 9), "int32"),
    }
    prompt["padding_mask"][:, :4] = 1
    model.compile(sampler="greedy")
    generated = model.generate(dict(prompt), stop_token_ids=None)["token_ids"]
    tokens = prompt["token_ids"].copy()
    for i in range(4, 9):
        logits = predict(
            model, {**prompt, "token_ids": tokens, "padding_mask": tokens * 0 + 1}
        )
        tokens[:, i] = logits[:, i - 1].argmax(-1)
    np.testing.assert_array_equal(np.asarray(generated), tokens)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float16"])
def test_low_precision_models(policy):
    model, inputs = families.build("gpt2")
    config = dict(families.TEXT, dtype=policy)
    low = models.GPT2CausalLM(models.GPT2Backbone(**config))
    for a, b in zip(low.weights, model.weights, strict=True):
        a.assign(keras.ops.cast(keras.ops.convert_to_tensor(b), a.dtype))
    for m in (model, low):
        keras_rfattn.replace_attention(m, "favorplus", num_features=64, seed=0)
    a, b = families.outputs(model, inputs)[0], families.outputs(low, inputs)[0]
    b = b.astype("float32")
    assert np.isfinite(b).all()
    assert np.abs(a - b).max() < 0.1 * np.abs(a).max()


def test_serving_routes_that_would_run_softmax_raise():
    model, _ = families.build("gpt2")
    keras_rfattn.replace_attention(model, "elu")
    layer = model.backbone.transformer_layers[0]._self_attention_layer
    with pytest.raises(ValueError, match="vLLM"):
        layer._compute_vllm_attention(None, None, None, None)


@pytest.mark.smoke
def test_keras_nlp_is_the_same_package():
    keras_nlp = pytest.importorskip("keras_nlp")
    backbone = keras_nlp.models.GPT2Backbone(**families.TEXT)
    keras_rfattn.replace_attention(backbone, "elu")
    assert isinstance(backbone, keras_nlp.models.GPT2Backbone)


REFUSED = {
    "DebertaV3Backbone": ("disentangled", dict(bucket_size=8)),
    "T5Backbone": ("relative position bias", {}),
    "BloomBackbone": ("ALiBi", {}),
    "GemmaBackbone": (
        "soft cap of 50 on its logits",
        dict(
            num_query_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            attention_logit_soft_cap=50,
        ),
    ),
}


@pytest.mark.parametrize("name", first_on_jax(reversed(REFUSED)))
def test_refused_by_name(name):
    reason, extra = REFUSED[name]
    size = dict(vocabulary_size=50, num_layers=1, num_heads=2, hidden_dim=16)
    size.update(intermediate_dim=32, **extra)
    if "num_query_heads" in extra:
        size.pop("num_heads")
    model = getattr(models, name)(**size)
    classes = [type(x) for x in model._flatten_layers()]
    with pytest.raises(ValueError, match=f"(?s){model.name}.*Attention.*{reason}"):
        keras_rfattn.replace_attention(model)
    assert [type(x) for x in model._flatten_layers()] == classes


@pytest.mark.full
@pytest.mark.once
def test_windows_leave_out_cross_attention():
    model, inputs = families.build("bart")
    classes = [type(x) for x in model._flatten_layers()]
    with pytest.raises(ValueError, match="(?s)needs self-attention.*cross_attention"):
        keras_rfattn.replace_attention(model, "favorplus", window=4)
    assert [type(x) for x in model._flatten_layers()] == classes
    exact = families.outputs(model, inputs)
    keras_rfattn.replace_attention(
        model, "favorplus", window=64, exclude="*cross_attention", seed=0
    )
    for a, b in zip(families.outputs(model, inputs), exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("family", ["bert", "gpt2", "roberta", "albert", "opt", "bart"])
def test_tiled_positions_keep_short_inputs(family):
    model, inputs = families.build(family)
    keras_rfattn.replace_attention(model, "favorplus", num_features=16, seed=0)
    longer = keras_rfattn.extend_positions(model, 30)
    assert longer.backbone.max_sequence_length == 30
    assert len(keras_rfattn.describe_attention(longer).replaced) == len(
        keras_rfattn.describe_attention(model).replaced
    )
    for a, b in zip(
        families.outputs(longer, inputs), families.outputs(model, inputs), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    table = next(w for w in longer.weights if "position_embedding" in w.path)
    table = keras.ops.convert_to_numpy(table)
    np.testing.assert_array_equal(table[12:24], table[:12])


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("family", ["vit", "deit"])
def test_image_grids_grow(family):
    model, images = families.build(family)
    keras_rfattn.replace_attention(model, "favorplus", num_features=16, seed=0)
    larger = keras_rfattn.extend_positions(model, (16, 32))
    both = np.concatenate([images, images], axis=2)
    assert families.outputs(larger, both)[0].shape == (2, 3)
    table = next(w for w in larger.weights if "position_embedding" in w.path)
    table = keras.ops.convert_to_numpy(table).reshape(-1, 16)
    grid = table[-4 * 8 :].reshape(4, 8, 16)
    np.testing.assert_array_equal(grid[:, :4], grid[:, 4:])
    small = next(w for w in model.weights if "position_embedding" in w.path)
    small = keras.ops.convert_to_numpy(small).reshape(-1, 16)
    np.testing.assert_array_equal(table[: len(table) - 32], small[: len(small) - 16])
    np.testing.assert_array_equal(grid[:, :4], small[-16:].reshape(4, 4, 16))


def test_position_errors():
    model, _ = families.build("gpt2")
    for length in (3, 2.5, None, (8, 8)):
        with pytest.raises(ValueError, match="max_length"):
            keras_rfattn.extend_positions(model, length)
    with pytest.raises(TypeError, match="KerasHub"):
        keras_rfattn.extend_positions("gpt2", 40)
    clip, _ = families.build("clip")
    with pytest.raises(ValueError, match="encoder"):
        keras_rfattn.extend_positions(clip, 40)


needs_keras_cv = pytest.mark.skipif(
    importlib.util.find_spec("keras_cv") is None, reason="keras-cv is not installed"
)


@needs_keras_cv
def test_keras_cv_transformer_encoder(tmp_path):
    import keras_cv

    inputs = keras.Input((9, 16))
    # Dropout layers are made anew in every call upstream, which TensorFlow refuses.
    encoder = keras_cv.layers.TransformerEncoder(
        16, 2, 24, mlp_dropout=0.0, attention_dropout=0.0
    )
    model = keras.Model(inputs, encoder(inputs))
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype("float32")
    softmax = predict(model, x)
    keras_rfattn.replace_attention(model, "favorpp", num_features=32, seed=0)
    linear = predict(model, x)
    assert np.abs(linear - softmax).max() > 1e-3
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(predict(loaded, x), linear)
    keras_rfattn.restore_attention(model)
    np.testing.assert_array_equal(predict(model, x), softmax)


@needs_keras_cv
def test_keras_cv_vit(tmp_path):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("KerasCV's ViT runs on TensorFlow only (upstream)")
    from keras_cv.src.models.legacy import vit

    def make():
        return vit.ViT(
            include_rescaling=True,
            include_top=True,
            num_classes=3,
            input_shape=(16, 16, 3),
            patch_size=4,
            transformer_layer_num=2,
            num_heads=2,
            mlp_dropout=0.0,
            attention_dropout=0.0,
            activation=keras.activations.gelu,
            project_dim=16,
            mlp_dim=24,
        )

    source, rng = make(), np.random.default_rng(0)
    for weight in source.weights:
        weight.assign(rng.normal(size=weight.shape) * 0.3)
    images = rng.uniform(0, 255, size=(2, 16, 16, 3)).astype("float32")
    softmax = families.outputs(source, images)[0]
    keras_rfattn.replace_attention(source, "favorpp", num_features=32, seed=0)
    linear = families.outputs(source, images)[0]
    source.save_weights(tmp_path / "v.weights.h5")
    fresh = keras_rfattn.replace_attention(make(), "favorpp", num_features=32, seed=1)
    fresh.load_weights(tmp_path / "v.weights.h5")
    np.testing.assert_array_equal(families.outputs(fresh, images)[0], linear)
    keras_rfattn.restore_attention(source)
    np.testing.assert_array_equal(families.outputs(source, images)[0], softmax)


def test_subclasses_refuse_the_vllm_route_too():
    class Mine(keras_hub.layers.CachedMultiHeadAttention):
        pass

    for cls in (keras_hub.layers.CachedMultiHeadAttention, Mine):
        layer = cls(2, 4)
        layer.__class__ = swap.linear_class(cls)
        with pytest.raises(ValueError, match="vLLM route would run softmax"):
            layer._compute_vllm_attention()


EXPORTER = "keras_hub.src.utils.transformers.export.hf_exporter"


@pytest.mark.once
def test_other_libraries_get_no_linear_model_as_softmax(tmp_path):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(20, 2, 2, 8, 16, max_sequence_length=8)
    task = keras_hub.models.GPT2CausalLM(backbone)
    keras_rfattn.replace_attention(task, "favorplus", include="*layer_0*")
    for model in (backbone, task):
        with pytest.raises(ValueError, match="Call `restore_attention` first"):
            model.export_to_transformers(str(tmp_path / "exported"))
    assert not any(tmp_path.iterdir())
    # A later task, and KerasHub's functions, know the backbone by its class alone.
    exporter = importlib.import_module(EXPORTER)
    late = keras_hub.models.GPT2CausalLM(backbone)
    for write in (
        late.export_to_transformers,
        lambda path: exporter.export_to_safetensors(task, path),
        lambda path: exporter.export_backbone(backbone, path),
    ):
        with pytest.raises(ValueError, match=r"not implemented for GPT2Backbone\*"):
            write(str(tmp_path / "exported"))
    assert not any(tmp_path.iterdir())
    keras_rfattn.restore_attention(task)
    name = "export_to_transformers"
    for model in (backbone, task):
        assert getattr(type(model), name).__module__.startswith("keras_hub")
