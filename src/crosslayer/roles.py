"""Give a module another role: a subclass of its own class, made at run time, so that `isinstance`, module paths, wrap
policies, gradient checkpointing and output recording still hold."""

import functools
from typing import Any


def become(module: Any, role: type) -> None:
    """Give the module the methods of `role`, in front of its own class's."""
    host: Any = type(module)
    if not issubclass(host, role):
        module.__class__ = subclass(role, host)


def restore(module: Any) -> None:
    """Undo `become`."""
    module.__class__ = type(module).host


def kind(module: Any) -> type:
    """The module's own class, whatever its role."""
    return vars(type(module)).get("host", type(module))


@functools.cache
def subclass(role: type, host: Any) -> Any:
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # the class exists at run time only, so copies and pickles rebuild it from its two bases
        return (blank, (role, host), *super(cls, self).__reduce_ex__(protocol)[2:])

    members = {"__module__": host.__module__, "__qualname__": host.__qualname__, "__reduce_ex__": reduce, "host": host}
    cls: Any = type(host.__name__, (role, host), members)
    return cls


def blank(role: type, host: Any) -> Any:
    cls = subclass(role, host)
    return cls.__new__(cls)
