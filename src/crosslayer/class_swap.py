"""Give a module extra methods at run time, by making it an instance of a subclass.

`isinstance`, module paths, FSDP wrap policies and output recording keep working, because the new
class is a subclass of the old one. torch's FSDP2 uses the same technique.
"""

from typing import Any


def swap_class(module: Any, mixin: type) -> None:
    """Make `module` an instance of a class with the bases (mixin, its own class)."""
    original: Any = type(module)
    if not issubclass(original, mixin):
        module.__class__ = swapped_class(mixin, original)


def restore_class(module: Any) -> None:
    """Undo the last `swap_class`."""
    module.__class__ = type(module).original


def original_class(module: Any) -> type[Any]:
    """The class of `module` before `swap_class`, or its class where it was never swapped."""
    return vars(type(module)).get("original", type(module))


def swapped_class(mixin: type, original: Any) -> Any:
    """The class with the bases (mixin, original), of the name of `original`.

    It lives as long as an instance does: `original` knows its subclasses by weak references.
    """
    for subclass in type.__subclasses__(original):
        if vars(subclass).get("mixin_before_original") is mixin:
            return subclass

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # The class exists at run time only, so copies and pickles rebuild it from its two bases.
        return (_rebuild, (mixin, original), *super(cls, self).__reduce_ex__(protocol)[2:])

    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__reduce_ex__": reduce,
        "original": original,
    }
    cls: Any = type(original.__name__, (mixin, original), members)
    try:
        original.__new__(original).__class__ = cls
    except TypeError:  # A class whose first base is no module, as optimum-quanto's are.
        cls = _subclass_before(mixin, original, members)
    cls.mixin_before_original = mixin  # at last, as the class that did not fit is found as well
    return cls


def _subclass_before(mixin: type, original: Any, members: dict[str, Any]) -> Any:
    """A subclass of `original` alone, in whose method resolution order `mixin` comes before it.

    Instances of `original` can become its instances whatever its bases are: Python compares the
    memory layouts of the first bases.
    """

    class MixinFirst(type(original)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            own, *others = super().mro()
            if mixin in others:  # a subclass of the new class
                return [own, *others]
            return [own, *(base for base in mixin.__mro__ if base is not object), *others]

    return MixinFirst(original.__name__, (original,), members)


def _rebuild(mixin: type, original: Any) -> Any:
    cls = swapped_class(mixin, original)
    return cls.__new__(cls)
