"""Connections by name: "mudd(dilation=2)".

The command line, config.json, tables of results and the names of tests use the same string. The
names are those of `methods.py`, and the options are the keyword arguments of the classes:
"mudd(dilation=2)" is the class in `connections/mudd.py`, called with `dilation=2`.
"""

import ast
import inspect
import reprlib
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal, get_type_hints

import torch
from torch import nn

from .connection import Connection, NormFactory, format_spec, norm_dtype
from .method_checks import check_contents, check_options
from .methods import current_name, find_method
from .sites import Site
from .validation import (
    check_option_type,
    check_positive,
    did_you_mean,
    dtype_name,
    parse_dtype,
)

_COMMON_OPTIONS: dict[str, Any] = {"stream_dtype": None}  # options that every connection has
# Not float16, in which sums of streams can overflow before the norm that follows them.
_STREAM_DTYPE: Any = Literal["float32", "bfloat16"] | None


@dataclass(frozen=True)
class ConnectionSpec:
    """A connection's name and options. Calling it builds the connection of one site.

    `str` gives the string that `make` reads.

    Args:
        name: one of `available()`.
        options: those that were given, by keyword.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> type[Connection[Any]]:
        """The class of this name."""
        return find_method(current_name(self.name))

    def __call__(self, site: Site, dim: int, norm: NormFactory) -> Connection[Any]:
        """Build the connection of one site.

        Args:
            site: its place in the model, from `plan`.
            dim: D, the width of the stream.
            norm: takes the name of a port, an input of the sub-layer, and returns its norm; for
                example `lambda port: nn.RMSNorm(dim)`.

        Raises:
            ValueError: an option or an argument has a wrong value.
            TypeError: the method's class breaks a rule of the interface.
        """
        if not isinstance(site, Site):
            raise ValueError(f"site must come from crosslayer.plan, got {site!r}")
        check_positive(dim=dim)
        check_norm_factory(norm, f"lambda port: nn.RMSNorm({dim})")
        if isinstance(norm, type):
            raise ValueError(
                f"norm must take the name of a port, like lambda port: nn.RMSNorm({dim}), got "
                f"the class {norm.__name__}"
            )
        method_options = {
            key: value for key, value in self.options.items() if key not in _COMMON_OPTIONS
        }
        norms = _explain_norm_errors(norm, dim)
        try:
            connection = self.method(site, dim, norms, **method_options)
        except (TypeError, IndexError, AttributeError) as error:
            if not method_options:
                raise  # an error of the method
            # A value of the wrong kind, like a word for a number.
            raise ValueError(f"cannot build {self} with these values ({error})") from error
        check_contents(connection, Connection, site, dim)
        connection.options = dict(self.options)
        stream_dtype = self.options.get("stream_dtype")
        if stream_dtype is not None:
            connection.stream_dtype = parse_dtype(stream_dtype, "stream_dtype")
            for module in connection.norms:
                if norm_dtype(module) is None:
                    raise ValueError(
                        "stream_dtype needs norms with a weight, whose dtype is that of the "
                        f"sub-layers, got {module}"
                    )
        return connection

    def __str__(self) -> str:
        return format_spec(self.name, self.options)

    def __hash__(self) -> int:
        # Values may be lists, which have no hash, and 2 equals 2.0. The order does not matter.
        return hash((self.name, frozenset(self.options)))


def _explain_norm_errors(norm: NormFactory, dim: int) -> NormFactory:
    """A factory whose errors name it: they are no fault of the options."""

    def make_norm(port: str) -> nn.Module:
        try:
            return norm(port)
        except TypeError as error:
            raise ValueError(
                f"norm must take the name of a port, like lambda port: nn.RMSNorm({dim}), and make "
                f"its norm; it raised: {error}"
            ) from error

    return make_norm


def check_norm_factory(norm: object, example: str) -> None:
    """Raise a ValueError for a norm where a function that makes norms is expected."""
    if isinstance(norm, nn.Module) or not callable(norm):
        raise ValueError(f"norm must be a function that makes a norm, like {example}, got {norm}")


def default_options(method: type[Connection[Any]]) -> dict[str, Any]:
    """A method's own options and their defaults, without those of `_COMMON_OPTIONS`."""
    inherited = inspect.signature(Connection).parameters
    options = {}
    for name, parameter in inspect.signature(method).parameters.items():
        collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in inherited and not collects:
            options[name] = parameter.default
    return options


def all_options(spec: ConnectionSpec) -> dict[str, Any]:
    """The options of a spec, with the defaults of those it leaves out."""
    return _COMMON_OPTIONS | default_options(spec.method) | spec.options


def is_same_connection(first: "str | ConnectionSpec", second: "str | ConnectionSpec") -> bool:
    """Whether two specs are equal once defaults are filled in."""
    a = make(first)
    b = make(second)
    return a.name == b.name and all_options(a) == all_options(b)


def _name_of_class(method: type) -> str:
    """The name of a connection's class, or how to give it one."""
    name = vars(method).get("name")
    if name:
        return f"it is called {name!r}"
    own = method.__name__
    return f'give it one with crosslayer.register_connection("{own.lower()}", {own})'


def make(spec: str | ConnectionSpec, **options: Any) -> ConnectionSpec:
    """Read a connection's name and options: `make("mudd", dilation=2)(site, dim, norm)` builds it.

    Args:
        spec: a name, a string with options like "mudd(dilation=2)", or a spec.
        options: options by keyword, added to those of the string.

    Returns:
        The spec, which builds the connection of one site when it is called.

    Raises:
        ValueError: the string is not a name with options by keyword, the name or an option is
            unknown, or an option is given twice or missing.
        TypeError: the method's class cannot have such options.
    """
    if isinstance(spec, type):
        raise ValueError(
            f"make takes the name of a connection, got the class {spec.__name__}; "
            f"{_name_of_class(spec)}"
        )
    if isinstance(spec, ConnectionSpec):
        name = spec.name
        spec_options = dict(spec.options)
    else:
        name, spec_options = _parse_spec(spec)
    name = current_name(name)
    for key, value in options.items():
        if key in spec_options:
            raise ValueError(
                f"{name}: the option {key!r} is given twice, as {spec_options[key]!r} and {value!r}"
            )
        spec_options[key] = dtype_name(value) if isinstance(value, torch.dtype) else value
    method = ConnectionSpec(name).method
    own_options = default_options(method)
    check_options(name, own_options, {*_COMMON_OPTIONS, "options"})
    known = own_options | _COMMON_OPTIONS
    try:
        annotations = get_type_hints(method.__init__) | {"stream_dtype": _STREAM_DTYPE}
    except NameError as error:
        raise TypeError(f"{name}: an annotation of its options is not known ({error})") from error
    for key in spec_options:
        if key not in known:
            listed = ", ".join(
                k if v is inspect.Parameter.empty else f"{k}={v!r}" for k, v in known.items()
            )
            raise ValueError(
                f"unknown option {key!r} of {name!r}{did_you_mean(key, known)}; "
                f"its options: {listed}"
            )
        check_option_type(f"{name}: {key}", spec_options[key], annotations.get(key, Any))
        spec_options[key] = _plain_value(spec_options[key])
    for key, default in own_options.items():
        if default is inspect.Parameter.empty and key not in spec_options:
            raise ValueError(f"{name} needs the option {key!r}, like {name}({key}=…)")
    return ConnectionSpec(name, spec_options)


def _plain_value(value: Any) -> Any:
    """A value as Python's own type, whose text `_parse_spec` reads; numpy's numbers have others."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, list | tuple):
        items = [_plain_value(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def connection_name(spec: str) -> str:
    """The name in a spec, without options. It need not be known: a former one is not replaced."""
    return spec.partition("(")[0]


def split_specs(line: str) -> list[str]:
    """The specs in a line, separated by spaces or commas outside parentheses and quotes."""
    specs = [""]
    depth = 0
    quote = ""
    for char in line:
        if quote:
            if char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif depth == 0 and (char == "," or char.isspace()):
            specs.append("")
            continue
        specs[-1] += char
    return [spec for spec in specs if spec]


def _parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a string. Values are literals, so nothing in the string is executed."""
    try:
        stripped = text.strip()
        tree = ast.parse(stripped, mode="eval").body
        match tree:
            case _ if ast.get_source_segment(stripped, tree) != stripped:
                pass  # a comment or parentheses around it
            case ast.Name(id=name):
                return name, {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                if all(keyword.arg for keyword in keywords):  # `**options` has no name
                    return name, _literal_options(name, keywords, stripped)
    except (SyntaxError, UnicodeError, TypeError, RecursionError, MemoryError, AttributeError):
        pass  # MemoryError and RecursionError: nested too deep for Python's parser
    raise ValueError(
        f"cannot read the connection {reprlib.repr(text)}: expected a name, or a name with options "
        "by keyword, like \"mudd(dilation=2, ways='qkvr')\""
    )


def _literal_options(name: str, keywords: list[ast.keyword], text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for keyword in keywords:
        key = str(keyword.arg)
        if key in options:
            raise ValueError(f"{name}: the option {key!r} is given twice")
        try:
            options[key] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            value = ast.get_source_segment(text, keyword.value)
            raise ValueError(
                f"{name}: {key} must be a number, a string, a list, True, False or None, "
                f"got {reprlib.repr(value)}"
            ) from None
    return options
