"""Training with other libraries: checkpointing, Trainer, accelerate, PEFT and FSDP2 on a connected
model.
"""

import copy
import json

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

import crosslayer
from crosslayer import Connection
from crosslayer.connection import find_connections
from crosslayer.hf.adapters import _register_with_peft, register_with_imported_peft
from crosslayer.recompute import enable_recompute
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf import sharded
from tests.hf.backbones import (
    FAMILIES,
    WIRINGS,
    build,
    checkpoint,
    connected,
    each_family,
    each_kind,
    equal_lists,
    gradients,
    ids,
    inputs,
    loss,
    output,
    parametrize_cells,
    trained,
)

# What trainers and adapters call in newer versions of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
# Families with parameters that no gradient reaches: unused experts and heads.
PARTLY_TRAINED = ("vit", "dit", "mixtral", "olmoe")
# diffusers passes the layers' own tuples, which reentrant checkpointing does not look into.
REENTRANT = [(family, "mudd", True) for family in WIRINGS if family != "dit"]


@parametrize_cells([*((*pair, False) for pair in each_kind()), *REENTRANT], "reentrant")
def test_gradient_checkpointing(family, spec, reentrant):
    model = connected(family, spec)
    model.train()
    if family != "dit":
        model.config.use_cache = False  # A host with a cache takes another path.
    torch.manual_seed(0)
    expected = gradients(model, family)
    checkpoint(model, family, reentrant)
    torch.manual_seed(0)
    recomputed = gradients(model, family)
    assert recomputed.keys() == expected.keys()
    if family not in PARTLY_TRAINED:
        assert expected.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, gradient in expected.items():
        assert torch.equal(recomputed[name], gradient), name


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        tokens = torch.randint(1, 97, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model: nn.Module, folder, steps: int) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        save_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        seed=1,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=5,
        dataloader_pin_memory=False,
    )
    return Trainer(model, arguments, train_dataset=Lines())


def test_trainer_resumes_bitwise(tmp_path):
    uninterrupted = trainer(connected("llama", "mudd"), tmp_path / "uninterrupted", 20)
    uninterrupted.train()
    stopped = trainer(connected("llama", "mudd"), tmp_path / "stopped", 10)
    stopped.train()
    resumed = trainer(connected("llama", "mudd"), tmp_path / "resumed", 20)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-10"))
    expected = dict(uninterrupted.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    saved = crosslayer.from_pretrained(tmp_path / "uninterrupted" / "checkpoint-20")
    assert torch.equal(saved(ids()).logits, uninterrupted.model.eval()(ids()).logits)


@pytest.mark.slow
def test_trainer_resumes_experts_bitwise_from_a_loaded_model(tmp_path):
    """`Trainer` itself does not load them from the layout in which transformers saves them."""
    uninterrupted = trainer(connected("mixtral", "mudd"), tmp_path / "uninterrupted", 20)
    uninterrupted.train()
    trainer(connected("mixtral", "mudd"), tmp_path / "stopped", 10).train()
    checkpoint = str(tmp_path / "stopped" / "checkpoint-10")
    resumed = trainer(crosslayer.from_pretrained(checkpoint), tmp_path / "resumed", 20)
    resumed.train(resume_from_checkpoint=checkpoint)
    expected = dict(uninterrupted.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_accelerate(tmp_path):
    """Its training loop, its saved state, and weights that are loaded only while they are used."""
    from accelerate import Accelerator, cpu_offload

    accelerator = Accelerator(cpu=True)
    model = connected("llama", "hyper")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step() -> None:
        accelerator.backward(model(ids(), labels=ids()).loss)
        optimizer.step()
        optimizer.zero_grad()

    step()
    accelerator.save_state(tmp_path)
    step()
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    accelerator.load_state(tmp_path)
    step()
    assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
    model.eval()
    before = model(ids(), output_hidden_states=True)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(p.is_meta for p in model.parameters())
    offloaded = model(ids(), output_hidden_states=True)
    assert torch.equal(offloaded.logits, before.logits)
    assert equal_lists(offloaded.hidden_states, before.hidden_states)
    accelerator.free_memory()


LORA_TARGETS = {
    "gpt2": ["c_attn", "c_fc"],
    "phi3": ["qkv_proj", "o_proj"],
    "neox-parallel": ["query_key_value"],
    "neox-sequential": ["query_key_value"],
    "dit": ["to_q", "to_v"],
}


def lora_targets(family: str) -> list[str]:
    return LORA_TARGETS.get(family, ["q_proj", "k_proj", "v_proj"])


@parametrize_cells([p for p in each_family() if p[1] != "prenorm"])
def test_peft(family, spec, tmp_path):
    """LoRA on q, k and v after `connect`: trained, saved, loaded, merged."""
    import peft

    model = connected(family, spec)
    before = output(model, family)
    config = peft.LoraConfig(
        r=2,
        target_modules=lora_targets(family),
        init_lora_weights=True,
        fan_in_fan_out=family == "gpt2",
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    torch.testing.assert_close(output(adapted, family), before)
    lora_names = {n for n, _ in adapted.named_parameters() if "lora_" in n}
    assert lora_names
    shake_parameters(adapted, "lora_")
    expected = output(adapted, family)
    assert not torch.allclose(expected, before, atol=1e-4)
    assert gradients(adapted, family).keys() == lora_names
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    assert torch.equal(output(loaded.eval(), family), expected)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(output(merged, family), expected, rtol=1e-4, atol=1e-4)
    assert [type(m) for m in merged.modules()] == [type(m) for m in model.modules()]


def shake_parameters(model: nn.Module, part: str) -> None:
    """Move the parameters whose names contain `part`."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if part in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_peft_before_connect_is_the_same(family):
    """An adapted host, connected: its projections are adapters already."""
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=lora_targets(family), fan_in_fan_out=family == "gpt2"
    )
    first = peft.get_peft_model(connected(family, "mudd"), config)
    second = peft.get_peft_model(build(family), config)
    crosslayer.connect(second.base_model.model, "mudd")
    perturb_weights(second.base_model.model)
    first.load_state_dict(second.state_dict())
    assert torch.equal(output(first, family), output(second, family))


def test_peft_trains_the_connections_too(tmp_path):
    import peft

    model = connected("llama", "mudd")
    names = [f"connections.{i}" for i in range(2)] + ["norm.connection"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    shake_parameters(adapted, "modules_to_save")
    expected = output(adapted, "llama")
    layer = adapted.base_model.model.model.layers[1]  # PEFT copies the connections, not the norms
    assert layer.connections[1].norms[0].host_norm_module() is layer.post_attention_layernorm
    assert any(name.endswith("W1") for name in gradients(adapted, "llama"))
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path)
    assert torch.equal(output(loaded.eval(), "llama"), expected)
    with pytest.raises(ValueError, match=r"an adapter of PEFT trains a copy .* \(unload\) first"):
        crosslayer.disconnect(loaded)


def test_an_adapter_loads_with_the_saved_model_that_it_changes(tmp_path):
    import peft

    connected("llama", "mudd").save_pretrained(tmp_path / "model")
    model = crosslayer.from_pretrained(tmp_path / "model")
    names = [f"connections.{i}" for i in range(2)]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    adapted = peft.get_peft_model(model, config)
    shake_parameters(adapted, "modules_to_save")
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(output(loaded.eval(), "llama"), output(adapted, "llama"))
    with pytest.raises(ValueError, match=r"an adapter of PEFT .* load it with peft\.PeftModel"):
        crosslayer.from_pretrained(tmp_path / "adapter")


def test_recomputed_copies_of_an_adapter_exclude_checkpointed_layers():
    import peft

    model = connected("llama", "mudd")
    enable_recompute(find_connections(model), "streams")
    names = [f"connections.{i}" for i in range(2)]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    adapted = peft.get_peft_model(model, config).train()
    adapted.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="cannot be combined with the recomputation of states"):
        adapted(**inputs("llama"))


@pytest.mark.parametrize("spec", [None, "hyper", "mudd(ways='qkvr')"])
def test_trained_connections_of_an_adapter_need_their_host(spec, tmp_path):
    import peft

    names = [f"connections.{i}" for i in range(2)] + ["norm.connection"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    peft.get_peft_model(connected("llama", "mudd"), config).save_pretrained(tmp_path)
    host = build("llama") if spec is None else connected("llama", spec)
    with pytest.raises(ValueError, match="connections that this model does not have"):
        peft.PeftModel.from_pretrained(host, tmp_path)


def test_adapters_are_not_saved_without_the_trained_connections(tmp_path):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(build("llama"), config)
    crosslayer.connect(adapted.base_model.model, "mudd")
    perturb_weights(adapted, 0.05)
    with pytest.raises(ValueError, match=r"would lack the trained connections, like .*merge_and"):
        adapted.save_pretrained(tmp_path)
    expected = output(adapted, "llama")
    adapted.merge_and_unload().save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    torch.testing.assert_close(output(loaded, "llama"), expected, rtol=1e-4, atol=1e-5)


def test_adapters_of_transformers_are_not_saved_without_the_trained_connections(tmp_path):
    import peft

    model = build("llama")
    try:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    except ValueError as error:
        if "PEFT" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    crosslayer.connect(model, "mudd")
    with pytest.raises(ValueError, match="would lack the trained connections"):
        model.save_pretrained(tmp_path)


def test_peft_may_be_imported_after_connect(tmp_path, monkeypatch):
    import peft

    model = connected("llama", "mudd")
    register_with_imported_peft()
    plain_method = peft.PeftModel.save_pretrained.__wrapped__
    monkeypatch.setattr(peft.PeftModel, "save_pretrained", plain_method)
    _register_with_peft.cache_clear()  # as if it were imported here
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.base_model.model.model.norm.connection.requires_grad_(True)
    with pytest.raises(ValueError, match="would lack the trained connections"):
        adapted.save_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # PEFT's, of every RMSNorm
def test_a_copied_final_norm_is_saved_with_its_connection(tmp_path):
    import peft

    model = connected("llama", "mudd")
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LNTuningConfig(task_type="CAUSAL_LM"))
    shake_parameters(adapted, "ln_tuning_layers")
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path)
    assert torch.equal(output(loaded.eval(), "llama"), output(adapted.eval(), "llama"))


def test_trainer_with_the_groups_of_param_groups(tmp_path):
    """The recipe of docs/huggingface.md, and a Trainer on a bare backbone, which reads columns."""
    model = connected("llama", "mudd")
    groups = crosslayer.param_groups(model, lr=1e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trained_by = Trainer(model.model, arguments, optimizers=(optimizer, None))
    trained_by.create_optimizer()
    decayed = [g["params"] for g in trained_by.optimizer.param_groups if g["weight_decay"]]
    ids_decayed = {id(parameter) for parameters in decayed for parameter in parameters}
    readout = model.model.norm.connection
    assert id(readout.W1) in ids_decayed
    assert id(readout.a) not in ids_decayed
    trained_by._set_signature_columns_if_needed()
    assert "input_ids" in trained_by._signature_columns


@pytest.mark.parametrize("family", WIRINGS)
def test_a_connected_model_trains(family):
    model = crosslayer.connect(trained(family), "mudd").train()
    optimizer = torch.optim.AdamW(crosslayer.param_groups(model, lr=1e-3, weight_decay=0.1))
    losses = []
    for _ in range(6):
        torch.manual_seed(0)
        losses.append(loss(model, family))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    for module in model.modules():
        if isinstance(module, Connection) and getattr(module, "W2", None) is not None:
            assert module.W2.any()


@pytest.mark.slow
def test_fsdp2_with_mixed_precision(tmp_path):
    """Connections in bf16 with their layers, or sharded on their own and left in float32."""
    torch.multiprocessing.spawn(sharded.train, (str(tmp_path),), nprocs=2)
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert {case: error for case, error in errors.items() if not error < 0.05} == {}
    assert len(errors) == 4 * len(sharded.SPECS) - 2  # pre-norm has no parameters


@pytest.mark.slow
def test_fully_sharded_data_parallel(tmp_path):
    """The first FSDP, with gradient checkpointing, in float32 and in mixed precision."""
    torch.multiprocessing.spawn(sharded.train_wrapped, (str(tmp_path),), nprocs=2)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses.keys() == set(sharded.SPECS)
    for (exact, expected), (rounded, _) in losses.values():
        assert exact == pytest.approx(expected, rel=1e-5)
        assert rounded == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
def test_sharded_by_transformers_and_by_hand(tmp_path):
    """bfloat16 under FSDP2, experts on two ranks, and a fused projection of q, k and v under tensor
    parallelism.
    """
    expected = {}
    for family, sizes in (("phi3", {}), ("llama", {}), ("mixtral", {"num_local_experts": 4})):
        model = connected(family, "mudd", **sizes)
        model.save_pretrained(tmp_path / family)
        out = model(ids(), output_hidden_states=True)
        expected[family] = [out.logits.detach(), out.hidden_states[2].detach()]
    torch.save(expected, tmp_path / "expected.pt")
    torch.multiprocessing.spawn(sharded.load, (str(tmp_path),), nprocs=2)
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert errors["tp"] < 1e-5
    assert errors["ep"] < 1e-5
    assert errors["fsdp"] < 0.05
    assert errors["hand"] < 0.05


def test_a_replaced_norm_is_used():
    model = crosslayer.connect(trained("llama"), "prenorm")
    for layer in model.model.layers:
        layer.input_layernorm = copy.deepcopy(layer.input_layernorm)
        layer.input_layernorm.weight.data += 1
    norm = type(build("llama").model.norm)(32)  # a new module, as SGLang puts there
    norm.weight.data.copy_(model.model.norm.weight + 1)
    model.model.norm.weight.data += 1
    expected = output(model, "llama")
    names = list(dict(model.named_parameters()))
    model.model.norm = norm
    changed = output(model, "llama")
    assert torch.equal(changed, expected)
    assert list(dict(model.named_parameters())) == names
    assert torch.equal(output(crosslayer.disconnect(model), "llama"), changed)


def test_a_wrapper_around_the_final_norm_is_no_second_readout():
    model = connected("llama", "mudd")
    expected, size = output(model, "llama"), len(model.state_dict())
    model.model.norm = torch.nn.Sequential(model.model.norm)
    assert torch.equal(output(model, "llama"), expected)
    assert len(model.state_dict()) == size


def test_a_norm_that_was_replaced_after_it_was_copied():
    """The copies for k and v are compared with the norm that the host has now."""
    model = connected("llama", "mudd")
    norm = copy.deepcopy(model.model.layers[1].input_layernorm)
    norm.weight.data *= 3
    model.model.layers[1].input_layernorm = norm
    before = output(model, "llama")
    with pytest.raises(ValueError, match="does not compute the plain residual"):
        crosslayer.disconnect(model)
    model.load_state_dict(model.state_dict())
    assert torch.equal(output(model, "llama"), before)


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match="DataParallel cannot run a connected model"):
        connected("llama", "mudd").model._replicate_for_data_parallel()


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # PEFT's, of every RMSNorm
def test_adapted_norms_have_gradients():
    import peft

    tuning = peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], task_type="CAUSAL_LM")
    adapted = gradients(peft.get_peft_model(connected("llama", "mudd"), tuning), "llama")
    assert all(gradient.any() for gradient in adapted.values())
    assert sum(name.endswith("default.weight") for name in adapted) == 4
    saved = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["input_layernorm"])
    adapted = gradients(peft.get_peft_model(connected("llama", "mudd"), saved), "llama")
    assert sum("layernorm" in name and bool(g.any()) for name, g in adapted.items()) == 3


def test_a_prepared_backbone_is_refused():
    """Its forward hides what makes hidden states of a connection's states."""
    backbone = trained("llama").model
    backbone.forward = torch.autocast("cpu", torch.bfloat16)(backbone.forward)
    with pytest.raises(ValueError, match="the forward of a LlamaModel was replaced"):
        crosslayer.connect(backbone, "mudd")


def test_an_attentions_input_is_three():
    model = connected("llama", "mudd")
    attention = model.model.layers[1].self_attn

    def detach(module, args, kwargs):
        kwargs["hidden_states"].detach()

    attention.register_forward_pre_hook(detach, with_kwargs=True)
    with pytest.raises(AttributeError, match=r"a tuple of 3 here, .* has no 'detach'"):
        model(ids())


def test_a_dispatched_model_is_refused():
    from accelerate import cpu_offload

    model = cpu_offload(trained("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"the forward of a Llama.* was replaced"):
        crosslayer.connect(model, "mudd")
    model = cpu_offload(connected("llama", "prenorm"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="or connect before you dispatch"):
        crosslayer.disconnect(model)


FLOAT_PAIRS = [(family, "mudd") for family in FAMILIES]
FLOAT_PAIRS += [("llama", spec) for spec in ("prenorm", "hyper", "mhc")]


def cast_inputs(family: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(family).items()}


def model_output(model: nn.Module, family: str, dtype: torch.dtype) -> torch.Tensor:
    out = model(**cast_inputs(family, dtype))
    return out.sample if family == "dit" else out.logits


@parametrize_cells(FLOAT_PAIRS)
def test_float32_streams_in_a_bfloat16_model(family, spec):
    model = crosslayer.connect(build(family).bfloat16(), f"{spec}(stream_dtype='float32')")
    assert model_output(model, family, torch.bfloat16).dtype == torch.bfloat16
    if family != "dit":
        cast = cast_inputs(family, torch.bfloat16)
        hidden_states = model(**cast, output_hidden_states=True).hidden_states
        assert all(state.dtype == torch.bfloat16 for state in hidden_states[:-1])


class ByteLinear(nn.Module):
    """A projection with quantised weights that are parameters, as bitsandbytes'."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.step = (linear.weight.abs().max() / 127).item()
        rounded = (linear.weight.detach() / self.step).round().to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.step)


def test_float32_streams_where_the_first_weights_are_of_one_byte():
    """Of a layer without a norm before its sub-layers, as OLMo 2's."""
    plain = perturb_weights(build("olmo2").bfloat16(), 0.05)
    for layer in plain.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, ByteLinear(child))
    expected = plain(**inputs("olmo2")).logits
    model = crosslayer.connect(copy.deepcopy(plain), "prenorm(stream_dtype='float32')")
    actual = model(**inputs("olmo2")).logits
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_float32_streams_beside_norms_wider_than_their_model():
    """transformers keeps GPT-OSS's norms in float32 in a float16 model."""
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        num_experts_per_tok=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).half()
    for layer in model.model.layers:
        layer.input_layernorm.float()
        layer.post_attention_layernorm.float()
    model.model.norm.float()
    connected = crosslayer.connect(model, "prenorm(stream_dtype='float32')")
    assert connected(torch.arange(7)[None]).logits.dtype == torch.float16


# Experts have no kernel for float64.
@parametrize_cells([p for p in FLOAT_PAIRS if p[0] not in ("mixtral", "olmoe")])
def test_a_float64_model_has_float64_connections(family, spec):
    first = perturb_weights(crosslayer.connect(build(family).double(), spec), 0.05)
    assert all(p.dtype == torch.float64 for p in first.parameters())
    second = perturb_weights(crosslayer.connect(build(family), spec).double(), 0.05)
    torch.testing.assert_close(
        model_output(first, family, torch.float64),
        model_output(second, family, torch.float64),
        rtol=1e-3,
        atol=1e-3,
    )
