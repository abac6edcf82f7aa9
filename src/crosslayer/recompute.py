"""Activation recomputation for states: n streams, or all outputs, in the memory of one stream.

    enable_recompute(sites)                          # once
    state = sites[0].init(embed(tokens))
    for connection, sublayer in zip(sites, sublayers):
        inputs, state = connection.read(state)
        with recompute_inputs(inputs, state):        # the only change to the loop
            y = sublayer(*inputs)
        state = connection.write(state, y)
    hidden = sites[-1].readout(state)

What a read saves for its backward, and the inputs it returns, are functions of the site's state.
The backward pass recomputes both. The state itself is recovered in one of two ways:

    streams      from a state saved at an earlier site and the outputs written since. This runs no
                 sub-layer: H_{k+1} = write(mix_inputs(H_k), y_k)
    inversion    from the state of the next site, for a method that can undo a write (MGR)

So most sites save only y, where PreNorm saves the norm's input. The autograd graph is that of the
plain loop. With "streams" every gradient is bitwise identical too.

In the forward pass a state is wrapped in a `TracedState`, which has all that its recovery needs: no
tensor is stored on a module. What it keeps is saved in nodes of autograd, so that hooks on saved
tensors count or offload it too. A sub-layer may be checkpointed; a block that contains reads may
not. A pipeline stage sends `traced.state`, and the next stage starts from it as a saved state.
Under `torch.func` and forward-mode AD nothing is recomputed: these have no hooks on saved tensors,
and `functional_call` takes its parameters away after the forward pass. What autograd would refuse,
a parameter or a saved tensor that is changed before the backward pass, is an error here too.
"""

import itertools
import reprlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .class_swap import swap_class
from .connection import Connection, State, autocast_disabled
from .forward_conditions import ForwardConditions, is_called_functionally, site_name
from .fsdp import unsharded_modules
from .method_checks import method_name
from .ops.manual_backward import is_transformed
from .validation import check_choice

RecomputeMode = Literal["streams", "inversion"]
_RECOMPUTE_LAYERS = "recompute whole layers (--recompute layers, or torch.utils.checkpoint)"


class TracedState(NamedTuple):
    """A state, and how to recover it in the backward pass."""

    state: State
    previous: "_RecomputedRead | None" = None  # the read that returned the state
    y: Tensor | None = None  # the output written since


class _SavedTree:
    """A tree of tensors, saved as autograd saves its own."""

    def __init__(self, tree: Any):
        leaves, self.spec = tree_flatten(tree)
        detached = [x if x is None else x.detach() for x in leaves]
        with torch.enable_grad():
            key = torch.empty(0, requires_grad=True)
            # The output is kept, because torch 2.11 frees what a node saved together with it.
            self.output = _SaveTensors.apply(key, *detached)

    def unpack_tree(self) -> Any:
        return tree_unflatten(list(self.output.grad_fn.saved_tensors), self.spec)


class _SaveTensors(torch.autograd.Function):
    """A node outside every graph that only saves its inputs. `key` makes autograd create it."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, *leaves: Tensor | None) -> Tensor:
        ctx.save_for_backward(*leaves)
        return key.clone()


class _RecomputedRead:
    """Recomputes one `read` of one site in the backward pass.

    Subclasses define how the site's state is recovered.

    Args:
        connection: the site.
        read: its plain `read`.
        keeps_state: save the state instead of recovering it. The first read always does.
        traced: the state that `read` gets.
    """

    def __init__(
        self,
        connection: Connection,
        read: Callable[[State], Any],
        keeps_state: bool,
        traced: TracedState,
    ):
        self.connection = connection
        self.read = read
        self.conditions = ForwardConditions(connection)
        self.input_keys: list[tuple[Any, ...]] = []  # of the inputs that the read returned
        self.previous = traced.previous
        self.keeps_state = keeps_state or self.previous is None
        self.requires_grad = tree_map(lambda x: x is not None and x.requires_grad, traced.state)
        to_keep = traced.state if self.keeps_state else self.tensors_to_keep(traced)
        self.kept_tensors = _SavedTree(to_keep)
        self.packed_count = 0  # tensors that the read would have saved
        # Those of them that the backward has not taken yet, by their index.
        self.recomputed_tensors: dict[int, Tensor] = {}
        # The sub-layer's inputs, while the backward of the sub-layer runs.
        self.recomputed_inputs: tuple[Tensor, ...] = ()

    @staticmethod
    def check_supported(connection: Connection) -> None:
        """Raise a ValueError for a method whose states cannot be recovered so."""
        raise NotImplementedError

    @staticmethod
    def keeps_state_of(connection: Connection, kept: Collection[int]) -> bool:
        """Whether a site's state is saved. kept: the layers before which a state may be saved."""
        raise NotImplementedError

    def tensors_to_keep(self, traced: TracedState) -> Any:
        """The tree of tensors to save where the state is not saved."""
        raise NotImplementedError

    def recover_state(self) -> State:
        """The state that the read got. Called once for each backward pass."""
        raise NotImplementedError

    def pack_index(self, _: Tensor) -> int:
        """Hook on tensors that the read saves: save an index instead."""
        self.packed_count += 1
        return self.packed_count - 1

    def unpack_index(self, index: int) -> Tensor:
        """Hook on tensors that the backward of the read needs."""
        if index not in self.recomputed_tensors:
            self.recompute_read()
        self.recomputed_inputs = ()  # the backward of the sub-layer is over
        return self.recomputed_tensors.pop(index)

    def recompute_input(self, port: int) -> Tensor:
        """The sub-layer's input at a port."""
        if not self.recomputed_inputs:
            self.recompute_read()
        return self.recomputed_inputs[port]

    def recompute_read(self) -> None:
        """Run the read on the recovered state, and collect what it saves and returns."""
        saved: list[Tensor] = []

        def collect(x: Tensor) -> None:
            # Return nothing: a node that saved its own output through a hook would never be freed.
            saved.append(x.detach())

        def as_in_forward(x: Tensor | None, requires_grad: bool) -> Tensor | None:
            return x if x is None else x.detach().requires_grad_(requires_grad)

        state = tree_map(as_in_forward, self.recover_state(), self.requires_grad)
        for module in _modules_sharded_now(self.connection):
            module.unshard()  # stays so, because its own backward is next
        with (
            self.conditions.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(collect, lambda x: x),
        ):
            inputs, _ = self.read(state)
        if len(saved) != self.packed_count:
            raise RuntimeError(
                f"the read of {site_name(self.connection)} saves {len(saved)} tensors in the "
                f"backward pass and saved {self.packed_count} in the forward pass: recompute needs "
                "a read that does the same in both"
            )
        self.recomputed_tensors = dict(enumerate(saved))
        self.recomputed_inputs = tuple(x.detach() for x in inputs)

    def advance_state(self, state: State, y: Tensor) -> State:
        """The state of the next site, given that of this one and the sub-layer's output."""
        connection = self.connection
        modules = _modules_sharded_now(connection)
        with (
            unsharded_modules(modules),
            self.conditions.restored(),
            torch.no_grad(),
            autocast_disabled(state),
        ):
            _, state = connection.mix_inputs(state)
            return connection.write(state, y)


class _ReplayFromSaved(_RecomputedRead):
    """Recovers its state from the nearest earlier site that saved one, by replaying writes.

    Keeps y. The replay passes the sites in between. Each of them caches its state for its own
    backward, which comes later, as the backward pass runs last to first, and then frees it.
    """

    cached_state: State = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        if self.keeps_state:
            self.previous = None  # nothing replays from further back, so free what is there

    @staticmethod
    def check_supported(connection: Connection) -> None:
        if connection.norms_its_stream:
            name = method_name(connection)
            raise ValueError(
                f'recompute="streams" is not supported by {name}, whose stream is normed by the '
                f"layers' norms; {_RECOMPUTE_LAYERS}"
            )

    @staticmethod
    def keeps_state_of(connection: Connection, kept: Collection[int]) -> bool:
        return connection.site.opens_layer and connection.site.layer in kept

    def tensors_to_keep(self, traced: TracedState) -> Any:
        return traced.y

    def recover_state(self) -> State:
        # Walk back to a site whose state is there, then forward again.
        path: list[_ReplayFromSaved] = [self]
        while not path[-1].keeps_state and path[-1].cached_state is None:
            path.append(path[-1].previous)  # type: ignore[arg-type]
        start = path.pop()
        state = start.kept_tensors.unpack_tree() if start.keeps_state else start.cached_state
        for read in reversed(path):
            y = read.kept_tensors.unpack_tree()
            state = read.previous.advance_state(state, y)  # type: ignore[union-attr]
            read.cached_state = state
        self.cached_state = None
        return state


class _InvertFromNext(_RecomputedRead):
    """Recovers its state from that of the next site, by undoing the write.

    Keeps y and the method's `inversion_context`. The next site passes its state down once it has
    recovered it, and the last site saves its own.
    """

    next_state: State = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.next_read: Callable[[], _InvertFromNext | None] = lambda: None
        if isinstance(self.previous, _InvertFromNext):
            self.previous.next_read = weakref.ref(self)

    @staticmethod
    def check_supported(connection: Connection) -> None:
        if not hasattr(connection, "invert"):
            name = method_name(connection)
            advice = _RECOMPUTE_LAYERS if connection.norms_its_stream else 'use "streams"'
            raise ValueError(f'recompute="inversion" is not supported by {name}; {advice}')

    @staticmethod
    def keeps_state_of(connection: Connection, kept: Collection[int]) -> bool:
        return connection.is_readout

    def tensors_to_keep(self, traced: TracedState) -> Any:
        return traced.y, self.connection.inversion_context(traced.state)

    def recover_state(self) -> State:
        state = self.kept_tensors.unpack_tree() if self.keeps_state else self._invert_write()
        if isinstance(self.previous, _InvertFromNext):
            self.previous.next_state = state
        return state

    def _invert_write(self) -> State:
        next_state = self.next_state
        self.next_state = None
        if next_state is None:
            next_read = self.next_read()
            if next_read is None:
                raise RuntimeError(
                    'recompute="inversion" needs the backward pass to start at the readout'
                )
            next_state = next_read.recover_state()
            self.next_state = None
        y, context = self.kept_tensors.unpack_tree()
        y = None if y is None else self.connection.to_stream_dtype(y)
        return self.connection.invert(next_state, y, context)


class RecomputedConnection:
    """Mixin of a connection whose reads are recomputed in the backward pass."""

    recomputed_read: type[_RecomputedRead]
    keeps_state: bool

    def read(self, state: State) -> Any:
        this: Any = self
        if not isinstance(state, TracedState):  # the first site, or the first after a pipeline cut
            if not torch.is_grad_enabled() or is_transformed() or is_called_functionally(this):
                return super().read(state)  # type: ignore[misc]
            state = TracedState(state)
        return self._traced_read(state)

    @torch._disable_dynamo  # compiled, it would not save what it saves when it is recomputed
    def _traced_read(self, state: TracedState) -> Any:
        plain_read = super().read  # type: ignore[misc]
        this: Any = self
        read = self.recomputed_read(this, plain_read, self.keeps_state, state)
        with saved_tensors_hooks(read.pack_index, read.unpack_index):
            inputs, next_state = plain_read(state.state)
        read.input_keys = [_storage_key(x) for x in inputs]
        return inputs, TracedState(next_state, read)

    def write(self, state: State, y: Tensor) -> State:
        if not isinstance(state, TracedState):
            return super().write(state, y)  # type: ignore[misc]
        written = super().write(state.state, y)  # type: ignore[misc]
        return TracedState(written, state.previous, y.detach())

    def hidden_state(self, state: State) -> Tensor:
        plain_state = state.state if isinstance(state, TracedState) else state
        return super().hidden_state(plain_state)  # type: ignore[misc]


def map_pending_write(change: Callable[[Tensor], Tensor], state: State) -> State:
    """The state with its pending write changed, recovered so in the backward pass too."""
    if isinstance(state, TracedState):
        inner = map_pending_write(change, state.state)
        return TracedState(inner, state.previous, inner.y.detach())
    return state._replace(y=change(state.y))


RECOMPUTE_MODES: dict[str, type[_RecomputedRead]] = {
    "streams": _ReplayFromSaved,
    "inversion": _InvertFromNext,
}


def enable_recompute(
    sites: Sequence[Connection],
    recompute: RecomputeMode = "streams",
    kept: Collection[int] | None = None,
) -> None:
    """Recompute the reads and the states of a model's sites in its backward pass.

    Args:
        sites: all sites of the model, in the order of depth.
        recompute: "streams" replays the writes from a few saved states; "inversion" undoes the
            writes, starting at the readout.
        kept: for "streams", the numbers of the layers before which a state is saved; the readout
            counts as a layer. By default those of `saved_layers_log2`.

    Raises:
        ValueError: the method of a site does not support `recompute`, the last site is not the
            readout, or `kept` has a layer that there is not.
    """
    recomputed_read = check_choice("recompute", recompute, RECOMPUTE_MODES)
    sites = list(sites)
    if not sites or not all(isinstance(site, Connection) for site in sites):
        given = reprlib.repr([type(site).__name__ for site in sites])
        raise ValueError(f"enable_recompute takes a list of a model's connections, got {given}")
    if not sites[-1].is_readout:
        raise ValueError(f"the last site must be the readout, got {site_name(sites[-1])}")
    for connection in sites:
        recomputed_read.check_supported(connection)
    layers = sites[-1].site.layer
    if kept is None:
        kept = saved_layers_log2(layers)
    elif recompute != "streams":
        raise ValueError(f'kept is for recompute="streams", and {recompute!r} keeps no states')
    elif not set(kept) <= set(range(layers + 1)):
        raise ValueError(f"kept must have layers from 0 to {layers}, got {sorted(kept)}")
    for connection in sites:
        keeps_state = recomputed_read.keeps_state_of(connection, kept)
        swap_class(connection, RecomputedConnection)
        vars(connection).update(recomputed_read=recomputed_read, keeps_state=keeps_state)


def saved_layers_log2(layers: int) -> set[int]:
    """The layers before which a state is saved: 1, 2, 4, … layers apart, from the last on.

    Saving a state of n·D a token every s of S sites, and caching s states while the backward pass
    is within such a segment, takes n·D·(S/s + s): least at s = √S. But only the last segment meets
    all of that at once. When the backward pass reaches another segment, every layer after it has
    freed what its sub-layers saved, 17·D in a Llama, more than the 2n·D of a layer's two states. So
    a segment may be as long as all segments after it together. That saves log₂ S states instead of
    √S, and memory peaks where the backward pass begins, with the states of one layer cached.
    """
    return {max(layers - (2**i - 1), 0) for i in range(1, layers.bit_length() + 1)}


def recompute_inputs(inputs: tuple[Tensor, ...], state: State) -> AbstractContextManager[Any]:
    """A context for calling a sub-layer: inputs that it saves are recomputed in the backward pass.

    Args:
        inputs: as `read` returned them.
        state: as `read` returned it. Without `enable_recompute` the context does nothing.
    """
    if isinstance(state, TracedState) and state.previous is not None:
        return _recompute_inputs(inputs, state.previous)
    return nullcontext()


class _SavedInput(NamedTuple):
    """Stands for a saved tensor that is an input of the sub-layer."""

    port: int
    shape: torch.Size


@contextmanager
def _recompute_inputs(inputs: tuple[Tensor, ...], read: _RecomputedRead) -> Iterator[None]:
    # Autograd calls only the innermost hooks, so tensors that are no inputs go to the outer ones.
    outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    outer_pack, outer_unpack = outer_hooks or (_pack_with_version, _unpack_with_version)
    # A hook on the connection may have replaced what the read returned.
    ports = {
        key: port
        for port, (x, key) in enumerate(zip(inputs, read.input_keys, strict=False))
        if x.is_contiguous() and _storage_key(x) == key
    }

    def pack(x: Tensor) -> Any:
        port = ports.get(_storage_key(x)) if x.is_contiguous() else None
        return outer_pack(x) if port is None else _SavedInput(port, x.shape)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _SavedInput):
            return read.recompute_input(packed.port).view(packed.shape)
        return outer_unpack(packed)

    with saved_tensors_hooks(pack, unpack):
        yield


def _pack_with_version(x: Tensor) -> tuple[Tensor, int]:
    """A saved tensor with what tells whether it is changed in place, as autograd keeps it."""
    return x.detach(), x._version


def _unpack_with_version(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {list(x.shape)} that a sub-layer saved is at version {x._version}, "
            f"expected version {version}"
        )
    return x


def _storage_key(x: Tensor) -> tuple[Any, ...]:
    """Equal for a tensor and its views of another shape, until one of them is written into."""
    # The storage object itself, because meta tensors have no address.
    return x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.dtype, x._version


def _modules_sharded_now(connection: Connection) -> list[Any]:
    """The modules that FSDP2 has sharded a connection's parameters with, and that are so now.

    A norm may be sharded with its connection. A DTensor that is not divided is whole already.
    """
    sharded: list[Any] = []
    for module in connection.modules():
        placements = [getattr(p, "placements", ()) for p in module._parameters.values()]
        if any(placement.is_shard() for placement in itertools.chain(*placements)):
            sharded.append(module if hasattr(module, "unshard") else connection)
    if not all(hasattr(module, "unshard") for module in sharded):
        raise ValueError(
            "FSDP2 sharded a connection together with its layer, but another site's state "
            "needs its parameters: shard connections separately, or save every layer's state "
            "with enable_recompute(sites, kept=range(layers + 1))"
        )
    return list(dict.fromkeys(sharded))
