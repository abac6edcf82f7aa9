"""What a host's modules become: the body, its layers, its final norm, and the norms that connections borrow."""

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..class_swap import swap_class
from ..connection import Connection
from ..recompute import RecomputedConnection, recompute_inputs
from .families import Family, Modulation, Sublayer
from .qkv import QKVInputs


class ConnectedModel:
    """The model that owns the layers. transformers initialises through it what a checkpoint lacks."""

    arm: str  # the connection's name and options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = getattr(self, "config", None)
        if not kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        as_dict, seen = kwargs.pop("return_dict", None), []  # type: ignore[var-annotated]
        # transformers records parts of the states; the layers append what a model calls its hidden states
        out = super().forward(*args, **kwargs, return_dict=True, recorder=seen)  # type: ignore[misc]
        first = len(out.hidden_states) - len(seen)  # the embedding, where it is recorded
        out.hidden_states = tuple(
            state
            if i < first or state is None or state is out.last_hidden_state
            else seen[i - first]
            for i, state in enumerate(out.hidden_states)
        )
        return out if (config.return_dict if as_dict is None else as_dict) else out.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, OwnedNorm):
            mine, origin = (
                dict(module.named_parameters()),
                dict(module.origin[0].named_parameters()),
            )
            lacking = [n for n, p in mine.items() if not getattr(p, "_is_hf_initialized", False)]
            if all(getattr(origin[n], "_is_hf_initialized", False) for n in lacking):
                module.follow(lacking)
            else:  # the final norm is initialised after what is beneath it
                super()._init_weights(module)  # type: ignore[misc]
        elif isinstance(module, Connection):
            own = dict(module.named_parameters(recurse=False))
            loaded = {
                n: p.detach().clone()
                for n, p in own.items()
                if getattr(p, "_is_hf_initialized", False)
            }
            module.reset_parameters()
            with torch.no_grad():
                for name, value in loaded.items():
                    own[name].copy_(value)
        else:
            super()._init_weights(module)  # type: ignore[misc]


class HiddenState(NamedTuple):
    """What the host takes for its hidden states between layers."""

    state: Any
    like: Tensor  # empty, of the embedding's dtype: the streams' own may be another

    @property
    def dtype(self) -> torch.dtype:  # DiT asks
        return self.like.dtype


class OpaqueSpec:
    """A pytree's structure on its way through a layer: a dataclass, as which FSDP would take it apart."""

    def __init__(self, spec: TreeSpec):
        self.spec = spec


class ConnectionOwner:
    """A module with connections beneath it."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name, norm in self.named_modules():  # type: ignore[attr-defined]
            if isinstance(norm, OwnedNorm):
                for key in norm.state_dict():  # type: ignore[attr-defined]
                    host = prefix + norm.path + key
                    if host in state_dict:
                        state_dict.setdefault(f"{prefix}{name}.{key}", state_dict[host])
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class ConnectedLayer(ConnectionOwner):
    """A layer whose `hidden_states` is the connection's state.

    The state's tensors travel flat through `forward`, as reentrant checkpointing gives no gradient to nested ones. So a
    hook on a layer is given these, not a hidden state: `output_hidden_states` reads that out of them.
    """

    connections: Sequence[Connection]
    family: Family
    arguments: tuple[str, ...]  # of the host's forward, after hidden_states
    training: bool
    next_connection: tuple[
        Connection
    ]  # the first of the next layer, or the readout; a tuple, for it is not a submodule

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        whole = self.training and getattr(self, "gradient_checkpointing", False)
        if whole and isinstance(self.connections[0], RecomputedConnection):
            raise ValueError(
                "layers that are recomputed whole, checkpointed, cannot have their states had back too"
            )
        leaves, spec = tree_flatten(hidden_states)
        kwargs |= zip(self.arguments, args, strict=False)
        recorder = kwargs.pop("recorder", None)
        *leaves, structure = super().__call__(*leaves, structure=OpaqueSpec(spec), **kwargs)  # type: ignore[misc]
        hidden = tree_unflatten(leaves, structure.spec)
        if recorder is not None:
            recorder.append(self.next_connection[0].hidden_state(hidden.state).to(hidden.dtype))
        return hidden

    def forward(self, *leaves: Any, structure: OpaqueSpec, **kwargs: Any) -> tuple[Any, ...]:
        hidden = tree_unflatten(leaves, structure.spec)
        attn: Modulation | None = None
        mlp: Modulation | None = None
        if self.family.condition:
            kwargs, (attn, mlp) = self.family.condition(self, hidden.dtype, kwargs)  # type: ignore[arg-type]
        if isinstance(hidden, Tensor):  # the embedding
            hidden = HiddenState(self.connections[0].init(hidden), hidden.new_empty(0))
        state = hidden.state
        for connection in self.connections:
            inputs, state = connection(state)
            outputs = []  # attention's, MLP's, or both side by side, as the ports say
            with recompute_inputs(inputs, state):
                if connection.ports[0] != "mlp":
                    qkv = QKVInputs(inputs[:3]) if connection.ports[0] == "q" else inputs[0]
                    outputs.append(self.run(self.family.attn, qkv, attn, kwargs))
                if connection.ports[-1] == "mlp":
                    outputs.append(self.run(self.family.mlp, inputs[-1], mlp, {}))
            state = connection.write(state, sum(outputs[1:], outputs[0]))
        tensors, spec = tree_flatten(hidden._replace(state=state))
        return (*tensors, OpaqueSpec(spec))

    def run(
        self, part: Sublayer, x: Any, modulation: Modulation | None, kwargs: dict[str, Any]
    ) -> Tensor:
        if modulation is not None:
            shift, scale, gate = modulation
            x = (
                QKVInputs(p * (1 + scale) + shift for p in x)
                if isinstance(x, QKVInputs)
                else x * (1 + scale) + shift
            )
        y = getattr(self, part.module)(x, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        for name in part.after:
            y = getattr(self, name)(y)
        return y if modulation is None else gate * y


class ReadoutNorm(ConnectionOwner):
    """The final norm, which reads the hidden state out of the connection's state."""

    connection: Connection

    def forward(self, hidden_states: HiddenState) -> Tensor:
        return self.connection.readout(hidden_states.state)

    def host_norm(self, x: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[misc]


def norm_dtype_in(norm: Any, home: nn.Module) -> torch.dtype:
    """A norm's dtype, which is that of what is around it where it has no weights."""
    return next(
        p.dtype
        for parameters in (norm.parameters(recurse=False), home.parameters())
        for p in parameters
    )


class NormReference(nn.Module):
    """A norm of the host's, looked up where it is without being registered a second time.

    Args:
        layer: whose norm it is.
        path: the norm's name in it; None where the family norms nothing there.
    """

    def __init__(self, layer: nn.Module, path: str | None):
        super().__init__()
        self.home, self.names = (layer,), path.split(".") if path else []

    def host_norm_module(self) -> Any:
        return functools.reduce(getattr, self.names, self.home[0])

    @property
    def dtype(self) -> torch.dtype:
        return norm_dtype_in(self.host_norm_module(), self.home[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.host_norm_module()(x) if self.names else x


class FinalNormReference(NormReference):
    """The host's final norm in its role of before, as it is now the readout."""

    def __init__(self, body: nn.Module, final: nn.Module):
        super().__init__(body, None)
        self.final = (final,)

    def host_norm_module(self) -> Any:
        return self.final[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.host_norm_module().host_norm(x)


class OwnedNorm:
    """A norm of its own for k or v. Where a host's checkpoint has no weights for it, it takes those of the host's norm.

    It is made by `own`, which says where the host's norm is, in `origin`, and in `path` from the connection's owner;
    `home` is the layer or the body around it.
    """

    origin: tuple[nn.Module]
    home: tuple[nn.Module]
    path: str

    @property
    def dtype(self) -> torch.dtype:
        return norm_dtype_in(self, self.home[0])

    def follow(self, names: Iterable[str]) -> None:
        with torch.no_grad():
            for name in names:
                getattr(self, name).copy_(getattr(self.origin[0], name))


def copy_norm(host: nn.Module, home: nn.Module, path: str = "") -> nn.Module:
    """A copy of a host's norm, with weights of its own."""
    norm: Any = copy.deepcopy(host)
    swap_class(norm, OwnedNorm)
    norm.origin, norm.home, norm.path = (host,), (home,), f"{path}." if path else ""
    return norm
