"""The interface: a Transformer as sites along depth, and a connection at each of them.

    y_0 ──► site 0 ──► attention ──► site 1 ──► mlp ──► … ──► site `depth`: the readout
             read                     write(y_1), read                write(y_S), read

A connection decides what a sub-layer reads and where its output goes. It processes every token alone, so it is causal
by construction and needs no cache when decoding. A whole model:

    state = sites[0].init(embed(tokens))
    for connection, sublayer in zip(sites, sublayers):
        inputs, state = connection.read(state)
        state = connection.write(state, sublayer(*inputs))
    hidden = sites[-1].readout(state)

Axes: B batch, T token, D width, L sources, C ways, n streams.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# A state is a NamedTuple of tensors, tuples and None. Its first field is a tensor. Only its own method looks inside.
State = Any
StateT = TypeVar("StateT")
NormFactory = Callable[[str], nn.Module]  # port -> the norm of the input of that port
HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Site:
    """A place along depth where a sub-layer runs. The last site is the readout."""

    index: int  # 0 .. depth
    layer: int  # the Transformer layer it belongs to; the number of layers at the readout
    ports: tuple[str, ...]  # ("attn",) | ("mlp",) | ("attn", "mlp") in a parallel block | ("out",)
    opens_layer: bool  # the first site of its layer
    closes_layer: bool  # the last site of its layer
    depth: int  # the index of the readout, which is the number of sub-layers


def plan(layers: int, parallel: bool = False) -> list[Site]:
    """The sites of a model with `layers` layers of attention and MLP, in sequence or in parallel.

    Args:
        layers: the number of layers.
        parallel: attention and MLP of a layer read the same state and write their sum (GPT-J, Pythia).

    Returns:
        One site a sub-layer, and the readout.
    """
    if layers < 1:
        raise ValueError(f"plan: layers must be at least 1, got {layers}")
    ports_of_layer = [("attn", "mlp")] if parallel else [("attn",), ("mlp",)]
    depth = layers * len(ports_of_layer)
    sites = []
    for layer in range(layers):
        for i, ports in enumerate(ports_of_layer):
            is_first = i == 0
            is_last = i == len(ports_of_layer) - 1
            sites.append(Site(len(sites), layer, ports, is_first, is_last, depth))
    return [*sites, Site(depth, layers, ("out",), True, True, depth)]


class Connection(nn.Module, Generic[StateT]):
    """The interface of every method: four verbs on an immutable state.

    `init(x) -> state`, `read(state) -> (inputs, state)`, `write(state, y) -> state`, `readout(state) -> hidden`.

    Writes are lazy: `write` records y, and the `read` of the next site applies it. A method implements two functions:
    `initial_state`, and `mix_inputs`, which applies the pending write and mixes the next inputs. `forward` stores
    nothing on the module, so a state survives checkpointing, `deepcopy` and a pipeline cut. A state contains no
    parameter (a clone may travel), because FSDP frees a parameter as soon as its block has run.

    A connection's own parameters are raw, at least 1-d (FSDP2 refuses 0-d), and float32, or float64 in a float64 model.

    Args:
        site: where this connection sits.
        dim: D, the width of the stream.
        norm: returns the norm of a port: a new module, or a reference to one of a host model.
        ports: names of the sub-layer's inputs; `site.ports` unless the method feeds q, k and v separately.
    """

    name: ClassVar[str] = ""  # the name that `make` knows: the name of the file in connections/
    starts_as_prenorm: ClassVar[bool] = (
        True  # equivalent to pre-norm at initialisation, up to the eps of the norms
    )
    # ... and bitwise equal to it: the first input and every write are exactly those of pre-norm
    bitwise_prenorm: ClassVar[bool] = False
    # equal to pre-norm up to a scale of the sub-layer's input, which the sub-layer's norm removes
    prenorm_up_to_scale: ClassVar[bool] = False
    norms_its_stream: ClassVar[bool] = (
        False  # applies the sub-layers' norms to its streams; needs those norms
    )
    test_variants: ClassVar[
        tuple[str, ...]
    ] = ()  # specs besides the default one that the suite of laws covers
    weight_decay_params: ClassVar[frozenset[str]] = (
        frozenset()
    )  # own parameters that take weight decay
    lr_factors: ClassVar[
        dict[str, float]
    ] = {}  # own parameters whose learning rate is a multiple of the model's
    gate_fields: ClassVar[tuple[str, ...]] = ()  # fields of the state that weight the pending write
    # dtype of the streams; that of the embedding where None. Every spec accepts it as an option
    stream_dtype: torch.dtype | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  # as the spec that built it has them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        package, _, module = cls.__module__.rpartition(".")
        if package == "crosslayer.connections":
            cls.name = module

    def __init__(
        self, site: Site, dim: int, norm: NormFactory, ports: tuple[str, ...] | None = None
    ):
        super().__init__()
        self.site = site
        self.dim = dim
        self.ports = ports or site.ports
        # forward branches on booleans alone: an integer that differs between layers would compile one graph per layer.
        self.opens_layer = site.opens_layer
        self.is_readout = site.index == site.depth
        self.norms = nn.ModuleList(norm(port) for port in self.ports)

    def reset_parameters(self) -> None:
        """Set the connection's own parameters, but not its norms, to the method's initial values."""

    def init(self, x: Tensor) -> StateT:
        """The state before the first sub-layer. x: the embedding y_0, [B T D]."""
        return self.initial_state(self.to_stream_dtype(x))

    def initial_state(self, x: Tensor) -> StateT:
        """The state before the first sub-layer, given the embedding [B T D] in the dtype of the streams."""
        raise NotImplementedError

    def mix_inputs(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        """Apply the pending write and mix.

        Returns:
            The inputs before their norms, one [B T D] for all ports or one a port, and the state to write to.
        """
        raise NotImplementedError

    def read(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        """The sub-layer's inputs, one [B T D] a port, and the state to write to. Pure, so it may be recomputed."""
        with autocast_disabled(state):
            inputs, state = self.mix_inputs(state)
            return self.apply_port_norms(*inputs), state

    def forward(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        """Alias of `read`, so that module hooks (FSDP, offloading) fire."""
        return self.read(state)

    def hidden_state(self, state: StateT) -> Tensor:
        """The input of the sub-layer's first port before its norm, [B T D]: the hidden state at this depth."""
        with autocast_disabled(state):
            return self.mix_inputs(state)[0][0]

    def write(self, state: StateT, y: Tensor) -> StateT:
        """Record the sub-layer's output y [B T D]. The next `read` applies it."""
        return state._replace(y=self.to_stream_dtype(y))  # type: ignore[attr-defined]

    def readout(self, state: StateT) -> Tensor:
        """The hidden state [B T D] after the final norm, for the head."""
        inputs, _ = self(state)
        return inputs[0]

    def memory_traffic(self) -> float:
        """The least that this site's `read` moves in a forward pass, the pending write included.

        In elements of D a token. The default is that of a single stream: the stream and y are read, the stream and the
        normed inputs are written.
        """
        if self.site.index == 0:  # The embedding is in memory already, and no write is pending.
            return 1 + len(self.site.ports)
        return (2 if self.is_readout else 3) + len(self.site.ports)

    def apply_port_norms(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Apply each port's norm to its input, or to the one input that all ports share."""
        if len(inputs) == 1:
            inputs = inputs * len(self.norms)
        normed = []
        for norm, x in zip(self.norms, inputs, strict=True):
            if self.stream_dtype is not None:  # The sub-layers run in their own dtype.
                x = x.to(norm_dtype(norm, x.dtype))
            # A norm kept in a wider dtype than its model does not widen the sub-layer's input.
            normed.append(norm(x).to(x.dtype))
        return tuple(normed)

    def to_stream_dtype(self, x: Tensor) -> Tensor:
        return x if self.stream_dtype is None else x.to(self.stream_dtype)

    def extra_repr(self) -> str:
        listed = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        parts = [f"{self.name}({listed})" if listed else self.name]
        parts.append(
            "readout" if self.is_readout else f"site {self.site.index} of {self.site.depth}"
        )
        parts += [f"{name} {list(p.shape)}" for name, p in self.named_parameters(recurse=False)]
        return ", ".join(parts)

    def __getattr__(self, name: str) -> Any:
        # Others may have cast the connection's own parameters (FSDP's mixed precision, a loader): use them in float32.
        value = super().__getattr__(name)
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            return value.float()
        return value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.bfloat16()` casts the norms, which belong to the host; the own parameters stay float32.
        def apply_in_float32(t: Tensor) -> Tensor:
            new = fn(t)
            return t.to(new.device, torch.float32) if new.dtype in HALF_DTYPES else new

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(apply_in_float32, recurse=False)


def find_connections(model: nn.Module) -> list["Connection[Any]"]:
    """The connections of a model, in the order of depth."""
    found = [module for module in model.modules() if isinstance(module, Connection)]
    return sorted(found, key=lambda connection: connection.site.index)


def autocast_disabled(state: State) -> torch.autocast:
    """A context without autocast, which would compute coefficients in half precision."""
    device = tree_leaves(state)[0].device.type
    return torch.autocast(
        "cpu" if device == "meta" else device, enabled=False
    )  # meta has no autocast


def norm_dtype(norm: nn.Module, default: torch.dtype) -> torch.dtype:
    """The dtype of a norm's weight, be it the norm's own or that of a host's norm it refers to."""
    own_dtype = getattr(norm, "dtype", None)
    if own_dtype is not None:
        return own_dtype
    return next((p.dtype for p in norm.parameters()), default)


def float32_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised connection parameter, float32 whatever torch's default dtype is."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))


def init_normal_(parameter: Tensor, std: float, site: Site) -> None:
    """Fill with N(0, std²), seeded by torch's seed and the site, without changing the global random state."""
    if parameter.is_meta:
        return
    generator = torch.Generator(parameter.device).manual_seed(torch.initial_seed() + site.index)
    nn.init.normal_(parameter, std=std, generator=generator)
