"""What hooks on a connected layer and on the modules in it meet: docs/your-model.md, Hooks."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec

from .host_norms import find_attribute

# Libraries with hooks on many modules, which do no harm where they do not run.
_LIBRARIES_WITH_HOOKS = ("transformers", "deepspeed")
_NO_HIDDEN_STATE = (
    "a hook on a connected layer gets the state of its connection and no hidden state, and cannot "
    "replace it by one; docs/your-model.md, Hooks, says what to hook instead"
)


class StateStructure:
    """The structure of a state whose tensors travel flat, and what a layer returns besides.

    It is the first item of what hooks on a layer get, where they expect the hidden state. Using it
    as a tensor raises an error. It wraps the `TreeSpec` because FSDP would take a bare one apart.
    """

    def __init__(self, spec: TreeSpec, extras: tuple[Any, ...] = ()):
        self.spec = spec
        self.extras = extras

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_NO_HIDDEN_STATE} (asked for {name!r})")

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(_NO_HIDDEN_STATE)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __matmul__ = __neg__ = __getitem__ = _refuse


def check_structured(items: Any) -> Sequence[Any]:
    """What a layer gets or returns, once its hooks have run.

    Raises:
        TypeError: a hook has put something else in the place of the state.
    """
    if not isinstance(items, tuple | list) or not items or type(items[0]) is not StateStructure:
        raise TypeError(_NO_HIDDEN_STATE)
    return items


def warn_of_hooks(layer: Any, opened_paths: Iterable[str]) -> None:
    """Warn of hooks that never run, as they are on modules that a connected layer does not call.

    Args:
        layer: a connected one.
        opened_paths: of the modules in it whose modules it calls.
    """
    for path in opened_paths:
        module: nn.Module = find_attribute(layer, path)
        hooks = chain(
            module._forward_hooks.values(),
            module._forward_pre_hooks.values(),
            module._backward_hooks.values(),
            module._backward_pre_hooks.values(),
        )
        if any(_library_of(hook) not in _LIBRARIES_WITH_HOOKS for hook in hooks):
            warnings.warn(
                f"the hooks on {path} of layer {layer.connections[0].site.layer} do not run: a "
                f"connected layer calls the modules in this {type(module).__name__}, not it",
                stacklevel=3,
            )


def _library_of(hook: Any) -> str:
    """The package that defines a hook; "" where it does not tell."""
    return str(getattr(hook, "__module__", None) or "").partition(".")[0]
