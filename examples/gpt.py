"""A GPT in plain PyTorch whose residual connections are crosslayer's.

    python examples/gpt.py prenorm              # the usual residual connection
    python examples/gpt.py "mudd(dilation=2)"   # any other, by its name and options

It trains a tiny model on the bytes of this file, in seconds on a CPU. The model never adds
anything to a residual stream: the connections decide what each sub-layer reads and where its
output goes, and they own the norms. `crosslayer.Stack` is the loop of `GPT.forward` as a module.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosslayer


class Attention(nn.Module):
    """Causal self-attention without a norm and without a residual connection."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, x_k: Tensor | None = None, x_v: Tensor | None = None) -> Tensor:
        # Most connections give the attention one input. MUDD gives q, k and v one each.
        if x_k is None or x_v is None:
            x_k = x_v = x
        q = self.split_heads(self.q(x))
        k = self.split_heads(self.k(x_k))
        v = self.split_heads(self.v(x_v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """[B T D] -> [B heads T D/heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """Logits [B T vocab] of token ids [B T].

    Args:
        spec: a connection, like "mudd(dilation=2)".
    """

    def __init__(
        self,
        spec: str,
        vocab: int = 256,
        dim: int = 64,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(context, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

        # The sub-layers in the order of depth: attention, MLP, attention, MLP, ...
        self.sublayers = nn.ModuleList()
        for _ in range(layers):
            self.sublayers.append(Attention(dim, heads))
            self.sublayers.append(MLP(dim))

        # One connection in front of every sub-layer, and one at the end: the readout.
        make_connection = crosslayer.make(spec)
        self.connections = nn.ModuleList()
        for site in crosslayer.plan(layers):
            self.connections.append(make_connection(site, dim, lambda port: nn.RMSNorm(dim)))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.position(positions)

        state = self.connections[0].init(x)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=False):
            inputs, state = connection.read(state)  # normed inputs: one, or three for q, k and v
            state = connection.write(state, sublayer(*inputs))
        hidden = self.connections[-1].readout(state)  # after the final norm

        return self.head(hidden)


def main(spec: str = "mudd", steps: int = 30) -> float:
    """Train a tiny GPT on this file, byte by byte. Returns the last loss."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = GPT(spec)

    # Some connection parameters take no weight decay or a smaller learning rate: `param_groups`
    # knows which.
    groups = crosslayer.param_groups(model, lr=3e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)

    loss = torch.tensor(0.0)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - 65, (8, 1))
        batch = text[starts + torch.arange(65)]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"{spec}  step {step}  loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except ValueError as error:
        sys.exit(f"gpt: {error}")
