"""Every spec, a small model of it, and perturbed weights: what the laws and other tests use."""

import inspect
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crosslayer
from crosslayer.methods import find_method
from crosslayer.spec import default_options


def _needs_options(name: str) -> bool:
    return inspect.Parameter.empty in default_options(find_method(name)).values()


# Every connection with its default options, if all options have defaults; and every variant that
# its class names.
DEFAULT_SPECS = [name for name in crosslayer.available() if not _needs_options(name)]
TESTED_VARIANTS = [
    spec for name in crosslayer.available() for spec in find_method(name).test_variants
]
TESTED_SPECS = DEFAULT_SPECS + TESTED_VARIANTS


class Attention(nn.Module):
    """Causal attention with inputs of their own for q, k and v."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, x_k: Tensor | None = None, x_v: Tensor | None = None) -> Tensor:
        if x_k is None or x_v is None:
            x_k = x_v = x
        projected = (self.q(x), self.k(x_k), self.v(x_v))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    """A feed-forward network of four times the width, [B T D] -> [B T D]."""

    def __init__(self, dim: int):
        up = nn.Linear(dim, 4 * dim, bias=False)
        down = nn.Linear(4 * dim, dim, bias=False)
        super().__init__(up, nn.GELU(), down)


class Block(nn.Module):
    """A layer: a connection before each of its sub-layers."""

    def __init__(self, sublayers: list[nn.Module], connections: list[crosslayer.Connection]):
        super().__init__()
        self.sublayers = nn.ModuleList(sublayers)
        self.connections = nn.ModuleList(connections)

    def forward(self, state):
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            inputs, state = connection.read(state)
            state = connection.write(state, sublayer(*inputs))
        return state


class ParallelSublayer(nn.Module):
    """Attention and MLP of a parallel block (GPT-J, Pythia): one sub-layer of both."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attn = Attention(dim, heads)
        self.mlp = MLP(dim)

    def forward(self, *inputs: Tensor) -> Tensor:
        *attention_inputs, mlp_input = inputs
        return self.attn(*attention_inputs) + self.mlp(mlp_input)


class TinyGPT(nn.Module):
    """A GPT in blocks, which can be parallel, checkpointed and sharded. Ids [B T] below 31."""

    def __init__(self, spec: str, parallel: bool, layers: int, eps: float):
        super().__init__()
        vocab = 31
        dim = 12
        heads = 3
        context = 16
        make_connection = crosslayer.make(spec)
        sites = crosslayer.plan(layers, parallel)

        def norm(port: str) -> nn.Module:
            return nn.RMSNorm(dim, eps=eps)

        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList()
        for layer in range(layers):
            sublayers = [Attention(dim, heads), MLP(dim)]
            if parallel:
                sublayers = [ParallelSublayer(dim, heads)]
            layer_sites = [site for site in sites if site.layer == layer]
            connections = [make_connection(site, dim, norm) for site in layer_sites]
            self.blocks.append(Block(sublayers, connections))
        self.readout = make_connection(sites[-1], dim, norm)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.checkpointing = False

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.position(torch.arange(ids.shape[1]))

    def forward(self, ids: Tensor) -> Tensor:
        state = self.readout.init(self.embed_tokens(ids))
        for stage in (*self.blocks, self.readout.readout):
            if self.checkpointing:
                state = checkpoint(stage, state, use_reentrant=False)
            else:
                state = stage(state)
        return self.head(state)


def tiny_gpt(
    spec: str, parallel: bool = False, layers: int = 4, eps: float = 1e-6, perturbed: bool = True
) -> TinyGPT:
    """A small model from fixed weights.

    Args:
        spec: of its connections.
        parallel: whether attention and MLP of a layer read the same state.
        layers: the number of layers.
        eps: of all norms.
        perturbed: whether every weight is perturbed, as by training.
    """
    torch.manual_seed(1)
    model = TinyGPT(spec, parallel, layers, eps)
    return perturb_weights(model) if perturbed else model


def without_eps(spec: str) -> str:
    """The spec with its own eps, where it has one, practically zero."""
    parsed = crosslayer.make(spec)
    if "eps" not in default_options(parsed.method):
        return spec
    return str(replace(parsed, options={**parsed.options, "eps": 1e-300}))


def perturb_weights(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Perturb every weight, so that no error hides behind an initial zero or one."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)  # the same on every device
            p.add_(noise.to(p.device) * scale)
    return model


def token_ids(batch: int = 2, length: int = 7) -> Tensor:
    """Token ids of the small model's vocabulary, [batch length]; always the same."""
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(3))


def loss_and_gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss to which all logits contribute, and the gradients of the parameters by name."""
    model.zero_grad()
    loss = model(ids).logsumexp(-1).square().mean()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def equal_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether both have the same names, each with the same dtype and bitwise the same values."""
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def wrong_gradients(
    gradients: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float = 1e-3,
    floor: float = 1e-4,
) -> dict[str, float]:
    """The gradients with an error of `tolerance` or more, as a share of the parameter's largest.

    Where that largest value is less than `floor`, as a share of `floor`: some gradients are
    rounding alone. The error is infinite where one side lacks the parameter, and NaN where a
    gradient has NaN.
    """
    errors = dict.fromkeys(gradients.keys() ^ expected.keys(), float("inf"))
    for name in gradients.keys() & expected.keys():
        largest = expected[name].abs().max().clamp_min(floor)
        errors[name] = ((gradients[name] - expected[name]).abs().max() / largest).item()
    return {name: error for name, error in errors.items() if not error < tolerance}
