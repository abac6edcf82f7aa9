"""What people do with a transformers model goes on working after `crosslayer.connect`."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from bodies import HOSTS, NORM_EPS, ids, llama
from tiny import ARMS, shake
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel

import crosslayer
from crosslayer import Connection

hosts = pytest.mark.parametrize("host", HOSTS)
methods = pytest.mark.parametrize("arm", crosslayer.available())
EXACT = {"prenorm", "gains", "denseformer", "frac", "mudd"}  # from the first bit; the others up to the eps of a norm


@pytest.fixture(autouse=True)
def no_bars():
    from transformers.utils import logging

    logging.disable_progress_bar()


def connected(host: str, arm: str, shaken: bool = True, **options) -> torch.nn.Module:
    model = crosslayer.connect(HOSTS[host](**options), arm)
    return shake(model, 0.05) if shaken else model


@hosts
@pytest.mark.parametrize("arm", ARMS)
def test_starts_where_the_host_is(host, arm):
    factory = crosslayer.make(arm)
    if factory.name in EXACT:
        plain = shake(HOSTS[host](), 0.05)
        assert torch.equal(crosslayer.connect(copy.deepcopy(plain), arm)(ids()).logits, plain(ids()).logits)
    elif factory.method.starts_as_prenorm:
        # a mean over sources and a sum over streams are scaled copies of the residual stream: equal as eps → 0
        plain = shake(HOSTS[host](**{NORM_EPS[host]: 1e-20}), 0.05)
        logits = crosslayer.connect(copy.deepcopy(plain), arm)(ids()).logits
        torch.testing.assert_close(logits, plain(ids()).logits, rtol=0, atol=1e-4)
    else:
        # deep enough for mgr to gate: with fewer sub-layers than streams it is their mean, as attnres is
        plain = shake(HOSTS[host](num_hidden_layers=6), 0.05)
        logits = crosslayer.connect(copy.deepcopy(plain), arm)(ids()).logits
        assert not torch.allclose(logits, plain(ids()).logits, atol=1e-2), "starts as PreNorm but does not say so"


@hosts
@methods
def test_generates_the_same_with_and_without_a_cache(host, arm):
    model, asked = shake(connected(host, arm), 0.2), {"max_new_tokens": 8, "do_sample": False}
    cached, uncached = (
        model.generate(ids(), use_cache=cache, return_dict_in_generate=True, output_logits=True, **asked)
        for cache in (True, False)
    )
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), rtol=1e-4, atol=1e-4)


@hosts
@methods
def test_left_padding_changes_nothing(host, arm):
    model, prompt = connected(host, arm), ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], 1)
    mask = (padded > 0).long()
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    out = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(out[:, 3:], plain)


@hosts
@methods
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_gradient_checkpointing_switch(host, arm, reentrant):
    model = connected(host, arm).train()
    expected = gradients(model)
    # the name it has in newer versions of transformers, and in older ones
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    again = gradients(model)
    assert again.keys() == expected.keys() == dict(model.named_parameters()).keys(), "every parameter has a gradient"
    assert all(torch.equal(again[n], g) for n, g in expected.items())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids(), labels=ids()).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@hosts
@methods
def test_save_and_load(host, arm, tmp_path):
    model = connected(host, arm)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["crosslayer"] == arm
    for cls in (AutoModelForCausalLM, type(HOSTS[host]())):
        loaded, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert torch.equal(loaded(ids()).logits, model(ids()).logits)


def test_options_survive_saving(tmp_path):
    arm = "mudd(ways='k v r', dilation=2)"
    connected("llama", arm).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.crosslayer == arm


@pytest.mark.parametrize("first", ["crosslayer", "transformers"])
def test_loads_in_a_fresh_process(first, tmp_path):
    model = connected("llama", "mudd")
    model.save_pretrained(tmp_path)
    second = {"crosslayer": "transformers", "transformers": "crosslayer"}[first]
    code = f"""import {first}, {second}, torch
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(sum(isinstance(m, crosslayer.Connection) for m in model.modules()))"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "7"


def test_a_bf16_checkpoint_keeps_the_connections_in_float32(tmp_path):
    connected("llama", "mudd").save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    for module in loaded.modules():
        if isinstance(module, Connection):
            assert all(p.dtype == torch.float32 for p in module.parameters(recurse=False))
            assert all(p.dtype == torch.bfloat16 for p in module.norms.parameters())
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)


# a compile takes seconds: the sequential GPT-NeoX, wired as Llama is, is compiled among the slow tests
@pytest.mark.parametrize("host", ["llama", "neox-parallel", pytest.param("neox-sequential", marks=pytest.mark.slow)])
@methods
def test_one_graph(host, arm):
    model = connected(host, arm)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids()).logits, model(ids()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("arm", ["mudd", "hyper"])
@hosts
def test_inductor(host, arm):
    model = connected(host, arm)
    expected = gradients(model)
    model.forward = torch.compile(model.forward, fullgraph=True)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-5)


@hosts
@methods
def test_keys_classes_and_paths_stay(host, arm):
    plain, model = HOSTS[host](), connected(host, arm, shaken=False)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert plain.state_dict().keys() <= model.state_dict().keys()
    assert all(".connections." in key or ".connection." in key for key in added)
    for (name, a), (_, b) in zip(plain.named_modules(), plain.named_modules(), strict=True):
        assert isinstance(model.get_submodule(name), type(a)), name
        assert type(b).__qualname__ == type(model.get_submodule(name)).__qualname__


@hosts
@methods
def test_a_host_checkpoint_loads(host, arm):
    plain, model = shake(HOSTS[host](), 0.05), connected(host, arm)
    for connection in model.modules():
        if isinstance(connection, Connection):
            connection.reset_parameters()
    result = model.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) == model.state_dict().keys() - plain.state_dict().keys()
    if arm in EXACT:  # k's and v's own norms follow the host's
        assert torch.equal(model(ids()).logits, plain(ids()).logits)


@hosts
@methods
def test_from_pretrained_initialises_what_a_host_checkpoint_lacks(host, arm, tmp_path):
    plain = shake(HOSTS[host](), 0.05)
    plain.save_pretrained(tmp_path)
    config = copy.deepcopy(plain.config)
    config.crosslayer = arm
    loaded, info = type(plain).from_pretrained(tmp_path, config=config, output_loading_info=True)
    expected = crosslayer.connect(plain, arm)
    assert info["missing_keys"] == {k for k in expected.state_dict() if ".connection" in k}
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in expected.state_dict().items() if not k.endswith("W1"))
    if arm in EXACT:
        assert torch.equal(loaded(ids()).logits, plain(ids()).logits)


@hosts
@methods
def test_copies_and_pickles(host, arm):
    model = connected(host, arm)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids()).logits, model(ids()).logits)
        shake(twin)
        assert not torch.equal(twin(ids()).logits, model(ids()).logits), "a copy shares nothing"


@hosts
@methods
def test_connects_on_the_meta_device(host, arm):
    with torch.device("meta"):
        model = connected(host, arm, shaken=False)
    assert all(p.is_meta for p in model.parameters())


def test_a_body_without_a_head(tmp_path):
    body = crosslayer.connect(llama().model, "mudd")
    body.save_pretrained(tmp_path)
    assert torch.equal(LlamaModel.from_pretrained(tmp_path)(ids()).last_hidden_state, body(ids()).last_hidden_state)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("mud", r"unknown connection 'mud' \(did you mean 'mudd'\?\)"),
        (
            "mudd(dilatation=2)",
            r"unknown option 'dilatation' of 'mudd' \(did you mean 'dilation'\?\); its options: ways=",
        ),
        ("mudd(dilation=0)", "dilation must be a whole number of at least 1, got 0"),
        ("mgr(streams=6)", r"Eq. 14 has no bias for 6 streams and 1 gated sub-layers"),
    ],
)
def test_a_bad_arm_leaves_the_model_alone(arm, message):
    model = llama()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys, types = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(model, arm)
    assert keys == list(model.state_dict()) and types == [type(m) for m in model.modules()]
    assert before == {name: dict(vars(module)) for name, module in model.named_modules()}
    assert not hasattr(model.config, "crosslayer")


def test_bad_models():
    from transformers import BertConfig, BertModel

    with pytest.raises(ValueError, match="does not know the family 'bert'; it knows llama, gpt_neox; in any other"):
        crosslayer.connect(BertModel(BertConfig(num_hidden_layers=1, vocab_size=9, intermediate_size=9)), "mudd")
    with pytest.raises(ValueError, match="takes a transformers model, got Linear; in a model of your own"):
        crosslayer.connect(torch.nn.Linear(2, 2), "mudd")
    model = crosslayer.connect(llama(), "mudd(dilation=2)")
    with pytest.raises(ValueError, match=r"connected already, with 'mudd\(dilation=2\)'"):
        crosslayer.connect(model, "hyper")
    with pytest.raises(ValueError, match="output_hidden_states is not supported"):
        model(ids(), output_hidden_states=True)


def test_the_config_alone_builds_a_connected_model():
    config = crosslayer.connect(llama(), "hyper(streams=2)").config
    assert any(isinstance(m, Connection) for m in LlamaForCausalLM(config).modules())
