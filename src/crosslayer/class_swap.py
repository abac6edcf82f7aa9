"""Give a module extra methods at run time, by making it an instance of a subclass.

`isinstance`, module paths, FSDP wrap policies and output recording keep working, because the new
class is a subclass of the old one. torch's FSDP2 uses the same technique.
"""

import functools
from typing import Any


def swap_class(module: Any, mixin: type) -> None:
    """Make `module` an instance of a class with the bases (mixin, its own class)."""
    host: Any = type(module)
    if not issubclass(host, mixin):
        module.__class__ = swapped_class(mixin, host)


def restore_class(module: Any) -> None:
    """Undo the last `swap_class`."""
    module.__class__ = type(module).host


def original_class(module: Any) -> type:
    """The class of `module` before `swap_class`, or its class where it was never swapped."""
    return vars(type(module)).get("host", type(module))


@functools.cache
def swapped_class(mixin: type, host: Any) -> Any:
    """The class with the bases (mixin, host), of the host's name."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # The class exists at run time only, so copies and pickles rebuild it from its two bases.
        return (_rebuild, (mixin, host), *super(cls, self).__reduce_ex__(protocol)[2:])

    members = {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__reduce_ex__": reduce,
        "host": host,
    }
    cls: Any = type(host.__name__, (mixin, host), members)
    try:
        host.__new__(host).__class__ = cls
    except TypeError:  # A host whose first base is no module, as optimum-quanto's are.
        cls = _subclass_before(mixin, host, members)
    return cls


def _subclass_before(mixin: type, host: Any, members: dict[str, Any]) -> Any:
    """A subclass of `host` alone, in whose method resolution order `mixin` comes before it.

    Instances of `host` can become its instances whatever the bases of `host` are: Python compares
    the memory layouts of the first bases.
    """

    class MixinFirst(type(host)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            own, *others = super().mro()
            if mixin in others:  # a subclass of the new class
                return [own, *others]
            return [own, *(base for base in mixin.__mro__ if base is not object), *others]

    return MixinFirst(host.__name__, (host,), members)


def _rebuild(mixin: type, host: Any) -> Any:
    cls = swapped_class(mixin, host)
    return cls.__new__(cls)
