"""What a host's modules become: subclasses of their own classes, made at run time, so that `isinstance`, module paths,
wrap policies, gradient checkpointing and output recording still hold."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..connection import Connection
from .families import Family


def become(module: Any, role: type) -> None:
    """Give the module the methods of `role`, in front of its own class's."""
    host: Any = type(module)
    module.__class__ = subclass(role, host)


@functools.cache
def subclass(role: type, host: Any) -> Any:
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # the class exists at run time only, so copies and pickles rebuild it from its two bases
        return (blank, (role, host), *super(cls, self).__reduce_ex__(protocol)[2:])

    members = {"__module__": host.__module__, "__qualname__": host.__qualname__, "__reduce_ex__": reduce}
    cls: Any = type(host.__name__, (role, host), members)
    return cls


def blank(role: type, host: Any) -> Any:
    cls = subclass(role, host)
    return cls.__new__(cls)


class Body:
    """The model that owns the layers. transformers initialises through it what a checkpoint lacks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_hidden_states", self.config.output_hidden_states):  # type: ignore[attr-defined]
            # what passes between the layers is a connection's state, of which transformers would record a part
            raise ValueError("output_hidden_states is not supported on a connected model yet")
        return super().forward(*args, **kwargs)  # type: ignore[misc]

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


class Layer:
    """A decoder layer whose `hidden_states` is the connection's state.

    The state's tensors travel flat through `forward`, as reentrant checkpointing gives no gradient to nested ones.
    """

    connections: Sequence[Connection]
    family: Family

    def __call__(self, hidden_states: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten(hidden_states)
        *leaves, spec = super().__call__(*leaves, spec=spec, **kwargs)  # type: ignore[misc]
        return tree_unflatten(leaves, spec)

    def forward(self, *leaves: Tensor | None, spec: TreeSpec, **kwargs: Any) -> tuple[Any, ...]:
        state = tree_unflatten(leaves, spec)
        if isinstance(state, Tensor):  # the embedding
            state = self.connections[0].init(state)
        for connection in self.connections:
            inputs, state = connection.read(state)
            state = connection.write(state, self.sublayer(connection.ports, inputs, kwargs))
        tensors, spec = tree_flatten(state)
        return (*tensors, spec)

    def sublayer(self, ports: tuple[str, ...], inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Tensor:
        """Attention, MLP, or both side by side, as the ports say."""
        outputs: list[Tensor] = []
        if ports[0] != "mlp":
            qkv = Ports(inputs[:3]) if ports[0] == "q" else inputs[0]
            outputs.append(self.run(self.family.attn, qkv, kwargs))
        if ports[-1] == "mlp":
            outputs.append(self.run(self.family.mlp, inputs[-1], {}))
        return sum(outputs[1:], outputs[0])

    def run(self, part: Any, x: Any, kwargs: dict[str, Any]) -> Tensor:
        y = getattr(self, part.module)(x, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        return y if part.dropout is None else getattr(self, part.dropout)(y)


class Readout:
    """The final norm, which reads the hidden state out of the connection's state."""

    connection: Connection

    def forward(self, hidden_states: Any) -> Tensor:
        return self.connection.readout(hidden_states)

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
    """A norm of its own for k or v. Where a checkpoint has no weights for it, it takes those of the host's norm."""

    origin: tuple[nn.Module]

    def follow(self, names: Iterable[str]) -> None:
        with torch.no_grad():
            for name in names:
                getattr(self, name).copy_(getattr(self.origin[0], name))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
        # the host's norm stands before the connections in its layer, so it is loaded already
        self.follow(n for n, _ in self.named_parameters() if prefix + n not in state_dict)  # type: ignore[attr-defined]


class Ports(tuple):
    """The inputs of q, k and v, passing for one tensor until the projection that wants its own."""

    __slots__ = ()
    shape = property(lambda self: self[0].shape)
    dtype = property(lambda self: self[0].dtype)
    device = property(lambda self: self[0].device)


def take(index: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward-pre-hook: one projection of q, k or v takes its own port."""
    return (args[0][index],) if isinstance(args[0], Ports) else None


class FusedProjection:
    """One Linear for q, k and v whose rows are (head, q | k | v, channel), as GPT-NeoX's."""

    heads: int
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Any) -> Tensor:
        if not isinstance(x, Ports):
            return super().forward(x)  # type: ignore[misc]
        weights = self.weight.unflatten(0, (self.heads, 3, -1)).unbind(1)
        biases = [None] * 3 if self.bias is None else self.bias.unflatten(0, (self.heads, 3, -1)).unbind(1)
        parts = [
            nn.functional.linear(port, w.flatten(0, 1), b if b is None else b.flatten()).unflatten(
                -1, (self.heads, 1, -1)
            )
            for port, w, b in zip(x, weights, biases, strict=True)
        ]
        return torch.cat(parts, -2).flatten(-3)
