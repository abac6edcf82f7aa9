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


class LateNormBlock(RwkvBlock):
    def __init__(self, number: int):
        super().__init__(0)


def test_only_the_first_layer_may_norm_the_stream():
    message = r"layer 1 \(LateNormBlock\): it norms the stream itself with its pre_norm"
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(LibraryModel(LateNormBlock), "mudd")
