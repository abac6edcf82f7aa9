"""Training people already do: checkpointing, Trainer, accelerate and PEFT on a connected model."""

import copy
import json

import pytest
import torch
from test_connect import connected, trained
from torch import nn
from transformers import Trainer, TrainingArguments

import crosslayer
from crosslayer import Connection
from tests.hf.backbones import FAMILIES, build, checkpoint, ids, inputs, loss, output
from tests.support.tiny import shake

families = pytest.mark.parametrize("family", FAMILIES)
methods = pytest.mark.parametrize("arm", crosslayer.available())
# what trainers and adapters ask of newer versions of transformers
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def gradients(model: nn.Module, family: str) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model, family).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@families
@methods
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_gradient_checkpointing(family, arm, reentrant):
    if family == "dit" and reentrant:
        pytest.skip(
            "diffusers passes the layers' own tuples, which reentrant checkpointing does not look into"
        )
    model = connected(family, arm)
    model.train()
    if family != "dit":
        model.config.use_cache = False  # with which a host takes another path
    torch.manual_seed(0)
    expected = gradients(model, family)
    checkpoint(model, family, reentrant)
    torch.manual_seed(0)
    again = gradients(model, family)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert again.keys() == expected.keys()
    assert expected.keys() == trainable or family in ("vit", "dit", "mixtral", "olmoe"), (
        "every parameter has a gradient"
    )
    assert all(torch.equal(again[n], g) for n, g in expected.items())


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        tokens = torch.randint(1, 97, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model: nn.Module, folder, steps: int) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=10, per_device_train_batch_size=4, learning_rate=1e-2, seed=1,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=5,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Lines())


@methods
def test_trainer_resumes_to_the_last_bit(arm, tmp_path):
    through = trainer(connected("llama", arm), tmp_path / "through", 20)
    through.train()
    stopped = trainer(connected("llama", arm), tmp_path / "stopped", 10)
    stopped.train()
    resumed = trainer(connected("llama", arm), tmp_path / "resumed", 20)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-10"))
    for (name, a), (_, b) in zip(
        through.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    saved = crosslayer.from_pretrained(tmp_path / "through" / "checkpoint-20")
    assert torch.equal(saved(ids()).logits, through.model.eval()(ids()).logits)


@methods
def test_accelerate(arm, tmp_path):
    """Its training loop, its state on disk, and weights that are brought in for the time they are used."""
    from accelerate import Accelerator, cpu_offload

    accelerator = Accelerator(cpu=True)
    model = connected("llama", arm)
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
    logits = model(ids()).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(p.is_meta for p in model.parameters())
    assert torch.equal(model(ids()).logits, logits)
    accelerator.free_memory()


TARGETS = {
    "gpt2": ["c_attn", "c_fc"],
    "phi3": ["qkv_proj", "o_proj"],
    "neox-parallel": ["query_key_value"],
    "neox-sequential": ["query_key_value"],
    "dit": ["to_q", "to_v"],
}
# every connection on one body of each way to project q, k and v, and one connection on the others
ADAPTED = [
    (f, a)
    for f in ("llama", "vit", *TARGETS)
    for a in crosslayer.available()
    if f != "neox-sequential"
]
ADAPTED += [(family, "mudd") for family in FAMILIES if (family, "mudd") not in ADAPTED]


def targets(family: str) -> list[str]:
    return TARGETS.get(family, ["q_proj", "k_proj", "v_proj"])


@pytest.mark.parametrize(("family", "arm"), ADAPTED)
def test_peft(family, arm, tmp_path):
    """LoRA on q, k and v after `connect`; the connections trained in full, saved, loaded, merged."""
    import peft

    model = connected(family, arm)
    before = output(model, family)
    config = peft.LoraConfig(
        r=2, target_modules=targets(family), init_lora_weights=True, fan_in_fan_out=family == "gpt2"
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    torch.testing.assert_close(output(adapted, family), before)
    lora = [n for n, _ in adapted.named_parameters() if "lora_" in n]
    assert lora
    shaken(adapted, "lora_")
    expected = output(adapted, family)
    assert not torch.allclose(expected, before, atol=1e-4)
    found = gradients(adapted, family)
    assert found.keys() == set(lora)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    assert torch.equal(output(loaded.eval(), family), expected)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(output(merged, family), expected, rtol=1e-4, atol=1e-4)
    assert [type(m) for m in merged.modules()] == [type(m) for m in model.modules()]


def shaken(model: nn.Module, part: str) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if part in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)


def test_peft_before_connect_is_the_same():
    """An adapted host, connected: the projections are adapters already."""
    import peft

    for family in ("llama", "gpt2", "phi3"):
        config = peft.LoraConfig(
            r=2, target_modules=targets(family), fan_in_fan_out=family == "gpt2"
        )
        first = peft.get_peft_model(connected(family, "mudd"), config)
        second = peft.get_peft_model(build(family), config)
        crosslayer.connect(second.base_model.model, "mudd")
        shake(second.base_model.model)
        first.load_state_dict(second.state_dict())
        assert torch.equal(output(first, family), output(second, family))


def test_peft_trains_the_connections_too(tmp_path):
    import peft

    model = connected("llama", "mudd")
    names = [f"connections.{i}" for i in range(2)] + ["norm.connection"]
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    )
    shaken(adapted, "modules_to_save")
    expected = output(adapted, "llama")
    assert {n for n in gradients(adapted, "llama") if n.endswith("W1")}
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path)
    assert torch.equal(output(loaded.eval(), "llama"), expected)


def test_a_connected_model_trains():
    for family in FAMILIES:
        model = crosslayer.connect(trained(family), "mudd").train()
        optimizer = torch.optim.AdamW(crosslayer.param_groups(model, lr=1e-3, weight_decay=0.1))
        torch.manual_seed(0)
        first = loss(model, family)
        for _ in range(5):
            torch.manual_seed(0)
            loss(model, family).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(0)
        assert loss(model, family) < first
        moved = [
            m
            for m in model.modules()
            if isinstance(m, Connection) and getattr(m, "W2", None) is not None
        ]
        assert all(m.W2.any() for m in moved)


def test_fsdp2_with_mixed_precision(tmp_path):
    """Parameters cast to bf16 with their layers, the connections' too, or those sharded apart and left wide."""
    from tests.hf import sharded

    torch.multiprocessing.spawn(sharded.train, (str(tmp_path),), nprocs=2)
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert len(errors) == 2 * len(crosslayer.available())
    assert {case: error for case, error in errors.items() if not error < 0.05} == {}


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # PEFT's, of every RMSNorm
def test_a_norm_that_is_replaced_is_used():
    import peft

    model = crosslayer.connect(trained("llama"), "prenorm")
    for layer in model.model.layers:
        layer.input_layernorm = copy.deepcopy(layer.input_layernorm)
        layer.input_layernorm.weight.data += 1
    changed = output(model, "llama")
    assert torch.equal(output(crosslayer.disconnect(model), "llama"), changed)
    adapted = peft.get_peft_model(
        connected("llama", "mudd"),
        peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], task_type="CAUSAL_LM"),
    )
    found = gradients(adapted, "llama")
    assert (
        all(g.any() for g in found.values())
        and sum(n.endswith("default.weight") for n in found) == 4
    )
    saved = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["input_layernorm"])
    found = gradients(peft.get_peft_model(connected("llama", "mudd"), saved), "llama")
    assert sum("layernorm" in n and bool(g.any()) for n, g in found.items()) == 3


def test_a_dispatched_model_is_connected_first():
    from accelerate import cpu_offload

    model = cpu_offload(trained("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="hooks on its layers; connect it first, then dispatch"):
        crosslayer.connect(model, "mudd")
    model = cpu_offload(connected("llama", "prenorm"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="connect it first, then dispatch"):
        crosslayer.disconnect(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arm", ["prenorm", "mudd", "hyper", "mhc"])
def test_a_wide_stream_and_a_float64_body(family, arm):
    wide = crosslayer.connect(build(family).bfloat16(), f"{arm}(stream_dtype='float32')")
    cast = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs(family).items()}
    out = wide(**cast)
    assert (out.sample if family == "dit" else out.logits).dtype == torch.bfloat16
    if family != "dit":
        states = wide(**cast, output_hidden_states=True).hidden_states
        assert all(state.dtype == torch.bfloat16 for state in states[:-1])
    if family in ("mixtral", "olmoe"):  # whose experts have no kernel for it
        return
    double = shake(crosslayer.connect(build(family).double(), arm), 0.05)
    cast = {k: v.double() if v.is_floating_point() else v for k, v in inputs(family).items()}
    assert all(p.dtype == torch.float64 for p in double.parameters())
    again = shake(crosslayer.connect(build(family), arm).double(), 0.05)
    assert_close = torch.testing.assert_close
    read = (lambda out: out.sample) if family == "dit" else (lambda out: out.logits)
    assert_close(read(double(**cast)), read(again(**cast)), rtol=1e-3, atol=1e-3)
