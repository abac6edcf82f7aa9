"""What a connection says of itself: its mixing weights and its memory traffic."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import crosslayer
from crosslayer.testing.tiny_model import perturb_weights

from .shared import every_option, sublayer_output


class SublayerModule(nn.Module):
    """`sublayer_output` as a module of a `Stack`."""

    def __init__(self, k: int):
        super().__init__()
        self.k = k

    def forward(self, *inputs: Tensor) -> Tensor:
        return sublayer_output(self.k, inputs)


@every_option
def test_mixing_weights_are_those_of_the_read(spec, parallel):
    """Multiplied over depth, they give every input. A method need not have them."""
    pytest.importorskip("transformers")
    from crosslayer.inspect import unfold_connections

    if crosslayer.make(spec).method.mixing_weights is crosslayer.Connection.mixing_weights:
        pytest.skip("the method has no mixing_weights")
    sublayers = [SublayerModule(k) for k in range(6)]
    stack = perturb_weights(crosslayer.Stack(spec, sublayers, 6, parallel=parallel))
    unfolded = unfold_connections(stack, [{"embedding": torch.randn(2, 5, 6)}])
    assert unfolded.error < 2e-5
    assert len(unfolded.sources) == 7


@every_option
def test_memory_traffic_is_what_read_moves(spec, parallel):
    """At least the streams that `read` depends on and the inputs, at most these and all it returns.

    In multiples of D elements per token; one memory is counted once.
    """
    dim = 24  # more than any number of coefficients
    make = crosslayer.make(spec)
    sites = [make(site, dim, lambda port: nn.RMSNorm(dim)) for site in crosslayer.plan(4, parallel)]
    x = torch.randn(2, 3, dim)

    def streams(tree) -> list[Tensor]:
        return [
            leaf for leaf in tree_leaves(tree) if leaf is not None and leaf.numel() >= x.numel()
        ]

    def elements(tensors: list[Tensor]) -> float:
        """Of their memories; of each at most what it has, where views of it are used twice."""
        used: dict[int, float] = {}
        size: dict[int, float] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            memory = storage.data_ptr()
            size[memory] = storage.nbytes() / (x.numel() * x.element_size())
            used[memory] = used.get(memory, 0.0) + tensor.numel() / x.numel()
        return sum(min(used[memory], size[memory]) for memory in used)

    state = sites[0].init(x)
    for k, site in enumerate(sites):
        perturb_weights(site)
        state = tree_map(lambda t: t if t is None else t.detach().requires_grad_(), state)
        inputs, state_after = site.read(state)
        before = streams(state)
        new = [t for t in streams((inputs, state_after)) if not any(t is old for old in before)]
        gradients = torch.autograd.grad(
            sum(t.sum() for t in new), before, allow_unused=True, materialize_grads=False
        )
        used = [t for t, gradient in zip(before, gradients, strict=True) if gradient is not None]
        least = elements([*used, *inputs])
        most = elements(used) + elements(new)
        assert least <= site.memory_traffic() <= most, (
            f"memory_traffic() is {site.memory_traffic()} at site {k}, but `read` moves between "
            f"{least} and {most}"
        )
        traffic = site.memory_traffic()
        assert traffic / 2 <= site.backward_memory_traffic() <= 3 * traffic, f"backward at site {k}"
        if k < len(sites) - 1:
            state = site.write(state_after, sublayer_output(k, inputs).detach())
