"""What travels between connected layers, and the hidden states that a user asks for.

A `TravellingState` holds a connection's state where the host has its stream. transformers records
what its layers get or return, so a connected backbone puts what it reads from the states in that
place.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from transformers.utils.output_capturing import _active_collector

from .layer_hooks import StateStructure

if TYPE_CHECKING:
    from .layers import ConnectedLayer


_ALL = slice(None)


class TravellingState(NamedTuple):
    """What travels as the host's hidden states between layers."""

    state: Any
    dtype_like: Tensor  # [0], of the embedding's dtype, which the streams need not have
    next_layer: int  # the number of the layer that may run next
    shape: torch.Size  # of the host's stream, [B T D]
    # The product of the layers' factors of the stream so far, of no dimension; None without any.
    # The host's hidden state is this times the connection's: see `LayerWiring.stream_factor`.
    stream_scale: Tensor | None = None
    # What the last layer returned, where the host has added to its stream since. The host records
    # its layers' outputs, without what it adds to them.
    returned_state: Any = None

    @property
    def dtype(self) -> torch.dtype:  # DiT's forward asks for it.
        return self.dtype_like.dtype

    @property
    def device(self) -> torch.device:  # A host that checkpoints its layers may ask for it.
        return self.dtype_like.device

    # OLMo-core calls `torch._dynamo.maybe_mark_dynamic` on what layers get. A state ignores it.
    @property
    def _dynamo_weak_dynamic_indices(self) -> set[int]:
        return set()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_has_dynamo_dim_marking":
            raise AttributeError(f"a {type(self).__name__} is immutable: {name!r} cannot be set")

    def __getattr__(self, name: str) -> Any:
        raise StreamUseError(
            f"its {name!r}",
            "; what replaces a module or its forward after connect, as Liger's rms_norm "
            "(docs/huggingface.md) and TransformerLens's bridge do, does not fit",
        )

    def __getitem__(self, index: Any) -> Any:
        """A field, or the stream at some tokens: a connection processes each token separately."""
        if isinstance(index, int):
            return tuple.__getitem__(self, index)
        tokens = find_token_slice(index)
        if tokens is None:
            raise StreamUseError("parts of it but a slice of the tokens, like [:, -1:]")
        state = getattr(self.state, "state", self.state)  # recomputed states begin anew here
        return self._replace(
            state=tree_map(lambda leaf: self._select(leaf, tokens), state),
            shape=torch.empty(self.shape, device="meta")[:, tokens].shape,
        )

    def _select(self, leaf: Any, tokens: slice) -> Any:
        """What the state holds of some tokens. Tensors without axes of batch and token stay."""
        if isinstance(leaf, Tensor) and leaf.dim() >= 3 and leaf.shape[:2] == self.shape[:2]:
            return leaf[:, tokens]
        return leaf

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is checkpoint:  # torch.compile asks; torch does not
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs or {})
        raise StreamUseError(f"it in {getattr(function, '__name__', function)}")

    def __add__(self, _: Any) -> Any:  # a tuple's would join
        raise StreamUseError("it in a sum")

    def __mul__(self, _: Any) -> Any:  # a tuple's would repeat
        raise StreamUseError("it in a product")

    def __rmul__(self, _: Any) -> Any:
        raise StreamUseError("it in a product")


def find_token_slice(index: Any) -> slice | None:
    """The slice of tokens in an index of a stream, [B T D]; None where it selects anything else."""
    match index:
        case (slice() as sequences, slice() as tokens, *rest):
            return tokens if sequences == _ALL and rest in ([], [_ALL]) else None
    return None


def check_order(hidden: TravellingState | Tensor, number: int) -> None:
    """Raise a ValueError where the host runs a layer in another order.

    Args:
        hidden: what the layer gets; a Tensor is an embedding.
        number: of the layer.

    Raises:
        ValueError: the order is another one.
        StreamUseError: the host has taken the hidden state apart.
    """
    check_whole(hidden)
    expected = hidden.next_layer if isinstance(hidden, TravellingState) else 0
    if number != expected:
        raise ValueError(
            f"layer {number} runs in the place of layer {expected}, and a connection needs each "
            "layer in order: connect a model once its layers are final; if it skips layers at "
            "random in training, set layerdrop=0; the stage of a pipeline needs the whole state"
        )


def check_whole(hidden: Any) -> None:
    """Raise a StreamUseError for a hidden state that the host has taken apart."""
    if isinstance(hidden, tuple) and not isinstance(hidden, TravellingState):
        raise StreamUseError(
            "an element of it",
            "; if it calls torch.utils.checkpoint, use_reentrant must be False; if it asks whether "
            "a layer's output is a tuple, it must not: the state is one",
        )


_REMEDY = "; crosslayer.disconnect restores the model, and docs/your-model.md says what it needs"


class StreamUseError(AttributeError):
    """A host uses the stream between two of its layers."""

    def __init__(self, use: str, remedy: str = _REMEDY):
        super().__init__(
            f"between connected layers, and from the last one to the final norm, there is a "
            f"connection's state in place of the stream: the host cannot use {use} there"
            f"{remedy}"
        )


class HiddenStateRecorder:
    """The hidden states of one forward pass.

    Each layer computes the hidden state before it from the state that it gets. It does so with its
    first connection and within its own call, because there the parameters are whole and on the
    device of the state, also where they are sharded or offloaded.
    """

    def __init__(self) -> None:
        self.layers = 0  # that have run
        self.hidden_states: list[Tensor] = []  # after each of these layers but the last
        self.last: TravellingState | Tensor  # what the last layer returns
        self.structure: StateStructure  # of it: the first item that hooks on this layer get

    def add_layer(
        self, before: Tensor | None, after: TravellingState | Tensor, structure: StateStructure
    ) -> None:
        """Record the hidden state before a layer, None before the first, and what it returns."""
        self.layers += 1
        if before is not None:
            self.hidden_states.append(before)
        self.last = after
        self.structure = structure


def read_hidden_state(
    layer: "ConnectedLayer", state: Any, dtype: torch.dtype, stream_scale: Tensor | None
) -> Tensor:
    """The hidden state before a layer, in the host's dtype: normed between post-norm layers."""
    connection = layer.connections[0]
    x = scale_stream(connection(state, "hidden_state"), stream_scale).to(dtype)
    return connection.norms[0](x) if layer.wiring.last_norm else x


def replace_recorded(
    backbone: Any, recorded: Sequence[Any], outputs: Any, recorder: HiddenStateRecorder
) -> tuple[Any, ...]:
    """The hidden states of a forward pass in place of those that transformers has recorded.

    Args:
        backbone: the connected model.
        recorded: what transformers has recorded in place of the hidden states.
        outputs: what the backbone's host's forward returned.
        recorder: what the layers recorded during this forward.

    Raises:
        ValueError: the host has recorded parts of states, and its layers got no recorder.
    """
    # Some hosts record what they pass from layer to layer, and may not pass on the recorder.
    if recorder.layers > 0 and not isinstance(recorded[0], TravellingState):
        return _take_from_recorder(backbone, recorded, outputs, recorder)
    if any(isinstance(hidden, StateStructure) for hidden in recorded):
        raise ValueError(
            "output_hidden_states, which you or the model's head asks for: this version of "
            f"transformers passes no further arguments from {type(backbone).__name__} to its "
            "layers, so they cannot report hidden states; disconnect the model, or try a later "
            "version"
        )
    return _read_from_states(backbone, recorded)


def replace_captured(backbone: Any, outputs: Any, recorder: HiddenStateRecorder) -> None:
    """Replace what the model around a connected part records of the part's layers, in place.

    The audio models' encoders leave it to the model around them, which has hooks on the layers.

    Args:
        backbone: the connected part.
        outputs: what its host's forward returned, without hidden states.
        recorder: what the layers recorded during this forward.
    """
    captured = (_active_collector.get() or {}).get("hidden_states")
    if not captured:
        return
    # The list may be of another part's layers. transformers puts a None for each hidden state whose
    # number the caller did not ask for.
    is_of_these_layers = recorder.layers > 0 and captured[-1] is recorder.structure
    if recorder.layers == 0 or captured[-1] is None or is_of_these_layers:
        captured[:] = replace_recorded(backbone, captured, outputs, recorder)


def _read_from_states(backbone: Any, recorded: Sequence[Any]) -> tuple[Any, ...]:
    """The hidden states, where the host has recorded whole states before and after its layers."""
    layers = backbone.wiring.find_layers(backbone)
    readers: list[Any] = [partial(_read_before, layer) for layer in layers]
    if backbone.wiring.final is not None:
        final = backbone.get_submodule(backbone.wiring.final)
        readers.append(partial(final, verb="hidden_state"))
    if isinstance(recorded[0], TravellingState):  # The embedding is not recorded.
        readers = readers[1:]
    hidden_states = list(recorded)
    for i, (reader, hidden) in enumerate(zip(readers, recorded, strict=False)):
        if isinstance(hidden, TravellingState):
            hidden_states[i] = reader(hidden)
    return tuple(hidden_states)


def _read_before(layer: "ConnectedLayer", hidden: TravellingState) -> Tensor:
    return read_hidden_state(layer, hidden.state, hidden.dtype, hidden.stream_scale)


def scale_stream(x: Tensor, stream_scale: Tensor | None) -> Tensor:
    """The host's stream where a connection's is x."""
    return x if stream_scale is None else x * stream_scale


def _take_from_recorder(
    backbone: Any, recorded: Sequence[Any], outputs: Any, recorder: HiddenStateRecorder
) -> tuple[Any, ...]:
    """The hidden states, where the host has recorded its layers' first outputs, which are parts of
    states.
    """
    hidden_states = list(recorded)
    # Some hosts record the embedding before the first layer's output.
    first = len(hidden_states) - recorder.layers
    for i, hidden in enumerate(recorded):
        if i < first or hidden is None or hidden is outputs.last_hidden_state:
            continue
        if i - first < len(recorder.hidden_states):
            hidden_states[i] = recorder.hidden_states[i - first]
        elif isinstance(recorder.last, TravellingState):
            # after the last layer, where the host does not return the readout here
            final = backbone.get_submodule(backbone.wiring.final)
            hidden_states[i] = final(recorder.last, verb="hidden_state")
        else:
            hidden_states[i] = recorder.last
    return tuple(hidden_states)
