"""One string names an arm everywhere: on the command line, in config.json, in a result row, in a test id.

The file name is the registry and the constructor's signature is the configuration: "mudd(dilation=2)" is the class in
`connections/mudd.py` with its keyword argument `dilation`.
"""

import ast
import difflib
import importlib
import inspect
import pkgutil
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import connections
from .connection import Connection, Norm, Site, choice

DTYPES = {str(dtype).split(".")[1]: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
EVERY: dict[str, Any] = {"stream_dtype": None}  # options every connection has


@dataclass(frozen=True)
class Factory:
    """A connection's name and options: call it with (site, dim, norm); `str` gives the arm's string back."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> type[Connection]:
        module = importlib.import_module(f"{connections.__name__}.{self.name}")
        return next(
            c for c in vars(module).values()
            if isinstance(c, type) and issubclass(c, Connection) and c.__module__ == module.__name__
        )  # fmt: skip

    def __call__(self, site: Site, dim: int, norm: Norm) -> Connection:
        own = {name: value for name, value in self.options.items() if name not in EVERY}
        try:
            connection = self.method(site, dim, norm, **own)
        except (TypeError, IndexError, AttributeError) as error:  # a value of the wrong kind, like a word for a number
            raise ValueError(f"cannot build {self} with these values ({error})") from error
        if "stream_dtype" in self.options:
            connection.stream_dtype = choice("stream_dtype", self.options["stream_dtype"], DTYPES)
        return connection

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return f"{self.name}({options})" if options else self.name


def available() -> tuple[str, ...]:
    """The names `make` knows: the files in `crosslayer/connections/`."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(connections.__path__)))


def options(method: type[nn.Module]) -> dict[str, Any]:
    """A connection's own options and their defaults; every connection has those of `EVERY` too."""
    house = inspect.signature(Connection).parameters
    return {k: p.default for k, p in inspect.signature(method).parameters.items() if k not in house}


def make(arm: str) -> Factory:
    """A connection's factory from its string: `make("mudd(dilation=2)")(site, dim, norm)` is a Connection.

    Raises:
        ValueError: the string is not a name with keyword literals, or the name or an option is unknown.
    """
    name, given = parse(arm)
    if name not in available():
        raise ValueError(f"unknown connection {name!r}{nearest(name, available())}; known: {', '.join(available())}")
    known = options(Factory(name).method) | EVERY
    for key in given:
        if key not in known:
            listed = ", ".join(f"{k}={v!r}" for k, v in known.items()) or "none"
            raise ValueError(f"unknown option {key!r} of {name!r}{nearest(key, known)}; its options: {listed}")
    return Factory(name, given)


def parse(arm: str) -> tuple[str, dict[str, Any]]:
    try:
        match ast.parse(arm.strip(), mode="eval").body:
            case ast.Name(id=name):
                return name, {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(k.arg for k in keywords):
                return name, {str(k.arg): ast.literal_eval(k.value) for k in keywords}
    except (SyntaxError, ValueError, AttributeError):
        pass
    raise ValueError(f"cannot read the connection {arm!r}: expected a name, or like \"mudd(dilation=2, ways='qkvr')\"")


def separate(arms: str) -> list[str]:
    """The arms in a line, separated by spaces or commas outside parentheses and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in arms:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char == "(") - (char == ")")
            if depth == 0 and (char == "," or char.isspace()):
                parts.append("")
                continue
        parts[-1] += char
    return [part for part in parts if part]


def nearest(word: str, words: Any) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
