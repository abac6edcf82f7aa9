"""The methods by name: the files in `connections/`, and those that other packages bring.

A package brings a method as an entry point, which makes it known wherever the package is installed:

    [project.entry-points."crosslayer.connections"]
    laurel = "my_package.laurel:Laurel"

`register_connection` makes one known to the running process alone.
"""

import importlib
import keyword
import pkgutil
import sys
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from . import connections
from .connection import Connection
from .errors import error_with_class
from .validation import did_you_mean

ENTRY_POINT_GROUP = "crosslayer.connections"
# Names under which connections were saved before they had their papers' names.
_FORMER_NAMES = {"gains": "skip_gain", "residual_dual": "resi_dual"}
_registered: dict[str, type[Connection[Any]]] = {}


def register_connection(name: str, method: type[Connection[Any]]) -> None:
    """Make a method known by name, in this process: to `make`, `connect`, `from_pretrained`, ….

    An entry point of a package, see docs/add-a-connection.md, does so in every process.

    Args:
        name: by which specs name it, like "laurel". A second call with a name replaces the method.
        method: its class.

    Raises:
        ValueError: crosslayer has a connection of this name, the name is no identifier, or the
            class has another name.
        TypeError: the method is no class of connections, or lacks a function that each has.
    """
    if not isinstance(method, type) or not issubclass(method, Connection):
        raise TypeError(
            f"method must be a class derived from crosslayer.Connection, got {method!r}"
        )
    for function in ("initial_state", "mix_inputs"):
        if getattr(method, function) is getattr(Connection, function):
            raise TypeError(f"{method.__name__} needs {function}")
    if not _is_name(name):
        raise ValueError(
            "name must be of ASCII letters, digits and _, and no word of Python's, like 'laurel', "
            f"got {name!r}"
        )
    if name in _FORMER_NAMES:
        raise ValueError(
            f"{name!r} is a former name of crosslayer's {_FORMER_NAMES[name]!r}; "
            "choose another name"
        )
    if name in _own_names():
        raise ValueError(f"crosslayer has a connection {name!r} already; choose another name")
    own_name = vars(method).get("name") or name
    if own_name != name:
        raise ValueError(f"{method.__name__} is the connection {own_name!r} already")
    method.name = name
    _registered[name] = method


def available() -> tuple[str, ...]:
    """The names that `make` knows: the files in `crosslayer/connections/`, registered methods, and
    those of installed packages.
    """
    return tuple(sorted({*_own_names(), *_registered, *_entry_points()}))


def current_name(name: str) -> str:
    """The name of a connection that may be given by a former one.

    Raises:
        ValueError: it is unknown.
    """
    name = _FORMER_NAMES.get(name, name)
    if name not in available():
        raise ValueError(
            f"unknown connection {name!r}{did_you_mean(name, available())}; "
            f"known: {', '.join(available())}. For one of another package, install that package; "
            "for one of a notebook, call register_connection first"
        )
    return name


def find_method(name: str) -> type[Connection[Any]]:
    """The class of a connection, by one of the names of `available()`.

    Raises:
        ValueError: the package that brings it cannot be imported, or brings something else.
    """
    if name in _registered:
        return _registered[name]
    if name not in _entry_points():
        return _method_of_file(name)
    entry_point = _entry_points()[name]
    try:
        method = entry_point.load()
    except Exception as error:  # whatever the module's code raises
        raise ValueError(
            f"the connection {name!r}, {entry_point.value}, fails ({error_with_class(error)})"
        ) from error
    try:
        register_connection(name, method)
    except TypeError as error:
        hint = "" if isinstance(method, type) else "; an entry point is MODULE:CLASS"
        raise ValueError(f"the connection {name!r}, {entry_point.value}: {error}{hint}") from None
    return _registered[name]


def method_files() -> set[str | None]:
    """The files of the methods that this process has imported."""
    names = [method.__module__ for method in _registered.values()]
    names += [f"{connections.__name__}.{name}" for name in _own_names()]
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return {getattr(module, "__file__", None) for module in modules}


def _own_names() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(connections.__path__)]
    return [name for name in names if not name.startswith("_")]


def _method_of_file(name: str) -> type[Connection[Any]]:
    """The Connection that a file defines, which others in the file may be bases of."""
    module = importlib.import_module(f"{connections.__name__}.{name}")
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    own = [c for c in classes if c.__module__ == module.__name__ and issubclass(c, Connection)]
    methods = [c for c in own if not any(c in other.__bases__ for other in own)]
    if len(methods) != 1:
        found = ", ".join(method.__name__ for method in methods) or "none"
        raise TypeError(f"{module.__file__} must define one Connection, got {found}")
    return methods[0]


@cache
def _entry_points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    taken = dict.fromkeys([*_own_names(), *_FORMER_NAMES], "crosslayer")
    for point in entry_points(group=ENTRY_POINT_GROUP):
        package = point.dist.name if point.dist else point.module
        problem = ""
        if not _is_name(point.name):
            problem = "a name has ASCII letters, digits and _ alone"
        elif taken.get(point.name, package) != package:
            problem = f"{taken[point.name]} has a connection of this name"
        if problem:
            warnings.warn(
                f"the connection {point.name!r} of the package {package} is not used: {problem}",
                stacklevel=2,
            )
        else:
            found[point.name] = point
            taken[point.name] = package
    return found


def _is_name(name: object) -> bool:
    """Whether a spec can name it. Python would read or normalise another identifier."""
    return (
        isinstance(name, str)
        and name.isascii()
        and name.isidentifier()
        and not keyword.iskeyword(name)
    )
