"""What an arm costs before it is trained: parameters, FLOPs, activation memory, and the traffic no kernel can avoid.

    estimate("mudd", sized(layers=24, dim=2048, heads=16), batch=8, context=2048).floor(GPUS["H100"])   # seconds

Nothing is a formula of its own: the model is built and connected on the meta device and its forward pass is run there,
under torch's FLOP counter and with hooks on what autograd keeps. Only the floor is on paper, each method's `traffic`.

FLOPs: a multiplication or an addition is one, in matrix products and in weighted sums alike (MUDD, Eq. 15; HC, Table
8); norms, softmax and activations are left out, and causal attention is half of T². Memory: with flash attention.
Floor: every boundary moves `traffic` · D elements a token forward. Backward a single stream moves as much (the two
gradients and the norm's input are read, one gradient is written) and n streams 3n + 3 to the forward's 2n + 2. For
dense sources that same 1.5 is assumed: each is read again, and its gradient is written.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..connection import Connection, find_connections
from ..validation import check_positive

aten = torch.ops.aten


class GPU(NamedTuple):
    name: str
    bandwidth: float  # of its memory, bytes a second
    flops: float  # dense bf16, a second


GPUS = {
    "A100": GPU("A100 SXM 80GB", 2039e9, 312e12),
    "H100": GPU("H100 SXM", 3350e9, 989e12),
    "H200": GPU("H200 SXM", 4800e9, 989e12),
    "B200": GPU("B200", 8000e9, 2250e12),
}


class Measure(NamedTuple):
    """One forward pass of one model, the batch whole."""

    parameters: int
    own: int  # of them, the connections'
    flops: int  # forward
    activations: int  # bytes kept for the backward, without parameters
    traffic: tuple[float, ...]  # forward, a site: elements of D a token
    moved: float  # forward and backward, all sites: bytes


class Cost(NamedTuple):
    """An arm beside the same body with PreNorm."""

    arm: str
    model: Measure
    body: Measure

    @property
    def extra_parameters(self) -> float:
        """The connections' own, as a share of the body's parameters."""
        return self.model.own / (self.model.parameters - self.model.own)

    @property
    def extra_flops(self) -> float:
        """What the forward pass computes more than the body's, as a share of it."""
        return self.model.flops / self.body.flops - 1

    @property
    def memory(self) -> float:
        """Activations kept for the backward, relative to the body's."""
        return self.model.activations / self.body.activations

    def floor(self, gpu: GPU) -> float:
        """Seconds a step, forward and backward, that the connections' traffic takes at the least; PreNorm's too."""
        return self.model.moved / gpu.bandwidth

    def slowdown(self, gpu: GPU) -> float:
        """The floor beyond PreNorm's, as a share of the time the body's FLOPs take at the GPU's peak."""
        # a backward pass computes twice what its forward does
        return (self.floor(gpu) - self.body.moved / gpu.bandwidth) / (
            3 * self.body.flops / gpu.flops
        )


def estimate_cost(
    arm: str, body: Any, batch: int, context: int, dtype: torch.dtype = torch.bfloat16
) -> Cost:
    """What an arm costs on a body, a batch and a context, without building it.

    Args:
        arm: like "mudd(dilation=2)".
        body: a transformers configuration of a family `connect` knows; `sized` makes one.
        batch: sequences a step on one GPU.
        context: tokens a sequence.
        dtype: of the model and its stream.

    Raises:
        ValueError: the arm, an option, the family or a size is not as it should be.
    """
    return estimate_costs([arm], body, batch, context, dtype)[0]


def estimate_costs(
    arms: Sequence[str], body: Any, batch: int, context: int, dtype: torch.dtype = torch.bfloat16
) -> list[Cost]:
    """`estimate` of several arms, which measures the body with PreNorm once."""
    check_positive(batch=batch, context=context)
    once = functools.cache(
        lambda arm: measure_cost(build_on_meta(arm, body, context, dtype), batch, context)
    )
    return [Cost(arm, once(arm), once("prenorm")) for arm in arms]


def build_on_meta(arm: str, body: Any, context: int, dtype: torch.dtype) -> nn.Module:
    from transformers import AttentionInterface, AutoModelForCausalLM

    from ..hf import connect

    # a kernel without a mask of its own in transformers is asked for none, and causal
    AttentionInterface.register(attention.__name__, attention)
    config = copy.deepcopy(body)
    vars(config).pop(
        "crosslayer", None
    )  # of a connected model, which would be built with its connection
    config.pad_token_id = None  # a host would look for it in tokens that are not there
    config.max_position_embeddings = max(context, config.max_position_embeddings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.__name__, dtype=dtype
        )
    return connect(model, arm)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention by its fused kernel: on the meta device torch would choose the one that keeps T × T weights."""
    out = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=scaling
    )[0]
    return out.transpose(1, 2).contiguous(), None


def measure_cost(model: nn.Module, batch: int, context: int) -> Measure:
    """One step's forward pass of a connected model, on whatever device it is."""
    sites = find_connections(model)
    weights: Any = next(model.parameters())
    ids = torch.zeros(batch, context + 1, dtype=torch.long, device=weights.device)
    with flop_counter() as count:
        kept = activation_bytes(model, ids)
    traffic = tuple(float(site.memory_traffic()) for site in sites)
    elements = sum(t + backward(site) for site, t in zip(sites, traffic, strict=True))
    return Measure(
        *count_parameters(model),
        count.get_total_flops(),
        kept,
        traffic,
        elements * sites[0].dim * weights.element_size() * batch * context,
    )


def backward(site: Connection) -> float:
    """`traffic` of the backward pass; what moves no more than a single stream is taken for one."""
    forward = site.memory_traffic()
    return forward if forward <= Connection.memory_traffic(site) else 1.5 * forward


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Of the whole model, and what its connections added."""
    total = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for m in find_connections(model) for p in m.parameters())
    return total, own


def language_model_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def activation_bytes(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] = language_model_loss
) -> int:
    """What the forward pass of one step keeps for the backward, its parameters not counted."""
    # by the storage itself: all meta tensors have the address 0; and held, so that none is seen twice
    own, kept = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        # nothing is handed to the graph: an output that its own node held this way would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(model, batch)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


def flop_counter() -> FlopCounterMode:
    """torch's FLOP counter, which alone knows matrix products, with the connections' weighted sums."""
    return FlopCounterMode(display=False, custom_mapping=FLOPS)


def per_element(flops: int) -> Callable[..., int]:
    """The formula of an operation with so many FLOPs an element of its output."""
    return lambda *shapes, out_shape, **_: flops * out_shape.numel()


def difference(a: torch.Size, b: Any, *_: Any, out_shape: torch.Size, **__: Any) -> int:
    """A row less one number, its mean, is a norm's."""
    centres = isinstance(b, torch.Size) and b[-1:] == (1,) != out_shape[-1:]
    return 0 if centres else out_shape.numel()


def matrix_vector(matrix: torch.Size, vector: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def attention_of(place: int) -> Callable[..., int]:
    """The formula of a fused attention, whose argument after q, k and v at this place says whether it is causal."""

    def flops(query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **_: Any) -> int:
        causal = len(rest) > place and rest[place]
        return sdpa_flop_count(query, key, value) // (2 if causal else 1)

    return flops


FLOPS = {
    **{op: per_element(1) for op in (aten.add, aten.add_, aten.mul, aten.mul_)},
    **{op: per_element(2) for op in (aten.addcmul, aten.addcmul_)},
    aten.sub: difference,
    aten.lerp: per_element(3),
    aten.mv: matrix_vector,
    aten._scaled_dot_product_flash_attention_for_cpu: attention_of(1),
    aten._scaled_dot_product_flash_attention: attention_of(1),
    aten._scaled_dot_product_efficient_attention: attention_of(3),
    aten._scaled_dot_product_cudnn_attention: attention_of(3),
}


HEAD = (
    "arm", "parameters", "extra", "forward GFLOPs", "extra", "activations", "traffic", "floor, ms", "beyond PreNorm",
)  # fmt: skip


def cells(cost: Cost, gpu: GPU) -> list[str]:
    """A row of the table, as `HEAD` names it."""
    return [
        cost.arm,
        f"{cost.model.parameters:,}",
        f"{cost.extra_parameters:.3%}",
        f"{cost.model.flops / 1e9:,.0f}",
        f"{cost.extra_flops:.2%}",
        f"{cost.memory:.2f}×",
        f"{sum(cost.model.traffic):g}",
        f"{1e3 * cost.floor(gpu):.2f}",
        f"{1e3 * (cost.floor(gpu) - cost.body.moved / gpu.bandwidth):+.2f} ms, {cost.slowdown(gpu):+.1%}",
    ]


def legend(cost: Cost, gpu: GPU) -> str:
    return (
        f"A step of one {gpu.name} at {gpu.bandwidth / 1e9:,.0f} GB/s and {gpu.flops / 1e12:,.0f} bf16 TFLOP/s, whose "
        f"FLOPs take PreNorm {3e3 * cost.body.flops / gpu.flops:,.1f} ms at the least. Traffic: elements of D a token, "
        "forward, summed over depth. Floor: the time it takes, forward and backward; no kernel is faster. Activations: "
        f"kept for the backward by the reference implementation, PreNorm's {cost.body.activations / 2**30:,.1f} GiB."
    )
