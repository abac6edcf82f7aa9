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

from .connection import Connection, State, as_written, choice
from .roles import become


class Traced(NamedTuple):
    """A state on its way, and how the sites behind it have theirs back."""

    state: State
    behind: "Read | None" = None  # the site it comes from
    y: Tensor | None = None  # written since


class Kept:
    """A tree of tensors, kept as autograd keeps its own."""

    def __init__(self, tree: Any):
        leaves, self.spec = tree_flatten(tree)
        with torch.enable_grad():
            key = torch.empty(0, requires_grad=True)
            self.node: Any = Keep.apply(key, *(x if x is None else x.detach() for x in leaves)).grad_fn

    def tree(self) -> Any:
        return tree_unflatten(list(self.node.saved_tensors), self.spec)


class Keep(torch.autograd.Function):
    """A node of no graph, for what it saves."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, *leaves: Tensor | None) -> Tensor:
        ctx.save_for_backward(*leaves)
        return key.clone()


class Read:
    """One read of one site, to be made once more. How its state is had back, its kind knows."""

    def __init__(self, connection: Connection, read: Callable[[State], Any], whole: bool, traced: Traced):
        self.connection, self.read = connection, read
        self.behind = traced.behind
        self.whole = whole or self.behind is None
        self.needs = tree_map(lambda x: x is not None and x.requires_grad, traced.state)
        self.kept = Kept(traced.state if self.whole else self.rest(traced))
        self.packed = 0  # tensors that the read would have kept ...
        self.saved: dict[int, Tensor] = {}  # ... and those of them that the backward has still to take
        self.inputs: tuple[Tensor, ...] = ()  # of the sub-layer, while its backward runs

    def rest(self, traced: Traced) -> Any:
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
        self.inputs = ()  # the sub-layer is behind us
        return self.saved.pop(index)

    def input(self, port: int) -> Tensor:
        if not self.inputs:
            self.again()
        return self.inputs[port]

    def again(self) -> None:
        found: list[Tensor] = []
        state = self.state()
        state = tree_map(lambda x, needs: x if x is None else x.detach().requires_grad_(needs), state, self.needs)
        unshard(self.connection)  # and so it stays, as its own backward is next
        with torch.enable_grad(), saved_tensors_hooks(lambda x: found.append(x.detach()), lambda x: x):
            inputs, _ = self.read(state)
        assert len(found) == self.packed, "a read must be pure"
        self.saved, self.inputs = dict(enumerate(found)), tuple(x.detach() for x in inputs)


class Onward(Read):
    """Its state is that of the nearest site behind it that keeps one, moved on; y is kept.

    The sites between have theirs then too, and give them up one by one, last to first.
    """

    held: State = None

    def __init__(self, *read: Any):
        super().__init__(*read)
        if self.whole:
            self.behind = None  # nobody goes further back, so that what is there may be freed

    def rest(self, traced: Traced) -> Any:
        return traced.y

    def state(self) -> State:
        path: list[Onward] = [self]
        while not path[-1].whole and path[-1].held is None:
            path.append(path[-1].behind)  # type: ignore[arg-type]
        start = path.pop()
        state = start.kept.tree() if start.whole else start.held
        for read in reversed(path):
            state = read.held = moved(read.behind.connection, state, read.kept.tree())  # type: ignore[union-attr]
        self.held = None
        return state


class Inverted(Read):
    """Its state is that of the next site with the write undone; y and what the method spares are kept.

    The next site hands its own down when it has it back, and the last one keeps it whole.
    """

    after: State = None

    def __init__(self, *read: Any):
        super().__init__(*read)
        self.ahead: Callable[[], Inverted | None] = lambda: None
        if isinstance(self.behind, Inverted):
            self.behind.ahead = weakref.ref(self)

    def rest(self, traced: Traced) -> Any:
        return traced.y, self.connection.spare(traced.state)

    def state(self) -> State:
        if self.whole:
            state = self.kept.tree()
        else:
            after, self.after = self.after, None
            if after is None and (ahead := self.ahead()) is not None:
                after, self.after = ahead.state(), None
            if after is None:
                raise RuntimeError("inversion goes from the readout back: no backward pass may begin before it")
            y, spared = self.kept.tree()
            state = self.connection.invert(after, None if y is None else self.connection.streamed(y), spared)
        if isinstance(self.behind, Inverted):
            self.behind.after = state
        return state


class Retraced:
    """A connection whose reads are made once more in the backward pass."""

    kind: type[Read]
    whole: bool  # its state is kept

    def read(self, state: State) -> Any:
        if not isinstance(state, Traced):  # the first, or one that came over a pipeline cut
            if not torch.is_grad_enabled():
                return super().read(state)  # type: ignore[misc]
            state = Traced(state)
        read = self.kind(self, super().read, self.whole, state)  # type: ignore[arg-type, misc]
        with saved_tensors_hooks(read.pack, read.unpack):
            inputs, after = super().read(state.state)  # type: ignore[misc]
        return inputs, Traced(after, read)

    def write(self, state: State, y: Tensor) -> State:
        if not isinstance(state, Traced):
            return super().write(state, y)  # type: ignore[misc]
        return Traced(super().write(state.state, y), state.behind, y.detach())  # type: ignore[misc]

    def hidden(self, state: State) -> Tensor:
        return super().hidden(state.state if isinstance(state, Traced) else state)  # type: ignore[misc]


def retrace(sites: Sequence[Connection], how: str = "streams", kept: Collection[int] | None = None) -> None:
    """From now on the reads of a model's sites are made once more in its backward pass, and their states had back.

    Args:
        sites: all of them, in the order of depth.
        how: "streams", onward from the states that are kept; or "inversion", backward from the last.
        kept: the layers, of which the readout is one, before which "streams" keeps a state; `doubling`'s by default.

    Raises:
        ValueError: the method has no such way back.
    """
    kind, name = choice("how", how, KINDS), type(sites[0]).__module__.rpartition(".")[2]
    if kind is Inverted and not hasattr(sites[0], "invert"):
        raise ValueError(f"{name} has no inversion, as its writes cannot be undone; recompute streams, reads or layers")
    if kind is Onward and sites[0].renorms:
        raise ValueError(f"{name}'s stream goes through the layers' norms, which are not moved on; recompute layers")
    kept = doubling(sites[-1].site.layer) if kept is None else kept
    for connection in sites:
        whole = connection.last if kind is Inverted else connection.site.opens and connection.site.layer in kept
        become(connection, Retraced)
        vars(connection).update(kind=kind, whole=whole)


KINDS: dict[str, type[Read]] = {"streams": Onward, "inversion": Inverted}


def doubling(layers: int) -> set[int]:
    """The layers before which a state is kept: 1, 2, 4, … layers apart, from the last to the first.

    Of S sites, a state of n·D a token kept every s of them, and s states held while such a segment has its backward
    pass, are n·D·(S/s + s): least at s = √S. But all of that is there at once for the last segment alone. Once the
    backward pass is at another, every layer after it has given up what its sub-layers kept, 17·D in a Llama, against
    the 2n·D of a layer's two states. So a segment may be as long as all after it together: log₂ many states are kept
    instead of √ many, and the peak is where the backward pass begins, with the states of one layer held.
    """
    return {max(layers - (2**i - 1), 0) for i in range(1, layers.bit_length() + 1)}


def recalled(inputs: tuple[Tensor, ...], state: State) -> AbstractContextManager[Any]:
    """Around a sub-layer: its inputs, wherever it would keep them whole, are had back from the read that made them."""
    return recalling(inputs, state.behind) if isinstance(state, Traced) and state.behind else nullcontext()


class Port(NamedTuple):
    """A saved tensor that is an input of the sub-layer."""

    number: int
    shape: torch.Size


@contextmanager
def recalling(inputs: tuple[Tensor, ...], read: Read) -> Iterator[None]:
    # of hooks on saved tensors the innermost alone are called: what is no input goes to those around
    keep, give = torch._C._autograd._top_saved_tensors_default_hooks(False) or (Tensor.detach, lambda x: x)
    ports = {key(x): i for i, x in enumerate(inputs) if x.is_contiguous()}

    def pack(x: Tensor) -> Any:
        port = ports.get(key(x)) if x.is_contiguous() else None
        return keep(x) if port is None else Port(port, x.shape)

    def unpack(packed: Any) -> Tensor:
        return read.input(packed.number).view(packed.shape) if isinstance(packed, Port) else give(packed)

    with saved_tensors_hooks(pack, unpack):
        yield


def key(x: Tensor) -> tuple[Any, ...]:
    """What a tensor shares with its views of another shape, until it is written into."""
    # the storage itself, as meta tensors have no address
    return x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.dtype, x._version


def moved(connection: Connection, state: State, y: Tensor) -> State:
    """The state that the next site reads."""
    sharded = unshard(connection)
    with torch.no_grad(), as_written(state):
        state = connection.write(connection.gather(state)[1], y)
    for module in sharded:
        module.reshard()
    return state


def unshard(connection: Connection) -> list[Any]:
    """What of it FSDP2 had sharded, which is there as a whole now."""
    sharded: list[Any] = [
        m for m in connection.modules() if any(hasattr(p, "to_local") for p in m._parameters.values())
    ]
    for module in sharded:
        if not hasattr(module, "unshard"):
            raise ValueError(
                "FSDP2 sharded a connection with its layer, but another's state needs it: shard connections apart, or "
                "keep every layer's state, retrace(sites, kept=range(layers + 1))"
            )
        module.unshard()
    return sharded
