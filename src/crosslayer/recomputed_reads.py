"""How the backward pass recomputes the read of a site, and recovers the state that it got.

What a read saves for its backward, and the inputs it returns, are functions of the site's state.
The backward pass recomputes both. The state itself is recovered in one of two ways:

    ReplayFromSaved    from a state saved at an earlier site and the outputs written since. This
                       runs no sub-layer: H_{k+1} = write(mix_inputs(H_k), y_k)
    InvertFromNext     from the state of the next site, for a method that can undo a write (MGR)

So most sites save only y, where PreNorm saves the norm's input. In the forward pass a state is
wrapped in a `TracedState`, which has all that its recovery needs: no tensor is stored on a module.
What it keeps is saved in nodes of autograd, so that hooks on saved tensors count or offload it too.
"""

import itertools
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .connection import Connection, State, autocast_disabled
from .forward_conditions import ForwardConditions, site_name
from .fsdp import unsharded_modules
from .method_checks import method_name

_RECOMPUTE_LAYERS = "recompute whole layers (--recompute layers, or torch.utils.checkpoint)"


class TracedState(NamedTuple):
    """A state, and how to recover it in the backward pass."""

    state: State
    previous: "RecomputedRead | None" = None  # the read that returned the state
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


class RecomputedRead:
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


class ReplayFromSaved(RecomputedRead):
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
        path: list[ReplayFromSaved] = [self]
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


class InvertFromNext(RecomputedRead):
    """Recovers its state from that of the next site, by undoing the write.

    Keeps y and the method's `inversion_context`. The next site passes its state down once it has
    recovered it, and the last site saves its own.
    """

    next_state: State = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.next_read: Callable[[], InvertFromNext | None] = lambda: None
        if isinstance(self.previous, InvertFromNext):
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
        if isinstance(self.previous, InvertFromNext):
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
