"""A whole GPT in plain PyTorch on the four verbs: the model never writes `+` on the stream.

python examples/gpt.py "mudd(dilation=2)"        trains a tiny one on this file, byte by byte
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crosslayer


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = q if k is None else k, q if v is None else v
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, x in ((self.q, q), (self.k, k), (self.v, v))
        )
        return self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Parallel(nn.Module):
    """Attention and MLP side by side, as in GPT-J and Pythia: one sub-layer, whose last input is the MLP's."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attn, self.mlp = Attention(dim, heads), MLP(dim)

    def forward(self, *xs: Tensor) -> Tensor:
        return self.attn(*xs[:-1]) + self.mlp(xs[-1])


class Block(nn.Module):
    def __init__(self, sublayers: list[nn.Module], connections: list[crosslayer.Connection]):
        super().__init__()
        self.sublayers, self.connections = nn.ModuleList(sublayers), nn.ModuleList(connections)

    def forward(self, state):
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            inputs, state = connection.read(state)
            state = connection.write(state, sublayer(*inputs))
        return state


class GPT(nn.Module):
    """arm: any connection's string. Computes logits [B T vocab] from ids [B T]."""

    def __init__(
        self,
        arm="prenorm",
        vocab=256,
        dim=64,
        layers=4,
        heads=4,
        context=128,
        parallel=False,
        eps=1e-6,
    ):
        super().__init__()
        make = crosslayer.make(arm)
        sites = crosslayer.plan(layers, parallel)

        def norm(port: str) -> nn.Module:
            return nn.RMSNorm(dim, eps=eps)

        def sublayers() -> list[nn.Module]:
            return [Parallel(dim, heads)] if parallel else [Attention(dim, heads), MLP(dim)]

        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        # the body first, so that every arm starts from the same weights
        bodies = [sublayers() for _ in range(layers)]
        self.head = nn.Linear(dim, vocab, bias=False)
        self.blocks = nn.ModuleList(
            Block(body, [make(site, dim, norm) for site in sites if site.layer == layer])
            for layer, body in enumerate(bodies)
        )
        self.readout = make(sites[-1], dim, norm)
        self.checkpointing = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        state = self.readout.init(x)
        for block in self.blocks:
            state = (
                checkpoint(block, state, use_reentrant=False)
                if self.checkpointing
                else block(state)
            )
        return self.head(self.readout.readout(state))


def main(arm: str = "mudd", steps: int = 30) -> float:
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = GPT(arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - 65, (8, 1))
        batch = text[starts + torch.arange(65)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"{arm}  step {step + 1}  loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:2])
