"""The two processes of tests/test_parallelism.py, in a module that can be spawned."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.testing.tiny_model import perturb_weights
from crosslayer.testing.two_ranks import gloo_rank

PAGE = Path(__file__).parent.parent / "docs" / "parallelism.md"
SPECS = ("prenorm", "denseformer", "mudd", "hyper", "mhc", "attnres", "mgr", "skip_gain", "altup")
DIM, HEADS, VOCAB, LAYERS = 32, 4, 64, 4

Gradients = dict[str, Tensor]


class Attention(nn.Module):
    """As torchtitan's: the sizes are those of q, which may have a part of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (z.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q * freqs, k * freqs, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """A host with torchtitan's names."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("freqs", torch.linspace(0.5, 1, DIM // HEADS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.freqs)
        return self.output(self.norm(x))


def host() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def decoder(spec: str) -> Decoder:
    return perturb_weights(crosslayer.connect(host(), spec), 0.05)  # type: ignore[return-value]


def tokens() -> Tensor:
    return torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(3))


def loss_of(logits: Tensor, _: Any = None) -> Tensor:
    return logits.float().square().mean()


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(model: nn.Module, ids: Tensor) -> Gradients:
    loss_of(model(ids)).backward()
    return gradients(model)


def functions_of_page() -> dict[str, Callable[..., Any]]:
    """What the Python blocks of docs/parallelism.md define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf8"), re.DOTALL):
        exec(block, names)
    return names


def tensor_parallel(spec: str, mesh: DeviceMesh, rank: int) -> tuple[Gradients, Gradients]:
    """A plan before `connect`, with the attention's second argument by position."""
    expected = train(decoder(spec), tokens())
    model = host()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in model.layers:
        plan = {f"attention.{name}": columns for name in ("wq", "wk", "wv")}
        plan |= {"feed_forward.w1": columns, "feed_forward.w3": columns}
        plan |= {"attention.wo": rows, "feed_forward.w2": rows}
        parallelize_module(layer, mesh, plan)
    crosslayer.connect(model, spec)
    perturbed = decoder(spec).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = perturbed[name]
            if hasattr(parameter, "placements"):
                value = torch.distributed.tensor.distribute_tensor(
                    value, mesh, parameter.placements
                )
            parameter.copy_(value)
    found = train(model, tokens())
    before = {name: gradient.clone() for name, gradient in found.items()}
    total = functions_of_page()["clip_gradients"](model, max_norm=1e-3)
    assert total > 1e-3
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, before[name] * (1e-3 / total))
    return before, expected


def sequence_parallel(spec: str, mesh: DeviceMesh, rank: int) -> tuple[Gradients, Gradients]:
    model = decoder(spec)
    functions = functions_of_page()
    functions["parallelize_sequence"](model, mesh)
    train(model, tokens())
    functions["add_up_gradients"](model, mesh)
    return gradients(model), train(decoder(spec), tokens())


def sequence_parallel_and_fsdp(
    spec: str, mesh: DeviceMesh, rank: int
) -> tuple[Gradients, Gradients]:
    """Norms and connections are distributed by FSDP2, and by no plan."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = decoder(spec)
    functions = functions_of_page()
    functions["parallelize_sequence"](model, both["tp"])
    for connection in find_connections(model):
        for module in (*connection.norms, connection):
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=both["dp"])
    for layer in model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    train(model, tokens())
    functions["add_up_gradients"](model, both["tp"])
    return gradients(model), train(decoder(spec), tokens())


def prepared_inputs(spec: str, mesh: DeviceMesh, rank: int) -> tuple[Gradients, Gradients]:
    """A hook on an attention gets its arguments as the host passes them."""
    model = decoder(spec)
    layouts = PrepareModuleInput(
        input_layouts=(Shard(1), None),
        desired_input_layouts=(Shard(1), None),
        use_local_output=True,
    )
    for layer in model.layers:
        if "q" not in layer.connections[0].ports:  # MUDD's has three inputs from layer 1 on
            parallelize_module(layer, mesh, {"attention": layouts})
    return train(model, tokens()), train(decoder(spec), tokens())


class Stage(nn.Module):
    """One of the equal parts of a connected model's layers, with their numbers."""

    def __init__(self, whole: Decoder, index: int, stages: int):
        super().__init__()
        self.is_first, self.is_last = index == 0, index == stages - 1
        if self.is_first:
            self.tok_embeddings = whole.tok_embeddings
        if self.is_last:
            self.norm, self.output = whole.norm, whole.output
        size = LAYERS // stages
        mine = range(index * size, (index + 1) * size)
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in mine})
        self.register_buffer("freqs", whole.freqs)
        with torch.no_grad():
            state: Any = whole.tok_embeddings(torch.zeros(1, 1, dtype=torch.long))
            for layer in whole.layers[: mine.start]:
                state = layer(state, whole.freqs)
        self.state_at_cut = state
        self.functions = functions_of_page()

    def forward(self, *received: Tensor) -> Any:
        if self.is_first:
            x: Any = self.tok_embeddings(*received)
        else:
            x = self.functions["join_state"](received, self.state_at_cut)
        for layer in self.layers.values():
            x = layer(x, self.freqs)
        return self.output(self.norm(x)) if self.is_last else self.functions["split_state"](x)


def pipeline(spec: str, mesh: DeviceMesh, rank: int) -> tuple[Gradients, Gradients]:
    whole = train(decoder(spec), tokens())
    stage = Stage(decoder(spec), rank, 2)
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=loss_of)
    if rank == 0:
        schedule.step(tokens())
    else:
        schedule.step(target=torch.zeros(4))
    return gradients(stage), {name: whole[name] for name, _ in stage.named_parameters()}


def zero_bubble_pipeline(spec: str, mesh: DeviceMesh, rank: int) -> tuple[Gradients, Gradients]:
    """Stages that pass on what they get, and gradients of weights after those of inputs."""
    whole = train(decoder(spec), tokens())
    model = decoder(spec)
    numbers = (0, 3) if rank == 0 else (1, 2)
    parts = [Stage(model, number, 4) for number in numbers]
    stages = [
        PipelineStage(part, number, 4, torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=loss_of)
    if rank == 0:
        schedule.step(tokens(), target=torch.zeros(4))
    else:
        schedule.step()
    mine = nn.ModuleList(parts).parameters()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return gradients(model), {names[p]: whole[names[p]] for p in mine}


class Mixer(FeedForward):
    """In the place of an attention: MUDD gives it an input for each of q, k and v."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(sum(inputs[1:], inputs[0]))


class StackedDecoder(nn.Module):
    def __init__(self, spec: str, **options: Any):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        sublayers = [kind() for _ in range(LAYERS) for kind in (Mixer, FeedForward)]
        self.stack = crosslayer.Stack(spec, sublayers, DIM, norm=nn.RMSNorm, **options)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.stack(self.embedding(ids)))


def stacked(spec: str, **options: Any) -> StackedDecoder:
    torch.manual_seed(0)
    return perturb_weights(StackedDecoder(spec, **options), 0.05)  # type: ignore[return-value]


def recomputed_in_groups(spec: str, mesh: DeviceMesh, rank: int) -> tuple[Gradients, Gradients]:
    """FSDP2, with a connection and its norms in one group, and states that are recomputed."""
    expected = train(stacked(spec), tokens())
    model = stacked(spec, recompute="streams")
    for connection in model.stack.connections:
        fully_shard(connection, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, tokens()[2 * rank : 2 * rank + 2]), expected


WAYS = (
    tensor_parallel,
    sequence_parallel,
    sequence_parallel_and_fsdp,
    prepared_inputs,
    pipeline,
    zero_bubble_pipeline,
    recomputed_in_groups,
)


def largest_error(found: Gradients, expected: Gradients) -> float:
    """The largest error of a gradient, relative to its norm.

    Of a tiny one, relative to a thousandth of the norm of all.
    """
    if found.keys() != expected.keys():
        return float("inf")
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    errors = [
        (whole[name] - g).norm() / torch.maximum(g.norm(), total / 1000)
        for name, g in expected.items()
    ]
    return torch.stack(errors).max().item()  # NaN where one is


def run_rank(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    with gloo_rank(rank, folder):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        errors = {}
        for way in WAYS:
            for spec in SPECS:
                errors[f"{way.__name__} {spec}"] = largest_error(*way(spec, mesh, rank))
        Path(folder, f"errors-{rank}.json").write_text(json.dumps(errors))
