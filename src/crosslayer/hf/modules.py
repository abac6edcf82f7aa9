"""What a host's modules become: the body, its layers, its final norm, and the norms that connections borrow."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..connection import Connection
from .families import Family, Modulation, Sublayer
from .ports import Ports
from .roles import become


class Body:
    """The model that owns the layers. transformers initialises through it what a checkpoint lacks."""

    arm: str  # the connection's name and options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = getattr(self, "config", None)
        if not kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        as_dict, seen = kwargs.pop("return_dict", config.return_dict), []  # type: ignore[var-annotated]
        # transformers records parts of the states; the layers append what a model calls its hidden states
        out = super().forward(*args, **kwargs, return_dict=True, recorder=seen)  # type: ignore[misc]
        first = len(out.hidden_states) - len(seen)  # the embedding, where it is recorded
        out.hidden_states = tuple(
            state if i < first or state is None or state is out.last_hidden_state else seen[i - first]
            for i, state in enumerate(out.hidden_states)
        )
        return out if as_dict else out.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, CopiedNorm):
            module.follow(n for n, p in module.named_parameters() if not getattr(p, "_is_hf_initialized", False))
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

    @property
    def dtype(self) -> torch.dtype:  # DiT asks
        return tree_leaves(self.state)[0].dtype


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

    The state's tensors travel flat through `forward`, as reentrant checkpointing gives no gradient to nested ones.
    """

    connections: Sequence[Connection]
    family: Family
    arguments: tuple[str, ...]  # of the host's forward, after hidden_states
    following: tuple[Connection]  # the first of the next layer, or the readout; a tuple, for it is not a submodule

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten(hidden_states)
        kwargs |= zip(self.arguments, args, strict=False)
        recorder = kwargs.pop("recorder", None)
        *leaves, spec = super().__call__(*leaves, spec=spec, **kwargs)  # type: ignore[misc]
        hidden = tree_unflatten(leaves, spec)
        if recorder is not None:
            recorder.append(self.following[0].hidden(hidden.state))
        return hidden

    def forward(self, *leaves: Any, spec: TreeSpec, **kwargs: Any) -> tuple[Any, ...]:
        hidden = tree_unflatten(leaves, spec)
        attn: Modulation | None = None
        mlp: Modulation | None = None
        if self.family.condition:
            kwargs, (attn, mlp) = self.family.condition(self, hidden.dtype, kwargs)  # type: ignore[arg-type]
        # a tensor is the embedding
        state = self.connections[0].init(hidden) if isinstance(hidden, Tensor) else hidden.state
        for connection in self.connections:
            inputs, state = connection(state)
            outputs = []  # attention's, MLP's, or both side by side, as the ports say
            if connection.ports[0] != "mlp":
                qkv = Ports(inputs[:3]) if connection.ports[0] == "q" else inputs[0]
                outputs.append(self.run(self.family.attn, qkv, attn, kwargs))
            if connection.ports[-1] == "mlp":
                outputs.append(self.run(self.family.mlp, inputs[-1], mlp, {}))
            state = connection.write(state, sum(outputs[1:], outputs[0]))
        tensors, spec = tree_flatten(Hidden(state))
        return (*tensors, spec)

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


class Borrowed(nn.Module):
    """A host's norm, referred to without being registered a second time."""

    def __init__(self, norm: Callable[[Tensor], Tensor]):
        super().__init__()
        self.norm = (norm,)

    @property
    def dtype(self) -> torch.dtype | None:
        host: Any = getattr(self.norm[0], "__self__", self.norm[0])
        return next((p.dtype for p in host.parameters(recurse=False)), None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm[0](x)


class CopiedNorm:
    """A norm of its own for k or v. Where a host's checkpoint has no weights for it, it takes those of the host's norm.

    It is made by `own`, which says where the host's norm is: in `origin`, and in `path`, from the connection's owner.
    """

    origin: tuple[nn.Module]
    path: str

    def follow(self, names: Iterable[str]) -> None:
        with torch.no_grad():
            for name in names:
                getattr(self, name).copy_(getattr(self.origin[0], name))


def own(host: nn.Module, path: str = "") -> nn.Module:
    """A copy of a host's norm, with weights of its own."""
    norm: Any = copy.deepcopy(host)
    become(norm, CopiedNorm)
    norm.origin, norm.path = (host,), f"{path}." if path else ""
    return norm
