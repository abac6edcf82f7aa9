"""Parameters, FLOPs, activation memory and memory traffic of a model, before it is trained.

The model is built and connected on the meta device. Its forward pass runs there under torch's FLOP
counter, which `flops.py` extends, and under hooks on the tensors that autograd saves. Attention is
fused, which saves no T × T weights.

The traffic is a formula, each method's `memory_traffic` and `backward_memory_traffic`: every site
moves `memory_traffic()` · D elements a token in the forward pass, and in the backward pass
`backward_memory_traffic()` · D. That is the least, if it is one kernel in each.
"""

import copy
import functools
import reprlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..connection import find_connections
from ..losses import next_token_loss
from ..spec import make
from ..validation import LARGEST_SIZE, check_positive, dtype_name
from .flops import flop_counter

aten = torch.ops.aten


class GPU(NamedTuple):
    """A GPU's peak rates, as its data sheet states them."""

    name: str
    device_name: str  # torch's; other boards with the same chip are slower
    bandwidth: float  # memory, bytes/s
    flops: float  # dense bf16, FLOP/s


GPUS = {
    "A100": GPU("A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", 2039e9, 312e12),
    "H100": GPU("H100 SXM", "NVIDIA H100 80GB HBM3", 3350e9, 989e12),
    "H200": GPU("H200 SXM", "NVIDIA H200", 4800e9, 989e12),
    "B200": GPU("B200", "NVIDIA B200", 8000e9, 2250e12),
}


class ModelCost(NamedTuple):
    """Cost of one training step of one model, for a batch of given size.

    Args:
        parameters: of the whole model.
        connection_parameters: of its connections alone.
        forward_flops: FLOPs of the forward pass.
        activation_bytes: bytes that the forward pass saves for the backward pass, without
            parameters.
        site_traffic: least memory traffic of each site's forward pass, in multiples of D
            elements per token.
        bytes_moved: least memory traffic of all sites, forward and backward, in bytes.
    """

    parameters: int
    connection_parameters: int
    forward_flops: int
    activation_bytes: int
    site_traffic: tuple[float, ...]
    bytes_moved: float


class Cost(NamedTuple):
    """Cost of a connection in a model, compared with the same model with pre-norm.

    Args:
        spec: the connection, for example "mudd(dilation=2)".
        model: cost of the model with this connection.
        baseline: cost of the same model with pre-norm.
    """

    spec: str
    model: ModelCost
    baseline: ModelCost

    @property
    def extra_parameters(self) -> float:
        """Parameters of the connections, as a share of all other parameters."""
        others = self.model.parameters - self.model.connection_parameters
        return self.model.connection_parameters / others

    @property
    def extra_flops(self) -> float:
        """FLOPs of the forward pass beyond the baseline's, as a share of the baseline's."""
        return self.model.forward_flops / self.baseline.forward_flops - 1

    @property
    def activation_ratio(self) -> float:
        """Activation memory, as a multiple of the baseline's."""
        return self.model.activation_bytes / self.baseline.activation_bytes

    def bandwidth_bound_seconds(self, gpu: GPU) -> float:
        """Least seconds a step, forward and backward, that the memory traffic takes."""
        return self.model.bytes_moved / gpu.bandwidth

    def extra_seconds(self, gpu: GPU) -> float:
        """The lower bound minus the baseline's, in seconds a step."""
        return self.bandwidth_bound_seconds(gpu) - self.baseline.bytes_moved / gpu.bandwidth

    def relative_slowdown(self, gpu: GPU) -> float:
        """`extra_seconds`, as a share of the baseline's FLOPs at the GPU's peak rate."""
        # A backward pass computes twice what its forward pass does.
        baseline_seconds = 3 * self.baseline.forward_flops / gpu.flops
        return self.extra_seconds(gpu) / baseline_seconds


def estimate_cost(
    spec: str, config: Any, batch: int, context: int, dtype: torch.dtype = torch.bfloat16
) -> Cost:
    """Estimate what a connection costs in a model, without allocating the model.

    Args:
        spec: the connection, for example "mudd(dilation=2)".
        config: a transformers configuration of a family that `connect` knows, for example from
            `crosslayer.hf.config.make_config`.
        batch: sequences a step on one GPU.
        context: tokens a sequence.
        dtype: dtype of the model and of its stream.

    Returns:
        The cost of the connected model and of the same model with pre-norm.

    Raises:
        ValueError: `spec` names no known connection or option, the family is unknown, a size is
            below 1, or the family's code does not run on the meta device. Mixtures of experts run
            there in bfloat16 alone.
    """
    return estimate_costs([spec], config, batch, context, dtype)[0]


def estimate_costs(
    specs: Sequence[str],
    config: Any,
    batch: int,
    context: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Cost]:
    """`estimate_cost` for several connections; the baseline is measured once.

    Args:
        specs: the connections.
        config, batch, context, dtype: as in `estimate_cost`.

    Returns:
        A cost for each connection.

    Raises:
        ValueError: as in `estimate_cost`, or a step has more than `LARGEST_SIZE` tokens.
    """
    check_step(config, batch, context)
    for spec in specs:  # before any is measured
        make(spec)

    @functools.cache
    def cost_of(spec: str) -> ModelCost:
        model = build_on_meta(spec, config, context, dtype)
        with cost_refusals(model):
            return measure_cost(model, batch, context)

    return [Cost(spec, cost_of(spec), cost_of("prenorm")) for spec in specs]


def check_step(config: Any, batch: int, context: int) -> None:
    """Raise a ValueError for what is no config of transformers, or no size of a step."""
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise ValueError(
            "config must be a configuration of transformers, like "
            f"crosslayer.hf.config.make_config('llama'), got {reprlib.repr(config)}"
        )
    check_positive(batch=batch, context=context)
    if batch * context > LARGEST_SIZE:
        raise ValueError(
            f"batch × context must be at most {LARGEST_SIZE:,} tokens, got {batch * context:,}"
        )


def cost_refusals(model: Any) -> AbstractContextManager[None]:
    """Errors of a model whose code does not run on the meta device, as a ValueError of one line."""
    from ..hf.config import host_refusals

    config, dtype = model.config, dtype_name(model.dtype)
    return host_refusals(f"the cost of {config.model_type} in {dtype} cannot be estimated")


def build_on_meta(spec: str, config: Any, context: int, dtype: torch.dtype) -> nn.Module:
    """A causal language model of `config` on the meta device, connected, with flash attention.

    Args:
        spec: the connection.
        config: a transformers configuration; it is not changed.
        context: tokens a sequence. A model with fewer positions gets as many.
        dtype: dtype of the model.
    """
    from transformers import AttentionInterface

    from ..hf import connect
    from ..hf.config import make_language_model

    # transformers builds no mask for an attention function it does not know, and passes None.
    AttentionInterface.register(_causal_attention.__name__, _causal_attention)
    config = copy.deepcopy(config)
    # The configuration of a connected model would build it with its own connection.
    vars(config).pop("crosslayer", None)
    # With a padding token a model would look for it in the values of the tokens, which meta tensors
    # have not.
    config.pad_token_id = None
    # Families without positions have no maximum.
    positions = getattr(config, "max_position_embeddings", context)
    config.max_position_embeddings = max(context, positions)
    with torch.device("meta"):
        model = make_language_model(
            config, attn_implementation=_causal_attention.__name__, dtype=dtype
        )
    return connect(model, spec)


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal fused attention: torch's choice on the meta device saves T × T weights."""
    heads_last = (x.transpose(1, 2) for x in (query, key, value))  # [B T H D]
    return _FusedAttention.apply(*heads_last, sliding_window), None


class _FusedAttention(Function):
    """A fused causal attention on the meta device: saves and allocates what the real kernel does.

    torch's efficient attention knows windows, and values of another width than queries. Its
    backward pass has no implementation for the meta device, so this one returns empty gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        out, logsumexp, *_ = aten._efficient_attention_forward(
            *(query, key, value),
            bias=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
            dropout_p=0.0,
            custom_mask_type=1,  # causal
            compute_log_sumexp=True,
            window_size=window,
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def measure_cost(model: nn.Module, batch: int, context: int) -> ModelCost:
    """Cost of one step of a connected language model, by a forward pass on its own device.

    Args:
        model: a connected transformers model.
        batch: sequences a step.
        context: tokens a sequence.
    """
    sites = find_connections(model)
    weight: Any = next(model.parameters())
    tokens = torch.zeros(batch, context + 1, dtype=torch.long, device=weight.device)
    with flop_counter() as counter:
        saved_bytes = activation_bytes(model, tokens)
    parameters, connection_parameters = count_parameters(model)
    forward_traffic = tuple(float(site.memory_traffic()) for site in sites)
    elements = sum(forward_traffic) + sum(site.backward_memory_traffic() for site in sites)
    # the sub-layers' inputs and their gradients are in the dtype of the model
    input_elements = 2 * sum(1 if site.is_readout else len(site.ports) for site in sites)
    stream_dtype = sites[0].stream_dtype or weight.dtype
    bytes_a_token = (elements - input_elements) * stream_dtype.itemsize
    bytes_a_token += input_elements * weight.element_size()
    return ModelCost(
        parameters=parameters,
        connection_parameters=connection_parameters,
        forward_flops=counter.get_total_flops(),
        activation_bytes=saved_bytes,
        site_traffic=forward_traffic,
        bytes_moved=bytes_a_token * sites[0].dim * batch * context,
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of parameters of the whole model, and of its connections alone."""
    total = sum(p.numel() for p in model.parameters())
    in_connections = sum(
        p.numel() for connection in find_connections(model) for p in connection.parameters()
    )
    return total, in_connections


def activation_bytes(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] = next_token_loss
) -> int:
    """Bytes that the forward pass of one step saves for the backward pass, without parameters.

    Args:
        model: any module.
        batch: what `loss` takes; tokens [B T+1] by default.
        loss: computes the loss of a batch.
    """
    # Storages are identified by themselves, because all meta tensors have the address 0. They are
    # kept alive here, so that no later storage takes the place of one that is counted.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        # Return nothing: a node that saved its own output through a hook would never be freed.

    parameters = _parameter_storages(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model, batch)
    parameters |= _parameter_storages(model)  # those that FSDP has gathered and still holds
    return sum(storage.nbytes() for key, storage in saved.items() if key not in parameters)


def _parameter_storages(model: nn.Module) -> set[int]:
    return {parameter.untyped_storage()._cdata for parameter in model.parameters()}
