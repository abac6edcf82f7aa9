"""What the layers and the final norm of a host become when `connect` connects it.

`connect` swaps the classes of modules (see `class_swap`). Each layer becomes a `ConnectedLayer`,
the final norm the `ReadoutNorm`, and the backbone a `ConnectedModel` (see `connected_model`).
Attentions are swapped in `qkv`, norms in `host_norms`, and what some families do besides in
`host_quirks`. Between layers the connection's state travels as the host's `hidden_states`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..class_swap import swap_class
from ..connection import Connection, find_connections
from ..recompute import RecomputedConnection, recompute_inputs
from ..sites import SPLIT_PORTS
from .arguments import join_arguments
from .families import (
    NO_RESIDUAL,
    REST_OF_ARGUMENTS,
    SAME_INPUT,
    ArgumentProduct,
    ArgumentSources,
    ExtraOutput,
    FunctionCall,
    LayerWiring,
    Modulation,
    ModuleCall,
    OutputStep,
    ReturnedArgument,
    Sublayer,
    UnreadValue,
)
from .hidden_states import (
    TravellingState,
    check_order,
    check_whole,
    read_hidden_state,
    scale_stream,
)
from .host_norms import FinalNormReference, ModuleReference, find_attribute
from .layer_hooks import StateStructure, check_structured, warn_of_hooks
from .qkv import QKVInputs

# What `connect` sets on a layer.
LAYER_ATTRIBUTES = (
    "connections",
    "wiring",
    "opened_paths",
    "argument_names",
    "takes_any_keyword",
)
_RECORDER = "hidden_state_recorder"  # the argument by which a layer gets one


class ConnectedLayer:
    """A layer whose `hidden_states` carry the connection's state.

    The tensors of the state travel flat through `forward`, because reentrant checkpointing gives no
    gradient to nested ones. A hook on a layer therefore receives a `StateStructure` and these
    tensors, not a hidden state; use `output_hidden_states`.
    """

    # One for each site, and then the readout where this is the last layer and the host has no
    # final norm.
    connections: Sequence[Connection[Any]]
    wiring: LayerWiring
    opened_paths: list[str]  # of modules whose modules are called, and not they themselves
    argument_names: tuple[str, ...]  # of the host's forward; the first is the stream
    takes_any_keyword: bool  # whether the host's forward has **kwargs
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = self._check_arguments(args, kwargs)
        if not torch.compiler.is_compiling():
            warn_of_hooks(self, self.opened_paths)
        number = self.connections[0].site.layer
        hidden_states = kwargs.pop(self.argument_names[0])
        check_order(hidden_states, number)
        is_first = isinstance(hidden_states, Tensor)
        # Flatten the state, call the layer with all other arguments by name, and rebuild the state.
        # Without the number of the layer, so that layers compiled one by one share their code.
        given: tuple[Any, ...] = (hidden_states,)
        recorder = kwargs.pop(_RECORDER, None)
        if not is_first:
            returned_state = None if recorder is None else hidden_states.returned_state
            stream = (
                hidden_states.state,
                hidden_states.dtype_like,
                hidden_states.stream_scale,
                returned_state,
            )
            tensors, spec = tree_flatten(stream)
            given = (StateStructure(spec), *tensors)
        kwargs["crosslayer_records"] = recorder is not None and not is_first
        call_host: Any = super().__call__  # type: ignore[misc]
        structure, *leaves, before = check_structured(
            call_host(*given, crosslayer_is_first=is_first, **kwargs)
        )
        hidden = tree_unflatten(leaves, structure.spec)
        if not isinstance(hidden, Tensor):
            state, dtype_like, stream_scale = hidden
            shape = hidden_states.shape
            hidden = TravellingState(state, dtype_like, number + 1, shape, stream_scale)
        if recorder is not None:
            recorder.add_layer(before, hidden, structure)
        return hidden if self.wiring.extras is None else (hidden, *structure.extras)

    def forward(
        self,
        *given: Any,
        crosslayer_is_first: bool,
        crosslayer_records: bool,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """The structure and the tensors of the next state, and the hidden state before this layer
        if `crosslayer_records`.

        Args:
            given: the embedding; after the first layer the structure and the tensors of the state.
            crosslayer_is_first: whether this is the first layer.
            crosslayer_records: whether hidden states are asked for.
            kwargs: the arguments of the host's layer but the stream.
        """
        if crosslayer_is_first:
            (embedding,) = given
            if self.wiring.embedding_norm:
                embedding = find_attribute(self, self.wiring.embedding_norm)(embedding)
            stream = (self.connections[0].init(embedding), embedding.new_empty(0), None, None)
        else:
            structure, *leaves = check_structured(given)
            stream = tree_unflatten(leaves, structure.spec)
        state, dtype_like, stream_scale, _ = stream
        dtype = dtype_like.dtype
        before = _read_before(self, stream) if crosslayer_records else None
        modulations: dict[str, Modulation] = {}
        if self.wiring.condition:
            kwargs, (attn_modulation, mlp_modulation) = self.wiring.condition(
                self,  # type: ignore[arg-type]
                dtype,
                kwargs,
            )
            modulations = {"attn": attn_modulation, "mlp": mlp_modulation}
        returned: dict[str, Any] = {}  # by each sub-layer's module
        for connection, sublayers in zip(self.connections, self.wiring.sites, strict=False):
            inputs, state = connection(state)
            outputs = []  # of one sub-layer, or of all in a parallel block
            with recompute_inputs(inputs, state):
                for sublayer, x in _inputs_of_sublayers(connection, sublayers, inputs):
                    modulation = modulations.get(sublayer.port)
                    if stream_scale is not None and sublayer.norm is None:
                        x = _scale_inputs(x, stream_scale)
                    y, returned[sublayer.module] = self._run_sublayer(
                        sublayer, x, modulation, kwargs, returned
                    )
                    if stream_scale is not None:
                        y = _divide(y, stream_scale, connection)
                    outputs.append(y)
            state = connection.write(state, sum(outputs[1:], outputs[0]))
        if self.wiring.stream_factor:
            factor = find_attribute(self, self.wiring.stream_factor)
            stream_scale = _scale_after(stream_scale, factor)
        after: Any = (state, dtype_like, stream_scale)
        if self.connections[-1].is_readout:
            after = scale_stream(self.connections[-1].readout(state), stream_scale).to(dtype)
        tensors, spec = tree_flatten(after)
        structure = StateStructure(spec, tuple(self._select_extras(returned, kwargs)))
        return (structure, *tensors, before)

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names.

        Raises:
            ValueError: states are recomputed and the layer is checkpointed too, or the layer's own
                code does something that `connect` has not read.
            TypeError: the layer does not take these arguments.
        """
        checkpointed = self.training and getattr(self, "gradient_checkpointing", False)
        if checkpointed and _recomputes_states(self):
            raise ValueError(
                "gradient checkpointing of layers cannot be combined with the recomputation "
                'of states (recompute="streams" or "inversion"); choose one'
            )
        layer_class = type(self).__name__
        names = self.argument_names
        if len(args) > len(names):
            raise TypeError(f"{layer_class} takes {len(names)} arguments, got {len(args)}")
        kwargs = join_arguments(names, args, kwargs)
        if not self.takes_any_keyword and (unknown := kwargs.keys() - {*names, _RECORDER}):
            raise TypeError(f"{layer_class} has no argument {min(unknown)!r}")
        if names[0] not in kwargs:
            raise TypeError(f"{layer_class} needs {names[0]!r}")
        for name, value in self.wiring.unread_values:
            if _has_value(kwargs, name, value):
                number = self.connections[0].site.layer
                raise ValueError(_describe_unread(layer_class, number, name, value))
        return kwargs

    def _select_extras(self, returned: dict[str, Any], kwargs: dict[str, Any]) -> Iterator[Any]:
        """What the layer returns besides its stream, of what its sub-layers returned and of its
        arguments.
        """
        for source in self.wiring.extras or ():
            if source is None:
                yield None
                continue
            if isinstance(source, ReturnedArgument):
                yield kwargs.get(source.name, source.default)
                continue
            outputs = returned[source.module]
            # A module may return its tensor alone where it has no more to tell.
            if isinstance(outputs, tuple | list):
                stop = None if source.and_later else source.position + 1
                yield from outputs[source.position : stop]

    def _run_sublayer(
        self,
        sublayer: Sublayer,
        x: Any,
        modulation: Modulation | None,
        kwargs: dict[str, Any],
        returned: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """What the sub-layer adds to the stream, and all that its module returns.

        Args:
            sublayer: a sub-layer of this layer.
            x: its input, or its inputs of q, k and v.
            modulation: of input and output, where the layer is conditioned.
            kwargs: the arguments of the layer.
            returned: what the sub-layers before it returned, by their modules.
        """
        if modulation is not None:
            x = _modulate(x, modulation)
        if sublayer.input_scale != 1:
            x = _scale_inputs(x, sublayer.input_scale)
        outputs = self._call_module(sublayer, x, kwargs, returned)
        y = first_output(outputs)
        if y.dim() < x.ndim:  # A mixture of experts may return its tokens flat.
            y = y.view(x.shape)
        for step in sublayer.after:
            y = self._apply_step(step, y, kwargs)
        if sublayer.scale != 1:
            y = y * sublayer.scale
        return (y if modulation is None else modulation.gate * y), outputs

    def _call_module(
        self, call: Sublayer | ModuleCall, x: Any, kwargs: dict[str, Any], returned: dict[str, Any]
    ) -> Any:
        """What a module returns. kwargs: the layer's arguments. returned: as in `_run_sublayer`."""
        if call.arguments is not None:
            selected = _select_arguments(call.arguments, kwargs, self.argument_names, x, returned)
            kwargs = dict(call.preset_arguments) | selected
        if isinstance(x, QKVInputs) and isinstance(call, Sublayer) and not call.qkv:
            x, key, value = x  # `nn.MultiheadAttention` takes three
            kwargs = kwargs | {"key": key, "value": value}
        return _call_as_host(find_attribute(self, call.module), call, x, kwargs)

    def _apply_step(self, step: OutputStep, y: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A step between a sub-layer's module and the stream. kwargs: the layer's arguments."""
        if isinstance(step, float):
            return nn.functional.dropout(y, step, self.training)
        if isinstance(step, FunctionCall):
            return step(y)
        if isinstance(step, ArgumentProduct):
            return y * kwargs[step.argument]
        if isinstance(step, ModuleCall):
            return first_output(self._call_module(step, y, kwargs, {}))
        module: Any = find_attribute(self, step)
        if isinstance(module, Tensor):
            return module * y
        return first_output(module(y))


def _read_before(layer: ConnectedLayer, stream: tuple[Any, Tensor, Any, Any]) -> Tensor:
    """The hidden state before a layer, without what the host has added to it since."""
    state, dtype_like, stream_scale, returned_state = stream
    if returned_state is not None:
        state = returned_state
    return read_hidden_state(layer, state, dtype_like.dtype, stream_scale)


def first_output(outputs: Any) -> Any:
    """What a module or a layer returns first, or alone."""
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def _has_value(kwargs: dict[str, Any], name: str, value: UnreadValue) -> bool:
    """Whether an argument has a value; 0 and a tensor of False are False, as in `if` of a layer."""
    given = kwargs.get(name)
    if value is None:
        return given is None
    if value == "given":
        return given is not None
    if value == "false":
        return given is not None and not given
    return name in kwargs and bool(given) == value


def _describe_unread(layer_class: str, number: int, name: str, value: UnreadValue) -> str:
    given = f"with {name}={value}"
    if value is None:
        given = f"without {name}"
    elif value == "given":
        given = f"with {name}"
    elif value == "false":
        given = f"with {name}=False"
    return (
        f"layer {number} ({layer_class}) is called {given}. Its own code then does something else "
        "than what connect has read; put that branch into one of its modules"
    )


def _call_as_host(module: Any, call: Sublayer | ModuleCall, x: Any, kwargs: dict[str, Any]) -> Any:
    """Call a module with arguments by name or by position, as the host's layer does.

    Hooks may depend on it, and modules that are put in place of the host's.
    """
    if call.input_name:
        return module(**{call.input_name: x}, **kwargs)
    rest = dict(kwargs)
    positional = []
    for name in call.by_position:
        if name not in rest:  # the host leaves it out
            break
        positional.append(rest.pop(name))
    return module(x, *positional, **rest)


def _inputs_of_sublayers(
    connection: Connection[Any], sublayers: Iterable[Sublayer], inputs: Sequence[Tensor]
) -> list[tuple[Sublayer, Any]]:
    """Each sub-layer of a site with its input, or with its inputs of q, k and v together."""
    pairs: list[tuple[Sublayer, Any]] = []
    first = 0  # of the sub-layer's ports
    for sublayer in sublayers:
        split = SPLIT_PORTS.get(sublayer.port, ())
        end = first + len(split)
        if split and connection.ports[first:end] == split:
            pairs.append((sublayer, QKVInputs(inputs[first:end])))
            first = end
        else:
            pairs.append((sublayer, inputs[first]))
            first += 1
    return pairs


def _select_arguments(
    sources: ArgumentSources,
    kwargs: dict[str, Any],
    names: tuple[str, ...],
    x: Any,
    returned: dict[str, Any],
) -> dict[str, Any]:
    """The arguments of a sub-layer.

    Args:
        sources: of each.
        kwargs: the arguments of the layer.
        names: those that the layer's forward names.
        x: the sub-layer's input.
        returned: what the sub-layers before it returned, by their modules.
    """
    selected: dict[str, Any] = {}
    for name, source in sources:
        if isinstance(source, ExtraOutput):
            selected[name] = returned[source.module][source.position]
        elif source == NO_RESIDUAL:
            selected[name] = torch.zeros((), dtype=x.dtype, device=x.device)
        elif source == SAME_INPUT:
            selected[name] = x
        elif source == REST_OF_ARGUMENTS:
            selected |= {key: value for key, value in kwargs.items() if key not in names}
        elif source in kwargs:
            selected[name] = kwargs[source]
    return selected


def _scale_after(stream_scale: Tensor | None, factor: Tensor) -> Tensor:
    """The scale of the stream after a layer. factor: of one number, in the host's dtype."""
    wide = factor.to(torch.promote_types(factor.dtype, torch.float32)).reshape(())
    return wide if stream_scale is None else stream_scale * wide


def _divide(y: Tensor, stream_scale: Tensor, connection: Connection[Any]) -> Tensor:
    """What joins a connection's stream where y would join the host's.

    The host's stream is the connection's times the scale, which norms remove. The quotient may be
    too large for the host's dtype, so a wider one of the streams gets it whole.
    """
    quotient = y.to(torch.promote_types(y.dtype, torch.float32)) / stream_scale
    return quotient if connection.stream_dtype is not None else quotient.to(y.dtype)


def _recomputes_states(layer: Any) -> bool:
    return any(
        isinstance(connection, RecomputedConnection) for connection in find_connections(layer)
    )


def _scale_inputs(x: Any, scale: float | Tensor) -> Any:
    # not the operators of QKVInputs, which torch.compile does not know
    return QKVInputs([port * scale for port in x]) if isinstance(x, QKVInputs) else x * scale


def _modulate(x: Any, modulation: Modulation) -> Any:
    """x · (1 + scale) + shift, for one input or for those of q, k and v."""
    if isinstance(x, QKVInputs):
        return QKVInputs([_modulate(port, modulation) for port in x])
    return x * (1 + modulation.scale) + modulation.shift


class ReadoutNorm:
    """The host's final norm, which now reads the hidden state out of the connection's state."""

    connection: Connection[Any]

    def forward(
        self, *args: Any, verb: Literal["readout", "hidden_state"] = "readout", **kwargs: Any
    ) -> Tensor:
        """The normed hidden state for the head, or the hidden state before the norm.

        The norm's one argument may be given by the name that the host's norm has for it.
        """
        (hidden_states,) = (*args, *kwargs.values())
        if isinstance(hidden_states, Tensor):  # A host may norm its embedding, too.
            return self.host_norm(hidden_states)
        check_whole(hidden_states)
        if verb == "readout" and hidden_states.stream_scale is None:
            return self.connection.readout(hidden_states.state)
        x = self.connection(hidden_states.state, "hidden_state")
        x = scale_stream(x, hidden_states.stream_scale).to(hidden_states.dtype)
        return x if verb == "hidden_state" else self.host_norm(x)

    def host_norm(self, x: Tensor) -> Tensor:
        """The norm as the host had it."""
        return super().forward(x)  # type: ignore[misc]


def make_readout(final: Any, connection: Connection[Any]) -> None:
    """Let a final norm read the hidden state out of a connection's state."""
    swap_class(final, ReadoutNorm)
    final.connection = connection.train(final.training)
    for norm in connection.norms:
        if isinstance(norm, FinalNormReference):
            norm.final = ModuleReference((final,))
