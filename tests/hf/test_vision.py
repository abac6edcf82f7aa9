"""Vision towers, and models that have a tower and a language model."""

import copy
import warnings

import pytest
import torch
import transformers

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.hf.attach import find_backbone
from crosslayer.recompute import enable_recompute
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.all_families import PAGE, check_family
from tests.hf.small_models import (
    MODEL_KINDS,
    MULTI_MODAL,
    VISION,
    SmallModel,
    build_small,
    read_output,
)
from tests.hf.test_recognition import mark_slow

# What each has that the others have not.
TOWERS = (
    # a learned scale of outputs that is a module; the encoder is a model of transformers
    "dinov2",
    # a scale that is a parameter of the layer; a final norm
    "beit",
    # a norm of one token alone; the encoder is no model of transformers
    "clip_vision_model",
)


@pytest.mark.parametrize("family", [mark_slow(family, ("beit",)) for family in TOWERS])
def test_towers(family, tmp_path):
    plain, inputs, expected, _ = build_small(VISION, family)
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(read_output(model, inputs), expected)
    if family == "dinov2" and transformers.__version__.startswith("5.17."):
        with pytest.raises(ValueError, match="to its layers, so they cannot report hidden"):
            model(**inputs, output_hidden_states=True)
    else:
        states = model(**inputs, output_hidden_states=True).hidden_states
        plain_states = plain(**inputs, output_hidden_states=True).hidden_states
        assert len(states) == len(plain_states)
        assert all(map(torch.equal, states, plain_states))
    disconnected = crosslayer.disconnect(copy.deepcopy(model))
    assert torch.equal(read_output(disconnected, inputs), expected)

    perturb_weights(model, 0.05).train()
    outputs = model(**inputs)
    outputs[0].square().mean().backward()
    for name, parameter in model.named_parameters():
        if ".connection" in name:
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
    model.eval().save_pretrained(tmp_path)
    for load in (crosslayer.from_pretrained, type(model).from_pretrained):
        assert torch.equal(read_output(load(tmp_path), inputs), read_output(model, inputs))


def test_a_method_that_norms_its_streams_needs_a_norm_after_the_layers():
    model = build_small(VISION, "clip_vision_model").model
    with pytest.raises(ValueError, match="CLIPVisionModel has no norm after its layers"):
        crosslayer.connect(model, "resi_dual")


def multi_modal(family: str) -> SmallModel:
    small = build_small(MULTI_MODAL, family)
    assert small.note == "with images"
    return small


def test_a_multi_modal_model_connects_its_language_model(tmp_path):
    """The tower has as many layers and comes first."""
    plain, inputs, expected, _ = multi_modal("qwen2_vl")
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert find_backbone(model)[0] is model.model.language_model
    assert torch.equal(read_output(model, inputs), expected)
    padding = torch.ones_like(inputs["input_ids"])
    padding[0, :4] = 0
    padded = {**inputs, "attention_mask": padding}
    assert torch.equal(read_output(model, padded), read_output(plain, padded))
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "use_cache": True}
    assert torch.equal(
        model.generate(**{**padded, **options}), plain.generate(**{**padded, **options})
    )
    perturb_weights(model, 0.05).save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(read_output(loaded, inputs), read_output(model, inputs))


def test_a_tower_is_connected_by_itself(tmp_path):
    """LLaVA reads a hidden state of its tower."""
    plain, inputs, expected, _ = multi_modal("llava")
    model = copy.deepcopy(plain)
    tower = model.model.vision_tower
    crosslayer.connect(tower, "mudd")
    assert find_connections(model) == find_connections(tower)
    assert torch.equal(read_output(model, inputs), expected)
    perturb_weights(model, 0.05).save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(read_output(loaded, inputs), read_output(model, inputs))
    crosslayer.connect(model.model.language_model, "denseformer")
    assert len(find_connections(model)) == 2 * len(find_connections(tower))
    with pytest.raises(ValueError, match=r"2 parts .*: model.vision_tower.*, model.language_model"):
        crosslayer.disconnect(model)
    crosslayer.disconnect(model.model.language_model)
    assert find_connections(model) == find_connections(tower)


@pytest.mark.slow
def test_what_is_added_between_layers_joins_the_write_before():
    plain, inputs, expected, _ = build_small(MULTI_MODAL, "qwen3_vl")
    text = {key: inputs[key] for key in ("input_ids", "use_cache")}
    assert not torch.allclose(read_output(plain, text), expected, atol=1e-2)
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    torch.testing.assert_close(read_output(model, inputs), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"reads or changes the stream after blocks\.0"):
        crosslayer.connect(plain.model.visual, "mudd")
    saved = copy.deepcopy(model)
    enable_recompute(find_connections(saved), "streams")
    gradients = []
    for with_features in (model, saved):
        with_features.train()(**inputs).logits.square().sum().backward()
        gradients.append([p.grad for p in with_features.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.slow
def test_hidden_states_are_recorded_before_features_join_them():
    """As Qwen3-VL records what its layers return."""
    plain, inputs, _, _ = build_small(MULTI_MODAL, "qwen3_vl")
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    for training in (False, True):
        expected = plain(**inputs, output_hidden_states=True).hidden_states
        states = model.train(training)(**inputs, output_hidden_states=True).hidden_states
        assert len(states) == len(expected)
        for state, plain_state in zip(states, expected, strict=True):
            torch.testing.assert_close(state, plain_state, rtol=0, atol=1e-5)
        enable_recompute(find_connections(model), "streams")


@pytest.mark.slow
def test_image_features_that_join_the_stream_between_layers_are_refused():
    plain, inputs, expected, _ = build_small(MULTI_MODAL, "granite4_vision")
    with pytest.raises(ValueError, match=r"reads or changes the stream after layers\.0"):
        crosslayer.connect(plain, "mudd")
    text_alone = crosslayer.connect(plain, "mudd", verify=False)
    assert torch.equal(read_output(text_alone, inputs), expected)


@pytest.mark.slow
def test_the_page_of_families():
    """It has a row for every family, and those of some families are as the command prints them."""
    page = PAGE.read_text()
    for kind in MODEL_KINDS:
        for number, family in enumerate(kind.classes):
            row = f"\n| {family} | {kind.name} | "
            assert row in page
            if number % 16 == 0:
                status = page.split(row)[1].split(" | ")[0]
                assert check_family(kind, family).status == status, family


@pytest.mark.parametrize("spec", ["hyper", "altup", "hyper(streams=1)"])
def test_a_readout_that_no_norm_scales_back_is_announced(spec):
    """CLIP's tower returns a hidden state that no norm has passed."""
    plain, inputs, expected, _ = build_small(VISION, "clip_vision_model")
    plain.config._name_or_path = "a checkpoint"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = crosslayer.connect(copy.deepcopy(plain), spec)
    changed = not torch.allclose(read_output(model, inputs), expected, atol=1e-2)
    announced = any("no norm beside the layers removes that" in str(w.message) for w in caught)
    assert changed == announced == (spec != "hyper(streams=1)")
