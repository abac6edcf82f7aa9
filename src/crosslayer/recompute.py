"""Activation recomputation for states: n streams, or all outputs, in the memory of one stream.

    enable_recompute(sites)                          # once
    state = sites[0].init(embed(tokens))
    for connection, sublayer in zip(sites, sublayers):
        inputs, state = connection.read(state)
        with recompute_inputs(inputs, state):        # the only change to the loop
            y = sublayer(*inputs)
        state = connection.write(state, y)
    hidden = sites[-1].readout(state)

The autograd graph is that of the plain loop. With "streams" every gradient is bitwise identical
too. A sub-layer may be checkpointed; a block that contains reads may not. A pipeline stage sends
the `state` of its `TracedState`, and the next stage starts from it as a saved state. Under
`torch.func` and forward-mode AD nothing is recomputed: these have no hooks on saved tensors, and
`functional_call` takes its parameters away after the forward pass. What autograd would refuse, a
parameter or a saved tensor that is changed before the backward pass, is an error here too.
"""

import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .class_swap import swap_class
from .connection import Connection, State
from .forward_conditions import is_called_functionally, site_name
from .ops.manual_backward import is_transformed
from .recomputed_reads import InvertFromNext, RecomputedRead, ReplayFromSaved, TracedState
from .validation import check_choice

RecomputeMode = Literal["streams", "inversion"]


class RecomputedConnection:
    """Mixin of a connection whose reads are recomputed in the backward pass."""

    recomputed_read: type[RecomputedRead]
    keeps_state: bool

    def read(self, state: State) -> Any:
        this: Any = self
        if not isinstance(state, TracedState):  # the first site, or the first after a pipeline cut
            if not torch.is_grad_enabled() or is_transformed() or is_called_functionally(this):
                return super().read(state)  # type: ignore[misc]
            state = TracedState(state)
        elif is_called_functionally(this):  # sites without parameters cannot tell
            return super().read(state.state)  # type: ignore[misc]
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


RECOMPUTE_MODES: dict[str, type[RecomputedRead]] = {
    "streams": ReplayFromSaved,
    "inversion": InvertFromNext,
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
        ValueError: `recompute` is unknown, a site's method does not support it, `sites` are not a
            model's connections or do not end with the readout, or `kept` has a layer that there is
            not or is given with "inversion".
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
def _recompute_inputs(inputs: tuple[Tensor, ...], read: RecomputedRead) -> Iterator[None]:
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
