"""`norm_spec_of` recognises exactly the host norms that kernels can fuse."""

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.fused_norms import norm_spec_of
from crosslayer.hf.host_norms import NormReference
from crosslayer.norms import apply_norm, rms_norm
from tests.hf.backbones import LANGUAGE, METHODS, VISION, build, connected, ids

# Families whose norms are of their own kinds.
UNKNOWN_NORMS = {"gemma2", "gemma3", "olmo", "dit"}


def test_a_norm_that_only_resembles_a_known_one_is_not_fused():
    model = build("llama")
    for layer in model.model.layers:
        layer.input_layernorm = CohereLayerNorm(model.config.hidden_size)
    connections = find_connections(crosslayer.connect(model, "prenorm"))
    specs = [norm_spec_of(connection.norms[0]) for connection in connections]
    assert not any(specs[0:-1:2])
    assert all(specs[1::2])


def test_a_final_norm_whose_forward_is_replaced():
    """By a method that computes with its input, as Liger's does, after `connect` and before it."""
    model = build("llama")
    crosslayer.connect(model, "mudd").model.norm.forward = lambda x: x.float()
    with pytest.raises(AttributeError, match="what replaces a module or its forward after connect"):
        model(torch.zeros(1, 3, dtype=torch.long))
    patched = build("llama")
    patched.model.norm.forward = lambda x: x.float()
    with pytest.raises(ValueError, match="by Liger or by hand"):
        crosslayer.connect(patched, "mudd")


class OverwritingNorm(torch.autograd.Function):
    """RMSNorm whose backward writes into the gradient that it gets, as Liger's does."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            ctx.inputs = x, weight
            ctx.output = rms_norm(x) * weight
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        dx, dweight = torch.autograd.grad(ctx.output, ctx.inputs, gradient)
        return gradient.copy_(dx), dweight


@pytest.mark.parametrize("spec", METHODS)
def test_a_norm_that_overwrites_its_gradient(spec, monkeypatch):
    """Gradients are those of a usual norm, but with ResiDual, as docs/huggingface.md says."""
    model = connected("llama", spec)
    tokens = ids(2)

    def gradients():
        model.zero_grad()
        model(tokens).logits.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    monkeypatch.setattr(
        LlamaRMSNorm, "forward", lambda self, x: OverwritingNorm.apply(x, self.weight)
    )
    found = gradients()
    assert found.keys() == expected.keys()
    errors = [(found[name] - expected[name]).norm() / expected[name].norm() for name in found]
    is_same = max(errors).item() < 1e-3
    assert is_same is (spec != "resi_dual")


def test_a_norm_whose_class_adds_no_forward_is_fused():
    """As torchtitan's, whose classes say how they are initialised."""

    class Norm(nn.RMSNorm):
        def init_states(self):
            self.reset_parameters()

    class Scaled(Norm):
        def forward(self, x):
            return 2 * super().forward(x)

    assert norm_spec_of(Norm(8, eps=1e-5)).eps == 1e-5
    assert norm_spec_of(Scaled(8)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_eps_has_torchs(dtype):
    """Beside inputs so small that another eps would show."""
    norm = torch.nn.RMSNorm(8).to(dtype)
    x = (1e-3 * torch.randn(2, 3, 8)).to(dtype)
    found = apply_norm(x, norm_spec_of(norm))
    rtol = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, norm(x), rtol=rtol, atol=0)


def test_a_norm_in_float32_does_not_widen_the_inputs_of_a_bfloat16_model():
    site = crosslayer.make("prenorm")(crosslayer.plan(1)[0], 8, lambda port: LlamaRMSNorm(8))
    (h,), _ = site.read(site.init(torch.ones(1, 2, 8, dtype=torch.bfloat16)))
    assert h.dtype == torch.bfloat16


def test_norms_of_float32_streams_run_as_modules():
    """Fused, they would give the sub-layers float32, too."""
    connection = find_connections(connected("llama", "hyper(stream_dtype='float32')"))[0]
    assert connection.fused_norm_specs() == ()


@pytest.mark.parametrize("spec", ["postnorm", "resi_dual"])
def test_mixing_weights_of_an_unknown_norm_are_an_error(spec):
    site = crosslayer.make(spec)(crosslayer.plan(1)[1], 8, lambda port: nn.GroupNorm(1, 8))
    with pytest.raises(ValueError, match="expected an RMSNorm or a LayerNorm without hooks, got G"):
        site.mixing_weights(site.init(torch.ones(1, 2, 8)))


def test_a_norm_with_hooks_runs_as_a_module():
    connection = find_connections(crosslayer.connect(build("llama"), "prenorm"))[0]
    for norm in (connection.norms[0], connection.norms[0].host_norm_module()):
        for hook in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
            handle = getattr(norm, f"register_{hook}_hook")(lambda *_: None)
            assert norm_spec_of(connection.norms[0]) is None
            handle.remove()
    assert norm_spec_of(connection.norms[0])


def test_a_hook_on_a_hosts_norm_stays_with_it():
    """MUDD copies the norm for k and v, which a removed hook would still see."""
    model = build("llama")
    norm = model.model.layers[1].input_layernorm
    inputs = []
    kinds = ("forward", "forward_pre", "full_backward", "full_backward_pre")
    handles = [
        getattr(norm, f"register_{kind}_hook")(lambda *found: inputs.append(found))
        for kind in kinds
    ]
    model = crosslayer.connect(model, "mudd")
    model(ids()).logits.sum().backward()
    assert len(inputs) == len(kinds)
    for handle in handles:
        handle.remove()
    model(ids())
    assert len(inputs) == len(kinds)


@pytest.mark.parametrize(
    ("matrix", "vector", "expected"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
        (torch.uint8, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_that_sublayers_compute_in(matrix, vector, expected):
    """A wider norm does not say it, nor does a quantised matrix, nor an adapter beside it."""
    layer = nn.ModuleDict({"norm": nn.LayerNorm(8, dtype=vector), "linear": nn.Linear(8, 8)})
    layer.adapter = nn.Linear(8, 2)
    layer.linear.weight = nn.Parameter(torch.zeros(8, 8, dtype=matrix), requires_grad=False)
    assert NormReference(layer, "norm").dtype == expected


@pytest.mark.parametrize("family", [*LANGUAGE, *VISION])
def test_a_norm_spec_computes_what_the_norm_does(family):
    torch.manual_seed(0)
    model = crosslayer.connect(build(family), "mudd" if family in LANGUAGE else "prenorm")
    fused_norms = 0
    for connection in find_connections(model):
        for norm in connection.norms:
            spec = norm_spec_of(norm)
            if spec is None:
                continue
            fused_norms += 1
            torch.nn.init.normal_(spec.weight)
            x = torch.randn(2, 3, len(spec.weight))
            torch.testing.assert_close(apply_norm(x, spec), norm(x), rtol=1e-6, atol=1e-6)
    assert bool(fused_norms) == (family not in UNKNOWN_NORMS)
