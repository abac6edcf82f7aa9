"""Layers whose forward does something else for some values of its arguments."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosslayer

DIM = 16


class MaskedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal))


class Block(nn.Module):
    """It passes its arguments on, one by another name."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = MaskedAttention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))

    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        return self.attn(self.norm_1(x), mask, is_causal=causal)

    def forward(self, x: Tensor, mask: Tensor | None = None, training: bool = False) -> Tensor:
        x = x + self.attend(x, mask, training)
        return x + self.mlp(self.norm_2(x))


class BranchBlock(Block):
    """It leaves an argument out where it is None, which is the attention's default."""

    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        if mask is None:
            return self.attn(self.norm_1(x), is_causal=causal)
        return super().attend(x, mask, causal)


class EarlyBlock(Block):
    """A switch chooses its modules."""

    def forward(self, x: Tensor, mask: Tensor | None = None, training: bool = False) -> Tensor:
        x = x + self.attend(x, mask, False)
        return x if training else x + self.mlp(self.norm_2(x))


class MaskMakingBlock(Block):
    """It makes a mask where it gets none."""

    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        if mask is None:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return super().attend(x, mask, causal)


class ChoosingBlock(Block):
    """It chooses a value of its attention's argument."""

    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        return self.attn(self.norm_1(x), mask, is_causal=mask is None)


class DefaultBlock(Block):
    """An argument that is left out has a default, which is not None."""

    def forward(
        self, x: Tensor, mask: Any = None, training: bool = False, width: Any = 3
    ) -> Tensor:
        x = super().forward(x, mask, training)
        return x if width is not None else 2 * x


class EncoderBlock(Block):
    """Its second attention gets an encoder's outputs and mask, under the names of transformers."""

    def __init__(self):
        super().__init__()
        self.norm_3 = nn.LayerNorm(DIM)
        self.cross = CrossAttention()

    def attend_encoder(self, x: Tensor, states: Any, mask: Any) -> Tensor:
        return x + self.cross(self.norm_3(x), states, mask=mask)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attn(self.norm_1(x), mask)
        x = self.attend_encoder(x, encoder_hidden_states, encoder_attention_mask)
        return x + self.mlp(self.norm_2(x))


class CrossAttention(MaskedAttention):
    def forward(self, x: Tensor, states: Tensor | None = None, mask: Any = None) -> Tensor:
        states = x if states is None else states
        q, k, v = self.q_proj(x), self.k_proj(states), self.v_proj(states)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask))


class ScalingEncoderBlock(EncoderBlock):
    """It does something else with an encoder's outputs than to pass them on."""

    def attend_encoder(self, x: Tensor, states: Any, mask: Any) -> Tensor:
        return super().attend_encoder(x, None if states is None else states.tanh(), mask)


class JointEncoderBlock(EncoderBlock):
    """It does something else where it gets both."""

    def attend_encoder(self, x: Tensor, states: Any, mask: Any) -> Tensor:
        y = self.cross(self.norm_3(x))
        return x + y if states is None or mask is None else x + 2 * y


class ReturningEncoderBlock(EncoderBlock):
    """It returns an encoder's outputs where it gets them."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, encoder_hidden_states: Any = None
    ) -> Any:
        x = super().forward(x, mask)
        return x if encoder_hidden_states is None else (x, encoder_hidden_states)


class FlagBlock(Block):
    """Its switch has no default but None, and is taken as `if` takes it."""

    def forward(self, x: Tensor, mask: Tensor | None = None, parallel: Any = None) -> Tensor:
        y = self.attend(x, mask, False)
        if parallel:
            return x + (y + self.mlp(self.norm_2(x)))
        return x + y + self.mlp(self.norm_2(x + y))


class DoubleFlagBlock(FlagBlock):
    """None and False are two things to it."""

    def forward(self, x: Tensor, mask: Tensor | None = None, parallel: Any = None) -> Tensor:
        return super().forward(x, mask, parallel is not None and not parallel)


class TypeBlock(Block):
    """It passes its mask on where that is a tensor."""

    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        return super().attend(x, mask if isinstance(mask, Tensor) else None, causal)


class TupleStep(nn.Linear):
    def forward(self, y: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(y), 3


class TupleStepBlock(Block):
    def __init__(self):
        super().__init__()
        self.step = TupleStep(DIM, DIM)

    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        y, _ = self.step(super().attend(x, mask, causal))
        return y


GATE = torch.ones(DIM)


class TensorDefaultBlock(Block):
    def forward(self, x: Tensor, gate: Tensor = GATE) -> Tensor:
        x = x + self.attn(self.norm_1(x)) * gate
        return x + self.mlp(self.norm_2(x))


class NumberBlock(FlagBlock):
    def forward(self, x: Tensor, mask: Tensor | None = None, parallel: int = 0) -> Tensor:
        return super().forward(x, mask, parallel)


class MaskedStep(nn.Linear):
    """What an attention returns passes it, with an argument of the layer's."""

    def forward(self, y: Tensor, mask: Tensor | None = None, factor: float = 1.0) -> Tensor:
        y = factor * super().forward(y)
        return y if mask is None else y * mask.mean()


class StepBlock(Block):
    def __init__(self):
        super().__init__()
        self.step = MaskedStep(DIM, DIM)

    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        return self.step(super().attend(x, mask, causal), mask, factor=0.5)


class GatedNorm(nn.LayerNorm):
    """A norm with a matrix, such as A.X K2's."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.gate(x).sigmoid()


class GatedNormBlock(Block):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = GatedNorm(DIM), GatedNorm(DIM)


class CountingBlock(Block):
    def attend(self, x: Tensor, mask: Any, causal: Any) -> Tensor:
        self.attn.last_length = x.shape[1]
        return super().attend(x, mask, causal)


class Model(nn.Module):
    def __init__(self, block: type[Block]):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **arguments)
        return self.norm(x)


class StarModel(Model):
    """Its forward takes any number of arguments by position."""

    def forward(self, x: Tensor, *masks: Tensor, **arguments: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *masks, **arguments)
        return self.norm(x)


MASK = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
MEMORY = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("block", "arguments", "message"),
    [
        (Block, {}, None),
        (Block, {"mask": MASK}, None),
        (Block, {"training": True}, None),  # an argument of this name, too
        (BranchBlock, {}, None),
        (BranchBlock, {"mask": MASK}, None),
        (DefaultBlock, {}, None),
        (EarlyBlock, {}, None),
        (EarlyBlock, {"training": True}, r"layer 0 \(EarlyBlock\) is called with training=True"),
        (MaskMakingBlock, {"mask": MASK}, None),
        (MaskMakingBlock, {}, "is called without mask. Its own code then does something else"),
        (ChoosingBlock, {"mask": MASK}, None),
        (ChoosingBlock, {"mask": None}, "is called without mask"),
        (StepBlock, {}, None),
        (StepBlock, {"mask": MASK}, None),
        (GatedNormBlock, {"mask": MASK}, None),
        (EncoderBlock, {}, None),
        (EncoderBlock, {"mask": MASK}, None),
        (
            EncoderBlock,
            {"encoder_hidden_states": MEMORY, "encoder_attention_mask": MASK[:, :4]},
            None,
        ),
        (ScalingEncoderBlock, {"mask": MASK}, None),
        (ScalingEncoderBlock, {"encoder_hidden_states": MEMORY}, "with encoder_hidden_states"),
        (JointEncoderBlock, {}, None),
        (
            JointEncoderBlock,
            {"encoder_hidden_states": MEMORY, "encoder_attention_mask": MASK[:, :4]},
            "is called with encoder_hidden_states",
        ),
        (ReturningEncoderBlock, {}, None),
        (FlagBlock, {"parallel": True}, None),
        (FlagBlock, {"parallel": 0}, r"layer 0 \(FlagBlock\) is called with parallel=False"),
        (FlagBlock, {}, "is called without parallel"),
        (DoubleFlagBlock, {}, None),
        (DoubleFlagBlock, {"parallel": None}, None),
        (DoubleFlagBlock, {"parallel": False}, "is called with parallel=False"),
        (TypeBlock, {"mask": MASK}, None),
        (TupleStepBlock, {}, None),
        (NumberBlock, {}, None),
        (NumberBlock, {"parallel": 0}, None),
        (NumberBlock, {"parallel": 1}, "is called with parallel=True"),
    ],
)
def test_a_call_computes_what_the_host_does_or_is_refused(block, arguments, message):
    plain = Model(block)
    model = crosslayer.connect(copy.deepcopy(plain), "prenorm")
    x = torch.randn(2, 5, DIM)
    if message is None:
        assert torch.equal(model(x, **arguments), plain(x, **arguments))
    else:
        with pytest.raises(ValueError, match=message):
            model(x, **arguments)


def test_a_factor_with_a_default_is_refused():
    with pytest.raises(ValueError, match="default of its argument 'gate', which multiplies an"):
        crosslayer.connect(Model(TensorDefaultBlock), "mudd")


def test_a_norm_with_matrices_is_the_norm_of_each_input():
    plain = Model(GatedNormBlock)
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    connection = model.layers[1].connections[0]
    assert connection.ports == ("q", "k", "v")
    x = torch.randn(2, 5, DIM)
    assert torch.equal(model(x), plain(x))
    model(x).sum().backward()
    owned = [norm for norm in connection.norms if any(p.dim() == 2 for p in norm.parameters())]
    assert len(owned) == 2, "k and v have norms of their own, with matrices"
    assert all(norm.gate.weight.grad is not None for norm in owned)


def test_a_model_with_any_number_of_arguments():
    plain = StarModel(Block)
    model = crosslayer.connect(copy.deepcopy(plain), "prenorm")
    x = torch.randn(2, 5, DIM)
    assert torch.equal(model(x, MASK), plain(x, MASK))
    assert torch.equal(model(x, None, True), plain(x, None, True))
    assert torch.equal(model(x, mask=MASK), plain(x, mask=MASK))
    for one in (plain, model):
        with pytest.raises(TypeError, match="'wrong'"):
            one(x, wrong=MASK)


def test_a_layer_that_sets_an_attribute_is_refused():
    with pytest.raises(ValueError, match=r"its own code sets attn\.last_length, and a connected"):
        crosslayer.connect(Model(CountingBlock), "mudd")
