"""Layers as libraries for pretraining write them: OLMo-core, flash-linear-attention (fla), RWKV."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crosslayer
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.plain_models import DIM, HEADS, make_ids
from tests.support.split_inputs import check_split_inputs


class Attention(nn.Module):
    """Projects its input in a method, as OLMo-core's, which is recomputed in the backward pass."""

    def __init__(self):
        super().__init__()
        self.w_q, self.w_k, self.w_v, self.w_out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.recomputes = False

    def make_heads(self, x: Tensor, scale: Any = None) -> tuple[Tensor, ...]:
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        q = q if scale is None else q * scale
        return tuple(y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in (q, k, v))

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        if self.recomputes and x.requires_grad:
            q, k, v = checkpoint(self.make_heads, x, scale, use_reentrant=False)
        else:
            q, k, v = self.make_heads(x, scale=scale)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.w_out(y.transpose(1, 2).flatten(2))


class AddNorm(nn.LayerNorm):
    """Adds a residual first, and returns the sum too, as the norms of flash-attn and fla."""

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
        x = x if residual is None else x + residual
        return (super().forward(x), x) if prenorm else super().forward(x)


class SubLayer(nn.Linear):
    """Returns, besides its output, the number of its calls so far in a cache that it is given."""

    def __init__(self):
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor, calls: int | None = None) -> tuple[Tensor, int]:
        calls = calls or 0
        return super().forward(x) / (1 + calls), calls + 1


class AddedStream(nn.Module):
    """Adds an output to the stream, as OLMo-core's `ResidualStream`."""

    def __init__(self, alpha: float):
        super().__init__()
        self.alpha = alpha
        self.dropout = nn.Identity()

    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, self.dropout(x), alpha=self.alpha)


class LibraryBlock(nn.Module):
    returns_tuple = True

    def __init__(self, number: int):
        super().__init__()
        self.attn_norm, self.mlp_norm = AddNorm(DIM), AddNorm(DIM)
        self.attn, self.mlp = Attention(), nn.Linear(DIM, DIM)


class OlmoBlock(LibraryBlock):
    """Hands arguments that it has no name for to an attention that names them."""

    returns_tuple = False

    def __init__(self, number: int):
        super().__init__(number)
        self.attn_stream, self.mlp_stream = AddedStream(1.0), AddedStream(0.5)

    def forward(self, x: Tensor, *, loss_factor: Any = None, **kwargs: Any) -> Tensor:
        del loss_factor
        h = self.attn_stream(x, self.attn(self.attn_norm(x), **kwargs))
        return self.mlp_stream(h, self.mlp(self.mlp_norm(h)))


class FlaBlock(LibraryBlock):
    """Adds within a norm, and returns an argument as it came."""

    def forward(self, x: Tensor, scale: Any = None, states: Any = None) -> tuple[Any, ...]:
        residual = x
        x = self.attn(self.attn_norm(x), scale)
        x, residual = self.mlp_norm(x, residual, True)
        return residual + self.mlp(x), None, states


class RwkvBlock(LibraryBlock):
    """The first one norms the embedding. The second sub-layer gets what the first one returns."""

    def __init__(self, number: int):
        super().__init__(number)
        self.attn, self.mlp = SubLayer(), SubLayer()
        if number == 0:
            self.pre_norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, calls: Any = None) -> tuple[Tensor, Any]:
        residual = self.pre_norm(x) if hasattr(self, "pre_norm") else x
        y, calls = self.attn(self.attn_norm(residual), calls)
        y, residual = self.mlp_norm(y, residual=residual, prenorm=True)
        y, calls = self.mlp(y, calls)
        return residual + y, calls


class LibraryModel(nn.Module):
    def __init__(self, block: Any):
        super().__init__()
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(block(number) for number in range(3))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor, **kwargs: Any) -> tuple[Tensor, list[Any]]:
        x = self.embed(ids)
        extras = []
        for layer in self.layers:
            torch._dynamo.maybe_mark_dynamic(x, (0, 1))  # as OLMo-core, where layers are compiled
            x = layer(x, **kwargs)
            if layer.returns_tuple:
                x, *others = x
                extras.append(others)
        return self.norm(x), extras


ARGUMENTS = {
    OlmoBlock: [{}, {"scale": 2.0, "loss_factor": 3.0}],
    FlaBlock: [{}, {"scale": 2.0, "states": ("a", "b")}],
    RwkvBlock: [{}, {"calls": 3}],
}


@pytest.mark.parametrize("block", ARGUMENTS)
def test_layers_of_libraries(block):
    """They compute, return and learn the same. Other weights of MUDD give another function."""
    torch.manual_seed(0)
    plain = perturb_weights(LibraryModel(block), 0.1).eval()
    same = crosslayer.connect(copy.deepcopy(plain), "prenorm")
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    for arguments in ARGUMENTS[block]:
        expected, expected_extras = plain(make_ids(), **arguments)
        for connected in (same, model):
            output, extras = connected(make_ids(), **arguments)
            assert torch.equal(output, expected) and extras == expected_extras
        same(make_ids(), **arguments)[0].square().mean().backward()
        expected.square().mean().backward()
    gradients = {name: p.grad for name, p in same.named_parameters()}
    assert all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters())
    assert not torch.equal(perturb_weights(model, 0.1)(make_ids())[0], plain(make_ids())[0])


def test_projections_in_a_method():
    attention = Attention()
    check_split_inputs(
        attention, lambda x: (attention.w_q(x), attention.w_k(x), attention.w_v(x)), DIM
    )


def test_projections_in_a_method_that_is_recomputed():
    torch.manual_seed(0)
    model = perturb_weights(crosslayer.connect(LibraryModel(OlmoBlock), "mudd"), 0.1)
    assert model.layers[1].connections[0].ports == ("q", "k", "v")
    gradients = []
    for recomputes in (False, True):
        for layer in model.layers:
            layer.attn.recomputes = recomputes
        model.zero_grad()
        model(make_ids())[0].square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


class RecomputingAttention(Attention):
    """Its methods call each other."""

    def recompute(self, x: Tensor) -> Tensor:
        return checkpoint(self.forward, x, 2.0, use_reentrant=False)

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        return self.recompute(x) if scale is None else super().forward(x, scale)


def test_methods_that_call_each_other_have_one_input():
    model = LibraryModel(OlmoBlock)
    for layer in model.layers:
        layer.attn = RecomputingAttention()
    crosslayer.connect(model, "mudd(ways='qkvr')")
    assert model.layers[1].connections[0].ports == ("mixer",)


class ScaledNorm(AddNorm):
    def forward(
        self, x: Tensor, residual: Any = None, prenorm: bool = False, scale: Any = 1
    ) -> Any:
        y, total = super().forward(x, residual, True)
        return (scale * y, total) if prenorm else scale * y


class ScaledBlock(LibraryBlock):
    def __init__(self, number: int):
        super().__init__(number)
        self.mlp_norm = ScaledNorm(DIM)

    def forward(self, x: Tensor, scale: Any = 2.0) -> Any:
        y, x = self.mlp_norm(self.attn(self.attn_norm(x)), x, True, scale)
        return x + self.mlp(y)


class LateResidualBlock(LibraryBlock):
    """Calls a norm that adds the residual, and may do so afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp_norm(self.mlp(self.attn_norm(x + self.attn(x))), residual=x)


class RoutedBlock(LibraryBlock):
    """Hands on an output of a module that is no sub-layer."""

    def __init__(self, number: int):
        super().__init__(number)
        self.router, self.mlp = SubLayer(), SubLayer()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        _, calls = self.router(self.mlp_norm(x))
        return x + self.mlp(self.mlp_norm(x), calls)[0]


class ReturningBlock(RoutedBlock):
    """Returns such an output."""

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.attn_norm(x))
        _, calls = self.router(self.mlp_norm(x))
        return x + self.mlp(self.mlp_norm(x))[0], calls


class SteppingBlock(LibraryBlock):
    """What the first sub-layer returns passes a second module, which gets its other output too."""

    def __init__(self, number: int):
        super().__init__(number)
        self.attn, self.step = SubLayer(), SubLayer()

    def forward(self, x: Tensor) -> Tensor:
        y, calls = self.attn(self.attn_norm(x))
        x = x + self.step(y, calls)[0]
        return x + self.mlp(self.mlp_norm(x))


class MixedBlock(LibraryBlock):
    """The first layer is pre-norm, the others are post-norm."""

    def __init__(self, number: int):
        super().__init__(number)
        self.norms_sums = number > 0

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_sums:
            x = self.attn_norm(x + self.attn(x))
            return self.mlp_norm(x + self.mlp(x))
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class SetReturningBlock(FlaBlock):
    def forward(self, x: Tensor, scale: Any = None, states: Any = frozenset()) -> tuple[Any, ...]:
        return super().forward(x, scale, states)


class OpeningBlock(LibraryBlock):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = x + self.attn(self.attn_norm(x), kwargs.get("scale"))
        return x + self.mlp(self.mlp_norm(x))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (ScaledBlock, "mlp_norm, which norms the stream, gets more than one input"),
        (LateResidualBlock, "mlp_norm gets more of the stream, as its argument 'residual'"),
        (RoutedBlock, "it gives mlp an output of router, which is no sub-layer that runs before"),
        (ReturningBlock, "it returns an output of router, which is no sub-layer, besides its"),
        (SteppingBlock, "step gets an output of attn as 'calls'"),
        (MixedBlock, "some of its layers are pre-norm and others post-norm"),
        (SetReturningBlock, r"it returns its argument 'states', whose default is frozenset\(\)"),
        (OpeningBlock, r"takes arguments out of its \*\*kwargs; name them in its forward"),
    ],
)
def test_layers_that_are_refused(block, message):
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(LibraryModel(block), "mudd")


class ChoosingBlock(FlaBlock):
    def forward(self, x: Tensor, scale: Any = None, old: Any = None, swap: bool = False) -> Any:
        x, *_ = super().forward(x)
        return x, old if swap else scale


def test_a_switch_of_what_is_returned():
    """A call with the value that `connect` has not read is an error."""
    model = crosslayer.connect(LibraryModel(ChoosingBlock), "mudd")
    assert model(make_ids(), scale=1, old=2)[1] == [[1]] * 3
    with pytest.raises(ValueError, match="is called with swap=True"):
        model(make_ids(), scale=1, old=2, swap=True)


class LateNormBlock(RwkvBlock):
    def __init__(self, number: int):
        super().__init__(0)


def test_only_the_first_layer_may_norm_the_stream():
    message = r"layer 1 \(LateNormBlock\): it norms the stream itself with its pre_norm"
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(LibraryModel(LateNormBlock), "mudd")
