"""A Transformer is a row of sites along depth; at each, a connection decides what is read and where output goes.

    y_0 ──► site 0 ──► attention ──► site 1 ──► mlp ──► … ──► site `depth`: the readout
             read                     write(y_1), read                write(y_S), read

Depth is the only axis a connection knows: every token is alone, so a connection is causal by construction and needs no
cache when decoding. A whole model, in anyone's code:

    state = sites[0].init(embed(tokens))
    for connection, sublayer in zip(sites, sublayers):
        inputs, state = connection.read(state)
        state = connection.write(state, sublayer(*inputs))
    hidden = sites[-1].readout(state)

Axes: B batch, T token, D width, L sources, C ways, n streams.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .ops import Following, runs
from .roles import kind

State = Any  # a NamedTuple of tensors (the first of them never None), tuples and None; opaque but to its method
Choice = TypeVar("Choice")
Norm = Callable[[str], nn.Module]  # port -> the norm of what that port reads
# norms that kernels can take along: what they name their eps, and whether they subtract the mean
KNOWN: dict[type, tuple[str, bool]] = {nn.RMSNorm: ("eps", False), nn.LayerNorm: ("eps", True)}
HALF = (torch.bfloat16, torch.float16)


class Site(NamedTuple):
    """A place along depth where a sub-layer runs; the last one is the readout."""

    index: int  # type: ignore[assignment]  # 0 .. depth
    layer: int  # the Transformer layer it belongs to; the number of layers at the readout
    ports: tuple[str, ...]  # ("attn",) | ("mlp",) | ("attn", "mlp") in a parallel block | ("out",)
    opens: bool  # first site of its layer
    closes: bool  # last site of its layer
    depth: int  # index of the readout, which is the number of sub-layers


def plan(layers: int, parallel: bool = False) -> list[Site]:
    """The sites of a model with `layers` layers of attention and MLP, one after the other or in parallel."""
    if layers < 1:
        raise ValueError(f"plan: layers must be at least 1, got {layers}")
    sublayers = [("attn", "mlp")] if parallel else [("attn",), ("mlp",)]
    depth = layers * len(sublayers)
    sites = [
        Site(layer * len(sublayers) + i, layer, ports, i == 0, i == len(sublayers) - 1, depth)
        for layer in range(layers)
        for i, ports in enumerate(sublayers)
    ]
    return [*sites, Site(depth, layers, ("out",), True, True, depth)]


class Connection(nn.Module):
    """What every method is: four verbs on an immutable state.

    `init(x) -> state`, `read(state) -> inputs, state`, `write(state, y) -> state`, `readout(state) -> hidden`.

    A write is lazy: it records y, and the next site's read applies it. A method therefore says two things: how its
    state begins (`begin`) and how the next inputs come out of it (`gather`). Nothing is ever stored on the module in
    forward, so a state survives checkpointing, re-entry, `deepcopy` and a pipeline cut. A parameter never travels in
    the state (a clone may): FSDP frees it as soon as its block is done.

    Args:
        site: where this connection sits.
        dim: D, the width of the stream.
        norm: makes, or finds in the host model, the norm of a port.
        ports: the tensors the sub-layer is given, `site.ports` unless the method feeds q, k and v apart.

    A connection's own parameters are raw, at least 1-d (FSDP2 refuses 0-d), and float32, or float64 in a float64 model.
    """

    starts_as_prenorm: ClassVar[bool] = True  # at initialisation it computes what PreNorm does, up to the norms' eps
    scales: ClassVar[bool] = False  # ... for norms undo a factor on what sub-layers read at the start
    renorms: ClassVar[bool] = False  # the norms before sub-layers norm its streams: nothing without them
    variants: ClassVar[tuple[str, ...]] = ()  # arms beside the default that the suite of laws must cover
    decayed: ClassVar[frozenset[str]] = frozenset()  # own parameters that take weight decay; the others take none
    lr_factors: ClassVar[dict[str, float]] = {}  # own parameters whose learning rate is a multiple of the model's
    weighs: ClassVar[tuple[str, ...]] = ()  # fields of its state that weigh the pending write
    fuses: bool = False  # its `gather` takes the norms of its ports along
    stream_dtype: torch.dtype | None = None  # of the streams; the embedding's where None. Every arm has it as an option

    def __init__(self, site: Site, dim: int, norm: Norm, ports: tuple[str, ...] | None = None):
        super().__init__()
        self.site, self.dim, self.ports = site, dim, ports or site.ports
        # forward branches on booleans alone: an integer that differs between layers would be a graph per layer
        self.opens, self.last = site.opens, site.index == site.depth
        self.norms = nn.ModuleList(norm(port) for port in self.ports)

    def reset_parameters(self) -> None:
        """Put the connection's own parameters (not its norms) at the method's initial values."""

    def init(self, x: Tensor) -> State:
        """The state of an empty model. x: the embedding y_0, [B T D]."""
        return self.begin(self.streamed(x))

    def begin(self, x: Tensor) -> State:
        """The state before the first sub-layer, given the embedding in the streams' dtype."""
        raise NotImplementedError

    def gather(self, state: State) -> tuple[tuple[Tensor, ...], State]:
        """Absorb the pending write and mix: what the ports read before their norms, one for all or one each.

        Where the method `fuses` it is also given the ports' norms, as `*norms`, and what the ports read is normed then.
        """
        raise NotImplementedError

    def read(self, state: State) -> tuple[tuple[Tensor, ...], State]:
        """The sub-layer's inputs, one [B T D] a port, and the state to write to. Pure: recomputing it is safe."""
        with as_written(state):
            if norms := self.following(state):
                return self.gather(state, *norms)
            xs, state = self.gather(state)
            return self.feed(*xs), state

    def following(self, state: State) -> tuple[Following, ...]:
        """The norms of the ports that kernels take along; none where they run as modules."""
        return self.known() if self.fuses and runs(tree_leaves(state)[0]) else ()

    def known(self) -> tuple[Following, ...]:
        """The norms of the ports as ops take them, or none: all or no port's.

        None where two ports read one tensor, which a parallel block norms twice.
        """
        alone = len(self.ports) == 1 or len(self.ports) > len(self.site.ports)
        norms = [following(norm) for norm in self.norms] if alone and self.stream_dtype is None else []
        return tuple(norm for norm in norms if norm) if all(norms) else ()

    def forward(self, state: State) -> tuple[tuple[Tensor, ...], State]:
        """`read`, as a module is called: for those who hook modules, to offload or shard parameters say."""
        return self.read(state)

    def hidden(self, state: State) -> Tensor:
        """What the sub-layer's first port reads before its norm, [B T D]: the model's hidden state at this depth."""
        with as_written(state):
            return self.gather(state)[0][0]

    def write(self, state: State, y: Tensor) -> State:
        """Record y, the sub-layer's output [B T D]; the next read applies it."""
        return state._replace(y=self.streamed(y))

    def readout(self, state: State) -> Tensor:
        """The hidden state [B T D] that the head reads, after the final norm."""
        return self(state)[0][0]

    def traffic(self) -> float:
        """What this site's read, with the write it absorbs, must move in a forward pass at the least.

        In elements of D a token. Here that of a single stream: it and y are read, it and the normed inputs written.
        """
        if not self.site.index:  # the embedding is in memory, and there is no y
            return 1 + len(self.site.ports)
        return (2 if self.last else 3) + len(self.site.ports)

    def feed(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Norm what the sub-layer reads: a tensor a port, or one tensor for all."""
        xs = xs if len(xs) > 1 else xs * len(self.norms)
        if self.stream_dtype is not None:  # the sub-layers go on in their own
            xs = tuple(x.to(dtype_of(norm, x.dtype)) for norm, x in zip(self.norms, xs, strict=True))
        # a norm kept wider than its body does not widen what the sub-layer reads
        return tuple(norm(x).to(x.dtype) for norm, x in zip(self.norms, xs, strict=True))

    def streamed(self, x: Tensor) -> Tensor:
        return x if self.stream_dtype is None else x.to(self.stream_dtype)

    def __getattr__(self, name: str) -> Any:
        # where others have cast the connection's own parameters (FSDP's mixed precision, a loader), they are used wide
        value = super().__getattr__(name)
        return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.bfloat16()` casts the norms, which are the host's; the connection's own parameters stay float32
        def wide(t: Tensor) -> Tensor:
            new = fn(t)
            return t.to(new.device, torch.float32) if new.dtype in HALF else new

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(wide, recurse=False)


def following(norm: Any) -> Following | None:
    """What a kernel needs of a norm; None where it is of another kind, hooked, or its weight no plain tensor."""
    host = norm.lent() if hasattr(norm, "lent") else norm
    name, centred = KNOWN.get(kind(host), ("", False))
    eps, weight = getattr(host, name, None), getattr(host, "weight", None)
    if eps is None or type(weight) is not nn.Parameter or hooked(norm) or hooked(host):
        return None
    return Following(weight, getattr(host, "bias", None), eps, centred)


def hooked(module: nn.Module) -> bool:
    """Whether a call of it does more than its forward, or another one."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in module.__dict__


def as_written(state: State) -> torch.autocast:
    """Without autocast, which would run the coefficients' matmuls in half precision."""
    device = tree_leaves(state)[0].device.type
    return torch.autocast("cpu" if device == "meta" else device, enabled=False)  # meta has none to switch off


def dtype_of(norm: nn.Module, default: torch.dtype) -> torch.dtype:
    """The dtype of a norm's weight, whether its own or a host's it refers to."""
    return getattr(norm, "dtype", None) or next((p.dtype for p in norm.parameters()), default)


def weight(*shape: int) -> nn.Parameter:
    """An uninitialised connection parameter: float32 whatever torch's default dtype is."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))


def normal_(parameter: Tensor, std: float, site: Site) -> None:
    """Fill with N(0, std²), seeded by torch's seed and the site, leaving the global random state as it was."""
    if not parameter.is_meta:
        generator = torch.Generator(parameter.device).manual_seed(torch.initial_seed() + site.index)
        nn.init.normal_(parameter, std=std, generator=generator)


def positive(**options: int) -> None:
    """Raise a ValueError for an option that is not a whole number of at least 1."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def choice(name: str, given: str, choices: dict[str, Choice]) -> Choice:
    """What the option's word stands for; a ValueError lists the words where it is none of them."""
    if given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {given!r}")
    return choices[given]
