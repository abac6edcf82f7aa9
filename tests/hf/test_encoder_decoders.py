"""The encoder and the decoder of encoder-decoder models, each connected on its own."""

import copy
from typing import Any

import pytest
import torch
import transformers

import crosslayer
from crosslayer.testing.tiny_model import perturb_weights

T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_position_embeddings": 64, "decoder_start_token_id": 2,
}  # fmt: skip
SIZES = {
    "T5": T5,
    "MT5": T5,
    "UMT5": T5,
    "SwitchTransformers": {**T5, "num_experts": 2},
    "Bart": BART,
    "MBart": BART,
    "Pegasus": BART,
    "Whisper": {
        **BART, "max_source_positions": 5, "max_target_positions": 20, "num_mel_bins": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
POST_NORM = ("Bart",)


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=97, **SIZES[family])
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return perturb_weights(model.double()).eval()


def make_inputs(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "Whisper":
        return {"input_features": torch.randn(2, 8, 10, generator=generator).double()}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {
        "input_ids": torch.randint(3, 97, (2, 9), generator=generator),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("family", SIZES)
def test_a_connected_decoder_attends_to_the_encoder(family):
    plain = make_model(family)
    inputs = make_inputs(family)
    labels = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(2))
    same = "postnorm" if family in POST_NORM else "prenorm"
    specs = {same: 0.0} if family in POST_NORM else {same: 0.0, "mudd": 0.0, "hyper": 1e-4}
    expected = plain(**inputs, labels=labels, output_hidden_states=True)
    for spec, tolerance in specs.items():
        model = copy.deepcopy(plain)
        crosslayer.connect(model.get_encoder(), spec)
        crosslayer.connect(model.get_decoder(), spec)
        actual = model(**inputs, labels=labels, output_hidden_states=True)
        assert (actual.logits - expected.logits).abs().max() <= tolerance, spec
        pairs = zip(actual.decoder_hidden_states, expected.decoder_hidden_states, strict=True)
        for own, host in pairs:
            assert (own - host).abs().max() <= tolerance * host.abs().max(), spec
    actual.loss.backward()
    expected.loss.backward()
    name, host_weight = next(
        (name, parameter)
        for name, parameter in plain.named_parameters()
        if "encoder" in name and parameter.dim() == 2 and parameter.grad is not None
    )
    difference = model.get_parameter(name).grad - host_weight.grad
    assert difference.norm() <= 1e-3 * host_weight.grad.norm(), "the encoder learns as before"


@pytest.mark.parametrize("family", ["T5", "Whisper"])
def test_generation_with_a_cache_of_both_attentions(family):
    model = make_model(family)
    crosslayer.connect(model.get_decoder(), "mudd")
    perturb_weights(model.get_decoder())
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    inputs = make_inputs(family)
    cached, uncached = (model.generate(**inputs, **options, use_cache=c) for c in (True, False))
    assert torch.equal(cached, uncached)
    beams = model.generate(**inputs, **options, num_beams=2)
    assert beams.shape == cached.shape


@pytest.mark.parametrize("decoder", ["gpt2", "trocr", "bert"])
def test_a_decoder_that_is_joined_to_an_encoder(decoder):
    """By `VisionEncoderDecoderModel`; its config has `add_cross_attention`."""
    torch.manual_seed(0)
    sizes = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        "trocr": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4},
        "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    }
    config = transformers.AutoConfig.for_model(
        decoder, vocab_size=97, is_decoder=True, add_cross_attention=True, **sizes[decoder]
    )
    images = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        image_size=8, patch_size=4,
    )  # fmt: skip
    whole = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, config)
    plain = perturb_weights(transformers.VisionEncoderDecoderModel(whole)).eval()
    model = copy.deepcopy(plain)
    post_norm = decoder in ("trocr", "bert")
    crosslayer.connect(model.decoder, "postnorm" if post_norm else "mudd")
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "decoder_input_ids": torch.ones(2, 4).long()}
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    others = inputs | {"pixel_values": torch.zeros(2, 3, 8, 8)}
    assert not torch.allclose(model(**others).logits, plain(**inputs).logits, atol=1e-3)


def test_a_decoder_needs_its_encoder_in_each_call():
    model = make_model("T5")
    decoder = crosslayer.connect(model.get_decoder(), "mudd")
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"layer 0 \(T5Block\) is called without encoder_hidden"):
        decoder(input_ids=ids)


def test_both_parts_of_a_shared_config_are_saved(tmp_path):
    model = make_model("MBart")
    crosslayer.connect(model.get_decoder(), "mudd")
    with pytest.raises(ValueError, match="encoder is not connected, but its config names 'mudd'"):
        model.save_pretrained(tmp_path)
    crosslayer.connect(model.get_encoder(), "mudd")
    perturb_weights(model).save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path, dtype=torch.float64)
    inputs = make_inputs("MBart")
    labels = torch.full((2, 3), 5)
    assert torch.equal(
        loaded(**inputs, labels=labels).logits, model(**inputs, labels=labels).logits
    )


@pytest.mark.parametrize("family", ["T5", "Bart"])
def test_the_whole_model_is_refused(family):
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(vocab_size=97, **SIZES[family])
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ValueError, match="has two lists of layers; connect those you choose"):
        crosslayer.connect(model, "mudd")
