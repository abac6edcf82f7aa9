"""The interface: a Transformer as sites along depth, and a connection at each of them.

    y_0 ──► site 0 ──► attention ──► site 1 ──► mlp ──► … ──► site `depth`: the readout
              │ read, write(y_1) │     │ read, write(y_2) │        │ readout

A connection decides what a sub-layer reads and where its output goes. It processes each token
separately, so it is causal and needs no cache when decoding. Sites must run in the order of depth;
most methods cannot detect another order. A whole model:

    state = sites[0].init(embed(tokens))
    for connection, sublayer in zip(sites, sublayers):
        inputs, state = connection.read(state)
        state = connection.write(state, sublayer(*inputs))
    hidden = sites[-1].readout(state)

Axes: B batch, T token, D width, L sources, C ways, n streams.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from .float32_parameters import Float32Parameters
from .method_checks import (
    check_class_attributes,
    check_embedding,
    check_given_state,
    check_mixed,
    check_state,
    check_state_class,
    first_tensor,
    method_name,
    stream_shape,
    warn_without_write,
)
from .mixing import MixingWeights
from .sites import SPLIT_PORT_NAMES, Site, check_ports
from .validation import format_shape

# A state is a NamedTuple of tensors, tuples and None. Flattened, it begins with a tensor. Only the
# method that made it looks inside.
State = Any
StateT = TypeVar("StateT")
NormFactory = Callable[[str], nn.Module]  # port -> the norm of the input of that port
# What a model computes at initialisation. "Up to scales": a constant factor multiplies sub-layers'
# inputs and the readout. "Up to scale of readout": it multiplies the readout alone. Norms remove
# such factors, so a model without norms there computes something else.
PrenormFunction = Literal[
    "bitwise prenorm",  # every input and the readout are those of pre-norm, bit by bit
    "prenorm",  # up to the eps of the norms
    "prenorm up to scales",
    "prenorm up to scale of readout",
]
InitialFunction = Literal[PrenormFunction, "bitwise postnorm", "other"]
PRENORM_FUNCTIONS: tuple[str, ...] = get_args(PrenormFunction)


class Connection(Float32Parameters, Generic[StateT]):
    """The interface of every method: four functions of an immutable state.

    `init(x) -> state`, `read(state) -> (inputs, state)`, `write(state, y) -> state`,
    `readout(state) -> hidden`.

    Writes are pending: `write` records y, and the `read` of the next site applies it. A method
    implements two functions: `initial_state`, and `mix_inputs`, which applies the pending write and
    mixes the next inputs. `forward` stores nothing on the module, so gradient checkpointing,
    `deepcopy` and pipeline stages work. A state contains no parameter, because FSDP frees a
    parameter as soon as its block has run; a clone of it may be there.

    A connection's own parameters are attributes of the module itself, at least 1-d (FSDP2 refuses
    0-d), and float32, or float64 in a float64 model. Its norms are submodules.

    Args:
        site: where this connection sits.
        dim: D, the width of the stream.
        norm: takes the name of a port and returns its norm: a new module, or a reference to a norm
            of the model that is connected, the host.
        ports: names of the sub-layer's inputs; `site.ports` unless the method feeds q, k and v
            separately. Then those of `SPLIT_PORTS` stand in place of the attention's port. A
            readout may have any, with a norm each.

    Attributes:
        name: the name that `make` knows. Of crosslayer's own methods it is the name of the file.
        initial_function: what a model computes at initialisation, with the default options: a value
            of `InitialFunction`. An instance whose options change that sets another.
        norms_its_stream: applies the sub-layers' norms to its streams, so the model that it
            connects must have these norms.
        gate_field: the field of the state that weights the pending write or, where no field does,
            the stream that it joins. Diagnostics log it.
        gate_limits: the two values between which the gate lies, such as (0, 1) of a sigmoid; None
            where nothing bounds it. An instance whose options change them sets others.
        weight_decay_params: own parameters that take weight decay. The others take none.
        test_variants: specs with options that the laws (crosslayer.testing.laws) cover too.
        options: the options of the spec that built this connection.
        parts_are_streams: its `state_parts` are n streams, which persist over depth.
        part_label: the label of part i of `state_parts` in pictures, like "X_{}", with i in the
            place of {}. Streams have "stream {}".
        weighs_channels: its `mixing_weights` differ between channels or fractions, or contain
            norms, so they cannot be multiplied over depth as one number a part.
        fractions: the number of equal slices of the width that are mixed separately. Each slice
            is one part in `mixing_weights`.
        output_scale: factor of the initial weights of the sub-layers' output projections. `connect`
            applies it. 1 in every method but `hyper`.
        stream_dtype: dtype of the streams; None for that of the embedding, which is used in a
            float64 model too. It is an option of every connection:
            "mudd(stream_dtype='float32')".
    """

    name: ClassVar[str] = ""
    initial_function: InitialFunction = "prenorm"
    norms_its_stream: ClassVar[bool] = False
    parts_are_streams: ClassVar[bool] = False
    part_label: ClassVar[str] = "part {}"
    gate_field: ClassVar[str] = ""
    gate_limits: tuple[float, float] | None = None
    # The state in `class Hyper(Connection[Streams])`; None where a class does not name it.
    state_class: ClassVar[type | None] = None
    weight_decay_params: ClassVar[frozenset[str]] = frozenset()
    test_variants: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class_attributes(cls)
        package, _, module = cls.__module__.rpartition(".")
        if package == "crosslayer.connections":
            cls.name = module
        check_state_class(cls)

    def __init__(
        self, site: Site, dim: int, norm: NormFactory, ports: tuple[str, ...] | None = None
    ):
        super().__init__()
        self.site = site
        self.dim = dim
        self.ports = site.ports if ports is None else check_ports(ports, site)
        self.fractions = 1
        self.weighs_channels = self.norms_its_stream
        self.options: dict[str, Any] = {}
        self.output_scale = 1.0
        self.stream_dtype: torch.dtype | None = None
        # `forward` branches on booleans alone: an integer that differs between layers would
        # compile one graph per layer.
        self.opens_layer = site.opens_layer
        self.is_readout = site.is_readout
        self.norms = nn.ModuleList(norm(port) for port in self.ports)

    def reset_parameters(self) -> None:
        """Set the connection's own parameters, but not its norms, to their initial values.

        `crosslayer.hf.reset_connections` does so for all connections of a model, and for norms.
        """

    def init(self, x: Tensor) -> StateT:
        """The state before the first sub-layer. x: the embedding y_0, [B T D].

        Raises:
            TypeError: x is no tensor of floating-point numbers.
            ValueError: its width is another one.
        """
        if not torch.compiler.is_compiling():
            check_embedding(self, x)
        state = self.initial_state(self.to_stream_dtype(x))
        if not torch.compiler.is_compiling():
            check_state(self, state)
        return state

    def initial_state(self, x: Tensor) -> StateT:
        """The state before the first sub-layer. x: [B T D], in the dtype of the streams."""
        raise NotImplementedError(f"{type(self).__name__} needs initial_state")

    def mix_inputs(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        """Apply the pending write and mix.

        Returns:
            The inputs before their norms, one [B T D] for all ports or one for each port; and the
            state to write to.
        """
        raise NotImplementedError(f"{type(self).__name__} needs mix_inputs")

    def read(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        """The sub-layer's inputs, one [B T D] for each port, and the state to write to.

        A pure function, so it may be recomputed.

        Raises:
            TypeError: `state` is no state of this method.
            ValueError: something else has cast streams of `stream_dtype='float32'` to half
                precision, or the sites of a dense method run in another order than that of depth.
        """
        if not torch.compiler.is_compiling():
            check_given_state(self, state)
        with autocast_disabled(state):
            return self.mix_and_norm(state)

    def mix_and_norm(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        """`read` of a state that has been checked, without autocast."""
        mixed = self.mix_inputs(state)
        if not torch.compiler.is_compiling():
            check_mixed(self, state, mixed)
        return self.norm_mixed(*mixed)

    def norm_mixed(
        self, inputs: tuple[Tensor, ...], state: StateT
    ) -> tuple[tuple[Tensor, ...], StateT]:
        """Apply the norms to what `mix_inputs` has returned; `read` returns the result.

        Not called where `FusedNormConnection` fuses the norms into its op.

        Args:
            inputs: one [B T D] for all ports, or one for each port.
            state: to write to.
        """
        return self.apply_port_norms(*inputs), state

    def forward(self, state: StateT, verb: Literal["read", "hidden_state"] = "read") -> Any:
        """`read` or `hidden_state`, as a call of the module: its hooks (FSDP, offloading) run."""
        return getattr(self, verb)(state)

    @property
    def splits_inputs(self) -> bool:
        """Whether q, k and v, or q and the latent, have mixtures of their own."""
        return not SPLIT_PORT_NAMES.isdisjoint(self.ports)

    def hidden_state(self, state: StateT) -> Tensor:
        """The hidden state at this depth, [B T D]: the input before its norm.

        Where q, k and v are mixed separately, it is the stream that the sub-layer's output joins.
        """
        with autocast_disabled(state):
            inputs, next_state = self.mix_inputs(state)
        if self.splits_inputs:
            return self.state_parts(next_state)[-1]
        return inputs[0]

    def write(self, state: StateT, y: Tensor) -> StateT:
        """Record the sub-layer's output y [B T D]. The next `read` applies it.

        Raises:
            ValueError: the state has a write already, which would be lost; or the output has
                another shape than the stream.
            TypeError: the output is no tensor, or `state` is no state.
        """
        if not isinstance(y, Tensor):
            raise TypeError(
                f"write takes the output of a sub-layer, a tensor, got a {type(y).__name__}"
            )
        if not torch.compiler.is_compiling():
            check_given_state(self, state)
        if state.y is not None:  # type: ignore[attr-defined]
            raise ValueError(
                "write was called twice without a read in between; add up the outputs of parallel "
                "sub-layers and write the sum"
            )
        expected = stream_shape(self, state, y.dim())
        if y.shape != expected:
            raise ValueError(
                f"write takes an output of the stream's shape, {format_shape(expected)}, got "
                f"{format_shape(y.shape)}"
            )
        names: tuple[str, ...] = state._fields  # type: ignore[attr-defined]
        fields: dict[str, Any] = dict(zip(names, state, strict=True))  # type: ignore[call-overload]
        fields["y"] = self.to_stream_dtype(y)
        # Not `_replace`: torch 2.11 cannot compile a block that returns its result.
        return type(state)(**fields)

    def readout(self, state: StateT) -> Tensor:
        """The hidden state [B T D] after the final norm, for the head.

        Warns where the last sub-layer's output was not written to the state.
        """
        if not torch.compiler.is_compiling():
            warn_without_write(self, state)
        inputs, _ = self(state)
        return inputs[0]

    def state_parts(self, state: StateT) -> tuple[Tensor, ...]:
        """The tensors that a read mixes, [B T D] each, without the pending write.

        Where q, k and v are mixed separately, the last one is the stream that the output joins.
        `crosslayer.inspect` needs this and `mixing_weights` of a method. `hidden_state` needs this
        of a method that mixes q, k and v separately.

        Raises:
            ValueError: the method does not define it.
        """
        raise ValueError(f"{self.name} has no state_parts")

    def mixing_weights(self, state: StateT) -> MixingWeights:
        """The read of this state as matrices over `state_parts`: see `crosslayer.mixing`.

        Raises:
            ValueError: the method does not define it.
        """
        raise ValueError(f"{self.name} has no mixing_weights")

    def memory_traffic(self) -> float:
        """The least that this site's `read` moves in a forward pass, the pending write included.

        In multiples of D elements per token. The default is that of a single stream: the stream and
        y are read, the stream and the normed inputs are written.
        """
        if self.site.index == 0:  # The embedding is in memory already, and no write is pending.
            return 1 + len(self.ports)
        return (2 if self.is_readout else 3) + len(self.ports)

    def backward_memory_traffic(self) -> float:
        """The least that the backward pass of this site's `read` moves, as `memory_traffic` counts.

        A single stream moves as much as forward: the two gradients and the norm's input are read,
        one gradient is written. n streams move 3n + 3 where the forward pass moves 2n + 2. For
        other states of more than one stream this factor of 1.5 is an estimate.
        """
        forward = self.memory_traffic()
        is_single_stream = forward <= Connection.memory_traffic(self)
        return forward if is_single_stream else 1.5 * forward

    def apply_port_norms(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Apply each port's norm to its input, or to the one input that all ports share.

        Args:
            inputs: what `mix_inputs` returns, [B T D] each: one for all ports, or one for each.

        Raises:
            ValueError: the number of inputs is wrong.
        """
        if len(inputs) == 1:
            inputs = inputs * len(self.norms)
        if len(inputs) != len(self.norms):
            raise ValueError(
                f"{type(self).__name__}.mix_inputs must return one input for all ports, or one for "
                f"each of {', '.join(self.ports)}, got {len(inputs)}"
            )
        normed = []
        for norm, x in zip(self.norms, inputs, strict=True):
            if self.stream_dtype is not None:  # The sub-layers run in their own dtype.
                x = x.to(norm_dtype(norm) or x.dtype)
            # A norm kept in a wider dtype than its model does not widen the sub-layer's input.
            normed.append(norm(x).to(x.dtype))
        return tuple(normed)

    def to_stream_dtype(self, x: Tensor) -> Tensor:
        """`x` in the option `stream_dtype`; unchanged without that option, or in float64."""
        if self.stream_dtype is None or x.dtype == torch.float64:
            return x
        return x.to(self.stream_dtype)

    def extra_repr(self) -> str:
        """Name and options, place, and the shapes of the connection's own parameters."""
        parts = [format_spec(method_name(self), self.options), self.site.place]
        for name, parameter in self.named_parameters(recurse=False):
            parts.append(f"{name} {list(parameter.shape)}")
        return ", ".join(parts)


def format_spec(name: str, options: dict[str, Any]) -> str:
    """The string that `make` reads, like "mudd(dilation=2)"."""
    if not options:
        return name
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


def find_connections(model: nn.Module) -> list[Connection[Any]]:
    """The connections of a model, in the order of depth."""
    connections = [module for module in model.modules() if isinstance(module, Connection)]
    return sorted(connections, key=lambda connection: connection.site.index)


def autocast_disabled(state: State) -> torch.autocast:
    """A context without autocast, which would compute coefficients in half precision."""
    device = first_tensor(state).device.type
    if device == "meta":  # which has no autocast
        device = "cpu"
    return torch.autocast(device, enabled=False)


def norm_dtype(norm: nn.Module) -> torch.dtype | None:
    """The dtype of the sub-layer after a norm: what a norm of a host says, or its weight's."""
    own_dtype: torch.dtype | None = getattr(norm, "dtype", None)
    if own_dtype is not None:
        return own_dtype
    return next((p.dtype for p in norm.parameters()), None)
