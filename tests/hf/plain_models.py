"""Models of plain torch, with nanoGPT's names and layout, that tests change."""

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 32
HEADS = 4


class CausalSelfAttention(nn.Module):
    """Named and built as nanoGPT's."""

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj = nn.Linear(DIM, DIM)
        self.resid_dropout = nn.Dropout(0.1)
        self.n_embd = DIM

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        qkv = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, DIM)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(DIM)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(DIM, 4 * DIM), gelu=nn.GELU(), c_proj=nn.Linear(4 * DIM, DIM)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


LISTS: dict[str, Callable[[list[nn.Module]], Any]] = {
    "list": nn.ModuleList,
    "dict": lambda blocks: nn.ModuleDict({str(i): block for i, block in enumerate(blocks)}),
    "sequence": lambda blocks: nn.Sequential(*blocks),
    "sequence of names": lambda blocks: nn.Sequential(
        OrderedDict((f"layer_{i}", block) for i, block in enumerate(blocks))
    ),
    "sequence with a norm": lambda blocks: nn.Sequential(*blocks, nn.LayerNorm(DIM)),
}


class GPT(nn.Module):
    """A GPT with tied embeddings and nanoGPT's names. kind: of its list of layers."""

    def __init__(self, kind: str = "list"):
        super().__init__()
        self.config = SimpleNamespace(n_embd=DIM, block_size=16)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(50, DIM),
                "wpe": nn.Embedding(16, DIM),
                "h": LISTS[kind]([Block() for _ in range(3)]),
                "ln_f": nn.LayerNorm(DIM),
            }
        )
        self.lm_head = nn.Linear(DIM, 50, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1]))
        if isinstance(parts.h, nn.Sequential):
            return self.lm_head(parts.ln_f(parts.h(x)))
        for block in parts.h.values() if isinstance(parts.h, nn.ModuleDict) else parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


def nanogpt_module() -> Any:
    """In the place of nanoGPT's model.py, from which a page imports."""
    return SimpleNamespace(GPT=lambda config: GPT(), GPTConfig=object)


def make_ids() -> Tensor:
    return torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


class FactorBlock(nn.Module):
    """A block that multiplies what its sub-layers return. `factor` is one of `FACTORS`."""

    def __init__(self, number: int, factor: Any):
        super().__init__()
        self.number, self.factor = number, factor
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attn, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.alpha = nn.Parameter(torch.tensor(0.3 + number))
        self.gains = nn.Parameter(torch.rand(1, 1, DIM))
        self.register_buffer("share", torch.tensor(0.5 + number))
        self.setting = {"factor": 1 + number}
        self._private = np.float32(1 + number)
        self.config = SimpleNamespace(factor=1 + number)
        self.attn.factor = 1 + number
        self.register_buffer("depth", torch.tensor(1 + number))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.factor(self, self.attn(self.norms[0](x)))
        return x + self.factor(self, self.mlp(self.norms[1](x)))


class FactorModel(nn.Module):
    def __init__(self, factor: Any, order: Any = lambda layers: layers):
        super().__init__()
        self.order = order
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(FactorBlock(number, factor) for number in range(4))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.order(self.layers):
            x = layer(x)
        return self.norm(x)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


FACTORS = {
    "one learned number": lambda block, y: block.alpha * y,
    "learned, one a channel": lambda block, y: block.gains * y,
    "by depth": lambda block, y: y / (block.number + 1),
    "by parity": lambda block, y: y if block.number % 2 else y / 2,
    "a setting": lambda block, y: y * block.setting["factor"],
    "a private number": lambda block, y: y * float(block._private),
    "of a config": lambda block, y: y * block.config.factor,
    "of a module": lambda block, y: y * block.attn.factor,
    "a buffer": lambda block, y: block.share * y,
    "a whole number as a buffer": lambda block, y: y / block.depth,
    "dropout": lambda block, y: F.dropout(y, 0.1, block.training),
}


def output_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)  # of dropout
    output = model(make_ids())
    output[..., 0].sum().backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def model_of(block: type[Block]) -> GPT:
    model = GPT()
    model.transformer["h"] = nn.ModuleList(block() for _ in range(2))
    return model.eval()
