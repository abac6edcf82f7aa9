"""What needs a GPU: half precision, compiled decoding with CUDA graphs, flex's backward."""

import copy

import pytest
import torch

import crosslayer
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.backbones import LANGUAGE, METHODS, build, ids, starts_bitwise

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]
BITWISE = [("llama", spec) for spec in METHODS if starts_bitwise(spec)]
BITWISE += [(family, "mudd") for family in LANGUAGE if family != "llama"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model(family: str, spec: str, dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    sizes = {
        k: v
        for k, v in SIZES.items()
        if k != "num_key_value_heads" or k in LANGUAGE[family].options
    }
    if "head_dim" in LANGUAGE[family].options:
        sizes["head_dim"] = 16
    host = build(family, **sizes, **options)
    return perturb_weights(crosslayer.connect(host, spec), 0.05).to("cuda", dtype)


@pytest.mark.parametrize(("family", "spec"), BITWISE)
def test_starts_where_the_host_is_in_bf16(family, spec):
    plain = perturb_weights(build(family), 0.05).to("cuda", torch.bfloat16)
    connected = crosslayer.connect(copy.deepcopy(plain), spec)
    assert torch.equal(connected(ids().cuda()).logits, plain(ids().cuda()).logits)


DECODED = [("llama", spec) for spec in METHODS]
DECODED += [(family, "mudd") for family in LANGUAGE if family not in ("llama", "mixtral", "olmoe")]


@pytest.mark.parametrize(("family", "spec"), DECODED)
def test_generate_compiles_its_own_step(family, spec):
    """transformers compiles the decoding step by itself on a GPU where the cache is static."""
    generating = model(family, spec)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = generating.generate(ids().cuda(), use_cache=False, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sequences = generating.generate(ids().cuda(), cache_implementation="static", **options)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(sequences, expected)
    assert 1 <= graphs <= (2 if "sliding_window" in LANGUAGE[family].options else 1)


@pytest.mark.parametrize("family", [f for f in LANGUAGE if f != "gpt2"])
@pytest.mark.parametrize("spec", ["mudd", "hyper"])
def test_flex_attention_has_gradients(family, spec):
    trained = model(family, spec, attn_implementation="eager")
    if not trained._supports_flex_attn:
        pytest.skip("the host does not have it")
    grads = {}
    for kernel in ("eager", "flex_attention"):
        trained.set_attn_implementation(kernel)
        trained.zero_grad()
        trained(ids(2, 16).cuda()).logits.square().mean().backward()
        grads[kernel] = {
            n: p.grad.clone() for n, p in trained.named_parameters() if p.grad is not None
        }
    torch.testing.assert_close(grads["flex_attention"], grads["eager"], rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("spec", METHODS)
def test_a_bf16_step_under_autocast(spec):
    trained = model("llama", spec).train()
    optimizer = torch.optim.AdamW(crosslayer.param_groups(trained, 1e-3, 0.1), fused=True)
    losses = []
    for _ in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            loss = trained(ids().cuda(), labels=ids().cuda()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("spec", METHODS)
def test_weights_that_wait_on_the_cpu(spec):
    from accelerate import cpu_offload

    offloaded = model("llama", spec)
    expected = offloaded(ids().cuda()).logits
    offloaded = cpu_offload(offloaded.cpu(), execution_device=torch.device("cuda"))
    torch.testing.assert_close(offloaded(ids().cuda()).logits, expected)
