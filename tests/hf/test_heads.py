"""Encoders, heads and post-norm hosts: what a connected model of each kind computes and keeps."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import crosslayer
from crosslayer.hf.attach import find_backbone
from crosslayer.hf.families import own_connection
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.backbones import SIZES, equal_lists, ids

SMALL = {key: size for key, size in SIZES.items() if not key.endswith("token_id")}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 0}
DISTIL = {"vocab_size": 97, "dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2}
OPT = {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "gpt2": ("gpt2", GPT2),
    "modernbert": ("modernbert", {**SMALL, "global_attn_every_n_layers": 2}),
    # pre-norm, with the norms within its attention and its intermediate
    "megatron-bert": ("megatron-bert", SMALL),
    # post-norm, with all norms within other modules
    "bert": ("bert", SMALL),
    # post-norm, with sub-layers that are modules of the layer
    "distilbert": ("distilbert", DISTIL),
    # post-norm, and its layers return attention weights when they are asked for
    "deberta": ("deberta-v2", {**SMALL, **DEBERTA}),
    # post-norm, with an embedding that has no norm and a list of outputs
    "openai-gpt": ("openai-gpt", GPT2),
    # post-norm, and a projection after the last layer
    "opt-350m": ("opt", OPT),
}
HEADS = [
    ("llama", "SequenceClassification"),
    ("modernbert", "MaskedLM"),
    ("bert", "MultipleChoice"),
]
SLOW_HEADS = [
    ("gpt2", "QuestionAnswering"),
    ("distilbert", "TokenClassification"),
    ("megatron-bert", "MaskedLM"),
    ("modernbert", "MultipleChoice"),
    ("bert", "QuestionAnswering"),
    ("deberta", "SequenceClassification"),
    ("openai-gpt", "SequenceClassification"),
    ("opt-350m", "CausalLM"),
]
CHECKED_HEADS = [*HEADS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW_HEADS)]


def build_head(host: str, head: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A small random model with a head, and inputs that are padded left and right."""
    family, settings = HOSTS[host]
    labels = 2 if head == "QuestionAnswering" else 3
    config = transformers.AutoConfig.for_model(
        family, **{**settings, "pad_token_id": 0, "num_labels": labels, **options}
    )
    torch.manual_seed(0)
    auto_class = getattr(transformers, f"AutoModelFor{head}")
    model = perturb_weights(
        auto_class.from_config(config, attn_implementation="eager").eval(), 0.05
    )
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    mask[1, :3] = 0
    inputs = {"input_ids": ids(), "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = (torch.arange(9) > 4).long().expand(2, 9)
    if head == "MultipleChoice":
        inputs = {name: value[:, None].expand(2, 3, 9).clone() for name, value in inputs.items()}
    return model, inputs


def connect_as_it_is(plain: Any) -> Any:
    """The model connected with the residual connection that it has."""
    model = copy.deepcopy(plain)
    return crosslayer.connect(model, own_connection(find_backbone(model)[1].of_layers[0]))


def gradients_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all parameters, in training, with the same dropout."""
    torch.manual_seed(1)
    model.train()
    model.zero_grad()
    model(**inputs)[0].square().mean().backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("host", "head"), CHECKED_HEADS)
def test_a_head_computes_what_it_did(host, head):
    """Logits, hidden states, attention weights, gradients with dropout, and logits in bfloat16."""
    plain, inputs = build_head(host, head)
    model = connect_as_it_is(plain)
    options = {"output_hidden_states": True, "output_attentions": True}
    expected = plain(**inputs, **options)
    outputs = model(**inputs, **options)
    assert torch.equal(outputs[0], expected[0])
    for name in ("hidden_states", "attentions"):
        assert len(outputs[name]) == len(expected[name])
        assert all(map(torch.equal, outputs[name], expected[name])), name
    plain_gradients = gradients_of(plain, inputs)
    own_gradients = gradients_of(model, inputs)
    assert own_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert torch.equal(own_gradients[name], gradient), name
    half = copy.deepcopy(model).bfloat16()(**inputs)[0]
    assert torch.equal(half, copy.deepcopy(plain).bfloat16()(**inputs)[0])
    crosslayer.disconnect(model)
    assert torch.equal(model(**inputs)[0], plain(**inputs)[0])


@pytest.mark.parametrize(("host", "head"), CHECKED_HEADS)
@pytest.mark.filterwarnings("ignore:connecting mudd changes the outputs")
def test_a_head_trains_and_is_saved(host, head, tmp_path):
    plain, inputs = build_head(host, head)
    model = perturb_weights(crosslayer.connect(copy.deepcopy(plain), "mudd"), 0.05)
    for name, gradient in gradients_of(model, inputs).items():
        assert gradient.any() or ".connection" not in name, name
    model.save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert type(loaded).__qualname__ == type(plain).__qualname__
    loaded.set_attn_implementation("eager")
    torch.testing.assert_close(loaded(**inputs)[0], model(**inputs)[0], rtol=0, atol=1e-6)
    # A checkpoint of the host fills the norms of k and v, too: in a post-norm host these are copies
    # of a norm in the layer before.
    missing = model.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert not [key for key in missing if ".norms." in key]


@pytest.mark.parametrize("spec", ["mudd", pytest.param("resi_dual", marks=pytest.mark.slow)])
def test_another_connection_than_its_own_changes_a_post_norm_model(spec):
    plain, inputs = build_head("bert", "MaskedLM")
    with pytest.warns(UserWarning, match="its layers are post-norm: postnorm alone computes the"):
        model = crosslayer.connect(copy.deepcopy(plain), spec)
    assert not torch.allclose(model(**inputs)[0], plain(**inputs)[0], atol=1e-2)
    with pytest.raises(ValueError, match="does not compute the plain residual"):
        crosslayer.disconnect(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crosslayer.connect(plain, "postnorm(stream_dtype='float32')")
    assert torch.equal(
        crosslayer.connect(build_head("bert", "MaskedLM")[0], "postnorm")(**inputs)[0],
        plain(**inputs)[0],
    )


@pytest.mark.parametrize("host", ["deberta", "llama"])
def test_hidden_states_that_the_config_asks_for(host):
    """DeBERTa's head passes on `output_hidden_states=None`. Llama takes that as False."""
    plain, inputs = build_head(host, "SequenceClassification")
    plain.config.output_hidden_states = True
    model = connect_as_it_is(plain)
    expected = plain(**inputs).hidden_states
    assert equal_lists(model(**inputs).hidden_states, expected)
    backbones = plain.base_model, model.base_model
    without, connected_without = (b(ids(), output_hidden_states=None) for b in backbones)
    assert (without.hidden_states is None) == (connected_without.hidden_states is None)


def test_hidden_states_that_are_asked_for_by_position():
    plain, _ = build_head("deberta", "SequenceClassification")
    model = connect_as_it_is(plain)
    arguments = (ids(), *[None] * 5, True)
    names = list(inspect.signature(plain.base_model.forward).parameters)
    assert names.index("output_hidden_states") == len(arguments) - 1
    expected = plain.base_model(*arguments).hidden_states
    assert equal_lists(model.base_model(*arguments).hidden_states, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:connecting mudd changes the outputs")
def test_a_post_norm_decoder_generates():
    plain, _ = build_head("bert", "CausalLM", is_decoder=True)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = plain.generate(ids(), **options)
    assert torch.equal(connect_as_it_is(plain).generate(ids(), **options), expected)
    model = perturb_weights(crosslayer.connect(plain, "mudd"), 0.05)
    without_cache = model.generate(ids(), use_cache=False, **options)
    assert torch.equal(model.generate(ids(), **options), without_cache)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:connecting mudd changes the outputs")
def test_trainer_trains_a_head(tmp_path):
    plain, _ = build_head("bert", "SequenceClassification")
    model = crosslayer.connect(plain, "mudd")
    rows = [{"input_ids": row, "labels": torch.tensor(i % 3)} for i, row in enumerate(ids(8))]
    before = model.bert.encoder.layer[1].connections[0].a.detach().clone()
    settings = transformers.TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    transformers.Trainer(model, settings, train_dataset=rows).train()
    assert not torch.equal(model.bert.encoder.layer[1].connections[0].a.cpu(), before)


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        ("hyper(output_scale='1/n')", {}, "cannot scale what 'attention.self' adds"),
        ("mudd", {"reallocate": True}, "cannot widen this model's MLPs"),
    ],
)
def test_what_needs_known_projections_is_refused_on_bert(spec, options, reason):
    """Its sub-layers end within other modules than they begin."""
    model, _ = build_head("bert", "MultipleChoice")
    with pytest.raises(ValueError, match=reason):
        crosslayer.connect(model, spec, **options)
    assert "crosslayer" not in vars(model.config)
