"""Separate inputs for q, k and v: how an attention's projections are found."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import crosslayer
from crosslayer.hf.families import FUSED_PROJECTIONS, FusedQKV
from crosslayer.hf.projections import find_projections
from crosslayer.hf.qkv import FusedLinear, FusedProjection
from tests.hf.plain_models import DIM, GPT, Block, CausalSelfAttention, make_ids
from tests.support.split_inputs import check_split_inputs


def test_another_class_of_the_same_name_has_one_input():
    """Its q, k and v cannot be told, so MUDD mixes one input for it."""
    model = GPT()
    for block in model.transformer.h:
        block.attn.c_attn = nn.Linear(DIM, 2 * DIM)
    crosslayer.connect(model, "mudd")
    assert model.transformer.h[1].connections[0].ports == ("mixer",)


@torch.no_grad()
def test_gpt_2_has_as_many_keys_as_queries_whatever_its_config_says_of_others():
    config = GPT2Config(n_embd=DIM, n_layer=2, n_head=4, vocab_size=64, num_key_value_heads=2)
    model = GPT2LMHeadModel(config).eval()
    expected = model(make_ids()).logits
    assert torch.equal(crosslayer.connect(model, "mudd")(make_ids()).logits, expected)


def test_q_k_and_v_of_nanogpt():
    attention = CausalSelfAttention()
    check_split_inputs(attention, lambda x: attention.c_attn(x).split(DIM, dim=2), DIM)


class NamedAttention(nn.Module):
    """An attention whose name in the layer says nothing; `shared`: k and v are one projection."""

    def __init__(self, shared: bool):
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.v_proj = self.k_proj if shared else nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class NamedBlock(Block):
    def __init__(self, shared: bool):
        super().__init__()
        self.attn = None
        self.moe_of_heads = NamedAttention(shared)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.moe_of_heads(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@pytest.mark.parametrize("shared", [False, True])
def test_an_attention_is_known_by_its_projections(shared):
    """Not by its name. Where one projection is k and v, it has one input."""
    model = GPT()
    model.transformer.h = nn.ModuleList(NamedBlock(shared) for _ in range(2))
    crosslayer.connect(model, "mudd")
    ports = model.transformer.h[1].connections[0].ports
    assert ports == (("mlp",) if shared else ("q", "k", "v"))


class HelpedAttention(NamedAttention):
    def first(self, x: Tensor) -> Tensor:
        return x[:1]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        y = self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return y + self.first(x)[0].mean()


def test_a_method_that_uses_the_input_has_one_input():
    plain = GPT()
    for block in plain.transformer.h:
        block.attn = HelpedAttention(shared=False)
    plain.eval()
    with pytest.warns(UserWarning, match="one input for q, k and v"):
        model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))


class LoopedAttention(NamedAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_projections_that_cannot_be_separated_are_named():
    """`mudd` would mix inputs for q, k and v. Other connections and ways do not."""
    model = GPT()
    for block in model.transformer.h:
        block.attn = LoopedAttention(shared=False)
    with pytest.warns(UserWarning, match=r"one input for q, k and v \(LoopedAttention does more"):
        crosslayer.connect(copy.deepcopy(model), "mudd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crosslayer.connect(copy.deepcopy(model), "hyper")
        crosslayer.connect(model, "mudd(ways='qkvr')")


class WrappedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def attention_without_sizes() -> nn.Module:
    """Of the class of a known projection, without the attribute that says how many are for q."""
    attention = CausalSelfAttention()
    del attention.n_embd
    return attention


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (lambda: JointAttention(), "JointAttention.qkv may compute all three, in an order that"),
        (attention_without_sizes, "CausalSelfAttention.c_attn may compute all three, in an order"),
        (WrappedAttention, "WrappedAttention contains an nn.MultiheadAttention, which must be"),
    ],
)
def test_a_joint_projection_that_is_not_known_is_named(attention, reason):
    model = GPT()
    for block in model.transformer.h:
        block.attn = attention()
    with pytest.warns(UserWarning, match=rf"one input for q, k and v \({reason}"):
        crosslayer.connect(model, "mudd")
    assert model.transformer.h[1].connections[0].ports == ("mixer",)


class JointAttention(nn.Module):
    """With one projection to q, k and v, of which `connect` has no row."""

    def __init__(self):
        super().__init__()
        self.dim = DIM
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(module, x: Tensor) -> Tensor:
        q, k, v = module.qkv(x).chunk(3, -1)
        return module.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class CopyingAttention(JointAttention):
    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        return super().forward(x)


class RenamingAttention(JointAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.training:
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            x = (q @ k.mT).tril() @ v
        return self.out(x)


class ProjectingAttention(JointAttention):
    """What it projects to q, k and v is no longer its input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = self.out(x)
            x = self.q_proj(x) + self.k_proj(x) + self.v_proj(x)
        else:
            x = self.out(x)
        return x


class SummingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.activate = torch.tanh

    def add(self, x: Tensor) -> Tensor:
        return self.q_proj(x) + self.k_proj(x) + self.v_proj(x)


class PartlyReplacingAttention(SummingAttention):
    def forward(self, x: Tensor) -> Tensor:
        y = self.add(x)
        if self.training:
            x = y
        return y + x


class ComparingAttention(SummingAttention):
    def forward(self, x: Tensor) -> Tensor:
        y = self.add(x)
        if x.sum() > 0:
            x = y
        else:
            x = -y
        return x


class MultiplyingAttention(SummingAttention):
    def forward(self, x: Tensor) -> Tensor:
        y = self.add(x)
        x = x * y
        return 2 * x


class ActivatingAttention(SummingAttention):
    def forward(self, x: Tensor) -> Tensor:
        return self.add(x) + self.activate(x)


class InnerFunctionAttention(SummingAttention):
    def forward(self, x: Tensor) -> Tensor:
        def double(x: Tensor) -> Tensor:
            return 2 * x

        return double(self.add(x))


class CheckpointedAttention(SummingAttention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.add, x, use_reentrant=False)


class Conv1DAttention(JointAttention):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Conv1D(3 * DIM, DIM)


ROWS = {
    "three of the width": (JointAttention, lambda each: FusedQKV(1, (DIM,) * 3), ""),
    "a name that is used again": (RenamingAttention, lambda each: FusedQKV(1, (DIM,) * 3), ""),
    "two of the width": (
        JointAttention,
        lambda each: FusedQKV(1, (DIM,) * 2),
        "describes 64 outputs, and the projection has 96",
    ),
    "half of the width, of transformers' Conv1D": (
        Conv1DAttention,
        lambda each: FusedQKV(1, (DIM // 2,) * 3),
        "describes 48 outputs, and the projection has 96",
    ),
    "a typing error": (JointAttention, lambda each: FusedQKV(1, (each.dimm,) * 3), "'dimm'"),
    "another forward": (
        CopyingAttention,
        lambda each: FusedQKV(1, (DIM,) * 3),
        "the forward of CopyingAttention must call self.qkv on its unchanged input",
    ),
}


def test_a_projection_whose_class_adds_no_forward_computes_its_share():
    """As torchtitan's `Linear`. Another class is called once for each of q, k and v."""

    class Linear(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for linear, kind in ((Linear, FusedLinear), (Doubled, FusedProjection)):
        model = GPT()
        for block in model.transformer.h:
            block.attn.c_attn = linear(DIM, 3 * DIM)
        crosslayer.connect(model, "mudd")
        assert type(model.transformer.h[1].attn.c_attn).__mro__[1] is kind


def test_projections_of_what_replaces_the_input_are_not_those_of_the_input():
    assert find_projections(ProjectingAttention()) == ((), None)


@pytest.mark.parametrize(
    ("attention", "is_separate"),
    [
        (PartlyReplacingAttention, False),
        (ComparingAttention, False),
        (MultiplyingAttention, False),
        (ActivatingAttention, False),
        (InnerFunctionAttention, True),
        (CheckpointedAttention, True),
    ],
)
def test_what_else_an_attention_does_with_its_input(attention, is_separate):
    names = ("q_proj", "k_proj", "v_proj") if is_separate else ()
    assert find_projections(attention()) == (names, None)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_a_fused_projection_is_used_or_refused(row, monkeypatch):
    attention, order, message = ROWS[row]
    monkeypatch.setitem(FUSED_PROJECTIONS, f"{attention.__name__}.qkv", order)
    model = GPT()
    for block in model.transformer.h:
        block.attn = attention()
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            crosslayer.connect(model, "mudd")
    else:
        crosslayer.connect(model, "mudd")
        assert model.transformer.h[1].connections[0].ports == ("q", "k", "v")
