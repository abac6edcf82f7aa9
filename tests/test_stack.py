"""`Stack`: the loop over sites and sub-layers, as a module."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosslayer
from crosslayer.testing.tiny_model import equal_tensors, perturb_weights
from tests.support.chain import D, randn, row, run

DIM, LAYERS = 8, 3
SPECS = ("prenorm", "mudd", "hyper", "mgr")  # one stream, q k v apart, n streams, streams that grow


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, mask=None):
        k = q if k is None else k
        v = q if v is None else v
        return F.scaled_dot_product_attention(
            self.query(q), self.key(k), self.value(v), attn_mask=mask
        )


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ParallelBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, *inputs: Tensor, mask=None) -> Tensor:
        return self.attn(*inputs[:-1], mask=mask) + self.mlp(inputs[-1])


def make_sublayers(parallel: bool = False) -> list[nn.Module]:
    if parallel:
        return [ParallelBlock() for _ in range(LAYERS)]
    return [make() for _ in range(LAYERS) for make in (Attention, MLP)]


def make_stack(spec: str, parallel: bool = False, **options) -> crosslayer.Stack:
    torch.manual_seed(0)
    stack = crosslayer.Stack(spec, make_sublayers(parallel), DIM, parallel=parallel, **options)
    return perturb_weights(stack)


def embedding() -> Tensor:
    return torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1))


def causal_mask() -> Tensor:
    return torch.ones(5, 5, dtype=torch.bool).tril()


def output_and_gradients(stack: nn.Module) -> dict[str, Tensor]:
    x = embedding().requires_grad_()
    out = stack(x, mask=causal_mask())
    stack.zero_grad()
    out.square().mean().backward()
    gradients = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "embedding": x.grad, **gradients}


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_loop_written_by_hand(spec, parallel):
    stack = make_stack(spec, parallel)
    torch.manual_seed(0)
    sublayers = nn.ModuleList(make_sublayers(parallel))
    make = crosslayer.make(spec)
    plan = crosslayer.plan(LAYERS, parallel)
    sites = nn.ModuleList(make(site, DIM, lambda port: nn.RMSNorm(DIM)) for site in plan)
    perturb_weights(nn.ModuleDict({"sublayers": sublayers, "connections": sites}))

    state = sites[0].init(embedding())
    for connection, sublayer in zip(sites, sublayers, strict=False):
        inputs, state = connection.read(state)
        options = {} if isinstance(sublayer, MLP) else {"mask": causal_mask()}
        state = connection.write(state, sublayer(*inputs, **options))
    assert torch.equal(stack(embedding(), mask=causal_mask()), sites[-1].readout(state))


def test_options_are_passed_to_attention_alone():
    stack = make_stack("prenorm")
    with_mask, without = stack(embedding(), mask=causal_mask()), stack(embedding())
    assert not torch.equal(with_mask, without)  # an MLP would raise a TypeError


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
@pytest.mark.parametrize("spec", SPECS)
def test_recomputing_streams_changes_no_bit(spec, parallel):
    recomputed = make_stack(spec, parallel, recompute="streams")
    assert equal_tensors(
        output_and_gradients(make_stack(spec, parallel)), output_and_gradients(recomputed)
    )


def test_recomputing_by_inversion():
    plain = output_and_gradients(make_stack("mgr"))
    recomputed = output_and_gradients(make_stack("mgr", recompute="inversion"))
    assert torch.equal(plain["output"], recomputed["output"])
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", [None, "streams"])
def test_copy_pickle_and_state_dict(recompute):
    stack = make_stack("mudd", recompute=recompute)
    expected = output_and_gradients(stack)
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    loaded = crosslayer.Stack("mudd", make_sublayers(), DIM, recompute=recompute)
    loaded.load_state_dict(torch.load(file))
    for restored in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack)), loaded):
        assert equal_tensors(output_and_gradients(restored), expected)


def test_norm_and_spec_are_arguments():
    stack = crosslayer.Stack(
        crosslayer.make("mudd", dilation=2), make_sublayers(), DIM, norm=nn.LayerNorm
    )
    norms = [norm for connection in stack.connections for norm in connection.norms]
    assert all(type(norm) is nn.LayerNorm for norm in norms)
    assert all(connection.options == {"dilation": 2} for connection in stack.connections)


def test_an_odd_number_of_sublayers_is_an_error():
    with pytest.raises(ValueError, match="an even number of them, got 5"):
        crosslayer.Stack("prenorm", make_sublayers()[:-1], DIM)


def test_a_recompute_mode_that_the_method_lacks_is_an_error():
    with pytest.raises(ValueError, match='"inversion" is not supported by hyper'):
        make_stack("hyper", recompute="inversion")


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["hyper", "mudd"])
def test_compiles_to_one_graph(spec):
    stack = make_stack(spec)
    expected = output_and_gradients(stack)
    actual = output_and_gradients(torch.compile(stack, fullgraph=True, backend="aot_eager"))
    for name, value in expected.items():
        torch.testing.assert_close(
            actual.get(name, actual.get(f"_orig_mod.{name}")), value, rtol=1e-5, atol=1e-6
        )


def test_a_loop_that_ignores_what_write_returns_gets_a_warning():
    sites = row("hyper")
    state = sites[0].init(randn(2, 5, D))
    with pytest.warns(UserWarning, match="^hyper: the last sub-layer's output is not in the state"):
        for site in sites[:-1]:
            (h, *_), state = site.read(state)
            site.write(state, h)
        sites[-1].readout(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(sites, randn(2, 5, D))
