"""What a host's modules become: the body, its layers, its final norm, and the norms that connections borrow."""

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..connection import Connection
from ..recompute import Retraced, recalled
from ..roles import become
from .families import Family, Modulation, Sublayer
from .ports import Ports


class Body:
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
            state if i < first or state is None or state is out.last_hidden_state else seen[i - first]
            for i, state in enumerate(out.hidden_states)
        )
        return out if (config.return_dict if as_dict is None else as_dict) else out.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, CopiedNorm):
            mine, origin = dict(module.named_parameters()), dict(module.origin[0].named_parameters())
            lacking = [n for n, p in mine.items() if not getattr(p, "_is_hf_initialized", False)]
            if all(getattr(origin[n], "_is_hf_initialized", False) for n in lacking):
                module.follow(lacking)
            else:  # the final norm is initialised after what is beneath it
                super()._init_weights(module)  # type: ignore[misc]
        elif isinstance(module, Connection):
            own = dict(module.named_parameters(recurse=False))
            loaded = {n: p.detach().clone() for n, p in own.items() if getattr(p, "_is_hf_initialized", False)}
            module.reset_parameters()
            with torch.no_grad():
                for name, value in loaded.items():
                    own[name].copy_(value)
        else:
            super()._init_weights(module)  # type: ignore[misc]


class Hidden(NamedTuple):
    """What the host takes for its hidden states between layers."""

    state: Any
    like: Tensor  # empty, of the embedding's dtype: the streams' own may be another

    @property
    def dtype(self) -> torch.dtype:  # DiT asks
        return self.like.dtype


class Opaque:
    """A pytree's structure on its way through a layer: a dataclass, as which FSDP would take it apart."""

    def __init__(self, spec: TreeSpec):
        self.spec = spec


class Owner:
    """A module with connections beneath it."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name, norm in self.named_modules():  # type: ignore[attr-defined]
            if isinstance(norm, CopiedNorm):
                for key in norm.state_dict():  # type: ignore[attr-defined]
                    host = prefix + norm.path + key
                    if host in state_dict:
                        state_dict.setdefault(f"{prefix}{name}.{key}", state_dict[host])
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class Layer(Owner):
    """A layer whose `hidden_states` is the connection's state.

    The state's tensors travel flat through `forward`, as reentrant checkpointing gives no gradient to nested ones. So a
    hook on a layer is given these, not a hidden state: `output_hidden_states` reads that out of them.
    """

    connections: Sequence[Connection]
    family: Family
    arguments: tuple[str, ...]  # of the host's forward, after hidden_states
    training: bool
    following: tuple[Connection]  # the first of the next layer, or the readout; a tuple, for it is not a submodule

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        whole = self.training and getattr(self, "gradient_checkpointing", False)
        if whole and isinstance(self.connections[0], Retraced):
            raise ValueError("layers that are recomputed whole, checkpointed, cannot have their states had back too")
        leaves, spec = tree_flatten(hidden_states)
        kwargs |= zip(self.arguments, args, strict=False)
        recorder = kwargs.pop("recorder", None)
        *leaves, structure = super().__call__(*leaves, structure=Opaque(spec), **kwargs)  # type: ignore[misc]
        hidden = tree_unflatten(leaves, structure.spec)
        if recorder is not None:
            recorder.append(self.following[0].hidden(hidden.state).to(hidden.dtype))
        return hidden

    def forward(self, *leaves: Any, structure: Opaque, **kwargs: Any) -> tuple[Any, ...]:
        hidden = tree_unflatten(leaves, structure.spec)
        attn: Modulation | None = None
        mlp: Modulation | None = None
        if self.family.condition:
            kwargs, (attn, mlp) = self.family.condition(self, hidden.dtype, kwargs)  # type: ignore[arg-type]
        if isinstance(hidden, Tensor):  # the embedding
            hidden = Hidden(self.connections[0].init(hidden), hidden.new_empty(0))
        state = hidden.state
        for connection in self.connections:
            inputs, state = connection(state)
            outputs = []  # attention's, MLP's, or both side by side, as the ports say
            with recalled(inputs, state):
                if connection.ports[0] != "mlp":
                    qkv = Ports(inputs[:3]) if connection.ports[0] == "q" else inputs[0]
                    outputs.append(self.run(self.family.attn, qkv, attn, kwargs))
                if connection.ports[-1] == "mlp":
                    outputs.append(self.run(self.family.mlp, inputs[-1], mlp, {}))
            state = connection.write(state, sum(outputs[1:], outputs[0]))
        tensors, spec = tree_flatten(hidden._replace(state=state))
        return (*tensors, Opaque(spec))

    def run(self, part: Sublayer, x: Any, modulation: Modulation | None, kwargs: dict[str, Any]) -> Tensor:
        if modulation is not None:
            shift, scale, gate = modulation
            x = Ports(p * (1 + scale) + shift for p in x) if isinstance(x, Ports) else x * (1 + scale) + shift
        y = getattr(self, part.module)(x, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        for name in part.after:
            y = getattr(self, name)(y)
        return y if modulation is None else gate * y


class Readout(Owner):
    """The final norm, which reads the hidden state out of the connection's state."""

    connection: Connection

    def forward(self, hidden_states: Hidden) -> Tensor:
        return self.connection.readout(hidden_states.state)

    def host_norm(self, x: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[misc]


def dtype_around(norm: Any, home: nn.Module) -> torch.dtype:
    """A norm's dtype, which is that of what is around it where it has no weights."""
    return next(p.dtype for parameters in (norm.parameters(recurse=False), home.parameters()) for p in parameters)


class Borrowed(nn.Module):
    """A norm of the host's, looked up where it is without being registered a second time.

    Args:
        layer: whose norm it is.
        path: the norm's name in it; None where the family norms nothing there.
    """

    def __init__(self, layer: nn.Module, path: str | None):
        super().__init__()
        self.home, self.names = (layer,), path.split(".") if path else []

    def lent(self) -> Any:
        return functools.reduce(getattr, self.names, self.home[0])

    @property
    def dtype(self) -> torch.dtype:
        return dtype_around(self.lent(), self.home[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.lent()(x) if self.names else x


class FinalNorm(Borrowed):
    """The host's final norm in its role of before, as it is now the readout."""

    def __init__(self, body: nn.Module, final: nn.Module):
        super().__init__(body, None)
        self.final = (final,)

    def lent(self) -> Any:
        return self.final[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.lent().host_norm(x)


class CopiedNorm:
    """A norm of its own for k or v. Where a host's checkpoint has no weights for it, it takes those of the host's norm.

    It is made by `own`, which says where the host's norm is, in `origin`, and in `path` from the connection's owner;
    `home` is the layer or the body around it.
    """

    origin: tuple[nn.Module]
    home: tuple[nn.Module]
    path: str

    @property
    def dtype(self) -> torch.dtype:
        return dtype_around(self, self.home[0])

    def follow(self, names: Iterable[str]) -> None:
        with torch.no_grad():
            for name in names:
                getattr(self, name).copy_(getattr(self.origin[0], name))


def own(host: nn.Module, home: nn.Module, path: str = "") -> nn.Module:
    """A copy of a host's norm, with weights of its own."""
    norm: Any = copy.deepcopy(host)
    become(norm, CopiedNorm)
    norm.origin, norm.home, norm.path = (host,), (home,), f"{path}." if path else ""
    return norm
