"""n streams in the memory of one: in the backward pass a site's state is had back, not kept.

    retrace(sites)                                   # once; then, in anyone's code, as ever but for `recalled`
    state = sites[0].init(embed(tokens))
    for connection, sublayer in zip(sites, sublayers):
        inputs, state = connection.read(state)
        with recalled(inputs, state):
            y = sublayer(*inputs)
        state = connection.write(state, y)
    hidden = sites[-1].readout(state)

What a read keeps for the backward is a function of its state, and so is what it hands to the sub-layer: both are made
once more when they are asked for. The state itself comes

    onward    from an earlier one and the outputs written since, as no sub-layer is needed for that:
              H_{k+1} = write(gather(H_k), y_k)
    inverted  from the next one, where the method can undo a write (MGR)

so that of a site y alone is kept, in the place of the norm's input that PreNorm keeps. The graph is that of the plain
loop, and onward every gradient is too, to the last bit.

A state on its way is `Traced`, and carries all there is to know: nothing is stored on a module. What is kept is kept
as autograd keeps its own, and hooks on saved tensors count or offload it. A sub-layer may be checkpointed; a block with
reads in it may not. Over a pipeline cut goes `traced.state`, and the next stage begins with a state that it keeps.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .class_swap import swap_class
from .connection import Connection, State, autocast_disabled
from .validation import check_choice


class TracedState(NamedTuple):
    """A state on its way, and how the sites previous it have theirs back."""

    state: State
    previous: "_RecomputedRead | None" = None  # the site it comes from
    y: Tensor | None = None  # written since


class _SavedTree:
    """A tree of tensors, kept as autograd keeps its own."""

    def __init__(self, tree: Any):
        leaves, self.spec = tree_flatten(tree)
        with torch.enable_grad():
            key = torch.empty(0, requires_grad=True)
            self.node: Any = _SaveTensors.apply(
                key, *(x if x is None else x.detach() for x in leaves)
            ).grad_fn

    def tree(self) -> Any:
        return tree_unflatten(list(self.node.saved_tensors), self.spec)


class _SaveTensors(torch.autograd.Function):
    """A node of no graph, for what it saves."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, *leaves: Tensor | None) -> Tensor:
        ctx.save_for_backward(*leaves)
        return key.clone()


class _RecomputedRead:
    """One read of one site, to be made once more. How its state is had back, its kind knows."""

    def __init__(
        self, connection: Connection, read: Callable[[State], Any], whole: bool, traced: TracedState
    ):
        self.connection, self.read = connection, read
        self.previous = traced.previous
        self.whole = whole or self.previous is None
        self.needs = tree_map(lambda x: x is not None and x.requires_grad, traced.state)
        self.kept = _SavedTree(traced.state if self.whole else self.tensors_to_keep(traced))
        self.packed = 0  # tensors that the read would have kept ...
        self.saved: dict[
            int, Tensor
        ] = {}  # ... and those of them that the backward has still to take
        self.inputs: tuple[Tensor, ...] = ()  # of the sub-layer, while its backward runs

    def tensors_to_keep(self, traced: TracedState) -> Any:
        """What is kept of a state that is not kept whole."""
        raise NotImplementedError

    def state(self) -> State:
        raise NotImplementedError

    def pack(self, _: Tensor) -> int:
        self.packed += 1
        return self.packed - 1

    def unpack(self, index: int) -> Tensor:
        if index not in self.saved:
            self.again()
        self.inputs = ()  # the sub-layer is previous us
        return self.saved.pop(index)

    def input(self, port: int) -> Tensor:
        if not self.inputs:
            self.again()
        return self.inputs[port]

    def again(self) -> None:
        found: list[Tensor] = []
        state = self.state()
        state = tree_map(
            lambda x, needs: x if x is None else x.detach().requires_grad_(needs), state, self.needs
        )
        _unshard(self.connection)  # and so it stays, as its own backward is next
        with (
            torch.enable_grad(),
            saved_tensors_hooks(lambda x: found.append(x.detach()), lambda x: x),
        ):
            inputs, _ = self.read(state)
        assert len(found) == self.packed, "a read must be pure"
        self.saved, self.inputs = dict(enumerate(found)), tuple(x.detach() for x in inputs)


class _ReplayFromCheckpoint(_RecomputedRead):
    """Its state is that of the nearest site previous it that keeps one, moved on; y is kept.

    The sites between have theirs then too, and give them up one by one, last to first.
    """

    held: State = None

    def __init__(self, *read: Any):
        super().__init__(*read)
        if self.whole:
            self.previous = None  # nobody goes further back, so that what is there may be freed

    def tensors_to_keep(self, traced: TracedState) -> Any:
        return traced.y

    def state(self) -> State:
        path: list[_ReplayFromCheckpoint] = [self]
        while not path[-1].whole and path[-1].held is None:
            path.append(path[-1].previous)  # type: ignore[arg-type]
        start = path.pop()
        state = start.kept.tree() if start.whole else start.held
        for read in reversed(path):
            state = read.held = _advance_state(read.previous.connection, state, read.kept.tree())  # type: ignore[union-attr]
        self.held = None
        return state


class _InvertFromNext(_RecomputedRead):
    """Its state is that of the next site with the write undone; y and what the method spares are kept.

    The next site hands its own down when it has it back, and the last one keeps it whole.
    """

    after: State = None

    def __init__(self, *read: Any):
        super().__init__(*read)
        self.ahead: Callable[[], _InvertFromNext | None] = lambda: None
        if isinstance(self.previous, _InvertFromNext):
            self.previous.ahead = weakref.ref(self)

    def tensors_to_keep(self, traced: TracedState) -> Any:
        return traced.y, self.connection.inversion_context(traced.state)

    def state(self) -> State:
        if self.whole:
            state = self.kept.tree()
        else:
            after, self.after = self.after, None
            if after is None and (ahead := self.ahead()) is not None:
                after, self.after = ahead.state(), None
            if after is None:
                raise RuntimeError(
                    "inversion goes from the readout back: no backward pass may begin before it"
                )
            y, spared = self.kept.tree()
            state = self.connection.invert(
                after, None if y is None else self.connection.to_stream_dtype(y), spared
            )
        if isinstance(self.previous, _InvertFromNext):
            self.previous.after = state
        return state


class RecomputedConnection:
    """A connection whose reads are made once more in the backward pass."""

    kind: type[_RecomputedRead]
    whole: bool  # its state is kept

    def read(self, state: State) -> Any:
        if not isinstance(state, TracedState):  # the first, or one that came over a pipeline cut
            if not torch.is_grad_enabled():
                return super().read(state)  # type: ignore[misc]
            state = TracedState(state)
        read = self.kind(self, super().read, self.whole, state)  # type: ignore[arg-type, misc]
        with saved_tensors_hooks(read.pack, read.unpack):
            inputs, after = super().read(state.state)  # type: ignore[misc]
        return inputs, TracedState(after, read)

    def write(self, state: State, y: Tensor) -> State:
        if not isinstance(state, TracedState):
            return super().write(state, y)  # type: ignore[misc]
        return TracedState(super().write(state.state, y), state.previous, y.detach())  # type: ignore[misc]

    def hidden_state(self, state: State) -> Tensor:
        return super().hidden_state(state.state if isinstance(state, TracedState) else state)  # type: ignore[misc]


def enable_recompute(
    sites: Sequence[Connection], how: str = "streams", kept: Collection[int] | None = None
) -> None:
    """From now on the reads of a model's sites are made once more in its backward pass, and their states had back.

    Args:
        sites: all of them, in the order of depth.
        how: "streams", onward from the states that are kept; or "inversion", backward from the last.
        kept: the layers, of which the readout is one, before which "streams" keeps a state; `doubling`'s by default.

    Raises:
        ValueError: the method has no such way back.
    """
    kind, name = (
        check_choice("how", how, RECOMPUTE_MODES),
        type(sites[0]).__module__.rpartition(".")[2],
    )
    if kind is _InvertFromNext and not hasattr(sites[0], "invert"):
        raise ValueError(
            f"{name} has no inversion, as its writes cannot be undone; recompute streams, reads or layers"
        )
    if kind is _ReplayFromCheckpoint and sites[0].norms_its_stream:
        raise ValueError(
            f"{name}'s stream goes through the layers' norms, which are not moved on; recompute layers"
        )
    kept = checkpoint_layers_log2(sites[-1].site.layer) if kept is None else kept
    for connection in sites:
        whole = (
            connection.is_readout
            if kind is _InvertFromNext
            else connection.site.opens_layer and connection.site.layer in kept
        )
        swap_class(connection, RecomputedConnection)
        vars(connection).update(kind=kind, whole=whole)


RECOMPUTE_MODES: dict[str, type[_RecomputedRead]] = {
    "streams": _ReplayFromCheckpoint,
    "inversion": _InvertFromNext,
}


def checkpoint_layers_log2(layers: int) -> set[int]:
    """The layers before which a state is kept: 1, 2, 4, … layers apart, from the last to the first.

    Of S sites, a state of n·D a token kept every s of them, and s states held while such a segment has its backward
    pass, are n·D·(S/s + s): least at s = √S. But all of that is there at once for the last segment alone. Once the
    backward pass is at another, every layer after it has given up what its sub-layers kept, 17·D in a Llama, against
    the 2n·D of a layer's two states. So a segment may be as long as all after it together: log₂ many states are kept
    instead of √ many, and the peak is where the backward pass begins, with the states of one layer held.
    """
    return {max(layers - (2**i - 1), 0) for i in range(1, layers.bit_length() + 1)}


def recompute_inputs(inputs: tuple[Tensor, ...], state: State) -> AbstractContextManager[Any]:
    """Around a sub-layer: its inputs, wherever it would keep them whole, are had back from the read that made them."""
    return (
        _recompute_inputs(inputs, state.previous)
        if isinstance(state, TracedState) and state.previous
        else nullcontext()
    )


class _SavedPort(NamedTuple):
    """A saved tensor that is an input of the sub-layer."""

    number: int
    shape: torch.Size


@contextmanager
def _recompute_inputs(inputs: tuple[Tensor, ...], read: _RecomputedRead) -> Iterator[None]:
    # of hooks on saved tensors the innermost alone are called: what is no input goes to those around
    keep, give = torch._C._autograd._top_saved_tensors_default_hooks(False) or (
        Tensor.detach,
        lambda x: x,
    )
    ports = {_storage_key(x): i for i, x in enumerate(inputs) if x.is_contiguous()}

    def pack(x: Tensor) -> Any:
        port = ports.get(_storage_key(x)) if x.is_contiguous() else None
        return keep(x) if port is None else _SavedPort(port, x.shape)

    def unpack(packed: Any) -> Tensor:
        return (
            read.input(packed.number).view(packed.shape)
            if isinstance(packed, _SavedPort)
            else give(packed)
        )

    with saved_tensors_hooks(pack, unpack):
        yield


def _storage_key(x: Tensor) -> tuple[Any, ...]:
    """What a tensor shares with its views of another shape, until it is written into."""
    # the storage itself, as meta tensors have no address
    return x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.dtype, x._version


def _advance_state(connection: Connection, state: State, y: Tensor) -> State:
    """The state that the next site reads."""
    sharded = _unshard(connection)
    with torch.no_grad(), autocast_disabled(state):
        state = connection.write(connection.mix_inputs(state)[1], y)
    for module in sharded:
        module.reshard()
    return state


def _unshard(connection: Connection) -> list[Any]:
    """What of it FSDP2 had sharded, which is there as a whole now."""
    sharded: list[Any] = [
        m
        for m in connection.modules()
        if any(hasattr(p, "to_local") for p in m._parameters.values())
    ]
    for module in sharded:
        if not hasattr(module, "unshard"):
            raise ValueError(
                "FSDP2 sharded a connection with its layer, but another's state needs it: shard connections apart, or "
                "keep every layer's state, retrace(sites, kept=range(layers + 1))"
            )
        module.unshard()
    return sharded
