"""What many tests share: every arm, a small model of it, and weights shaken off their initial values."""

from dataclasses import replace

import torch
from torch import nn

import crosslayer
from crosslayer.spec import default_options
from examples.gpt import GPT

ARMS = [
    arm
    for name in crosslayer.available()
    for arm in (name, *crosslayer.make(name).method.test_variants)
]


def without_eps(arm: str) -> str:
    """The arm with its own eps, where it has one, as good as zero."""
    factory = crosslayer.make(arm)
    return (
        str(replace(factory, options={**factory.options, "eps": 1e-300}))
        if "eps" in default_options(factory.method)
        else arm
    )


def gpt(
    arm: str, parallel: bool = False, layers: int = 4, eps: float = 1e-6, shaken: bool = True
) -> GPT:
    torch.manual_seed(1)
    model = GPT(
        arm, vocab=31, dim=12, layers=layers, heads=3, context=16, parallel=parallel, eps=eps
    )
    return shake(model) if shaken else model


def shake(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Move every weight, so that nothing hides behind an initial zero or one."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * scale)
    return model


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(3))


def loss_and_gradients(
    model: nn.Module, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(ids).logsumexp(-1).square().mean()
    loss.backward()
    return loss.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def connections(model: nn.Module) -> list[crosslayer.Connection]:
    return [m for m in model.modules() if isinstance(m, crosslayer.Connection)]
