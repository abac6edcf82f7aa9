"""Whether a method's code is still what a run was made with."""

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import resolve_name
from types import FunctionType
from typing import Any

from ..connection import Connection


def code_digest(method: type[Connection[Any]]) -> str:
    """Identifies the code of a method, without comments and docstrings.

    That is the file that defines it, the files of its package that it imports from, and those that
    they import from. Compiled modules are left out. Of a method without a file, as in a notebook,
    it is the code of its class; empty where that is not known either.
    """
    digest = hashlib.sha256()
    seen: set[str] = set()
    waiting = [method.__module__]
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        try:
            tree = ast.parse(inspect.getsource(sys.modules[name]))
        except (KeyError, OSError, TypeError, SyntaxError):
            if name == method.__module__:
                return _class_digest(method)
            continue
        waiting += _imported_siblings(tree, sys.modules[name].__package__)
        digest.update(_code_without_docstrings(tree).encode())
    return digest.hexdigest()[:12]


def _class_digest(method: type[Connection[Any]]) -> str:
    """The same of the functions and plain values of a class, and of its bases in the notebook."""
    texts = []
    classes = [cls for cls in method.__mro__ if cls.__module__ == method.__module__]
    members = [member for cls in classes for member in sorted(vars(cls).items())]
    for name, member in members:
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(function, FunctionType):
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            except (OSError, SyntaxError):  # typed without a notebook; a lambda
                return ""
            texts.append(_code_without_docstrings(tree))
        elif isinstance(member, str | int | float | tuple) and not name.startswith("__"):
            texts.append(f"{name} = {member!r}")
    code = "\n".join(texts)
    return hashlib.sha256(code.encode()).hexdigest()[:12] if code else ""


def _code_without_docstrings(tree: ast.Module) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _imported_siblings(tree: ast.Module, package: str | None) -> list[str]:
    """The modules of a package that the code of one of them imports from."""
    if not package:  # a script, or a module that is in no package
        return []
    names: list[str] = []
    for node in _statements_of_import(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                names.append(submodule if submodule in sys.modules else origin)
    own = [name for name in names if package in (name, name.rpartition(".")[0])]
    return [name for name in own if name in sys.modules]


def _statements_of_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: all but those of its functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _statements_of_import(child)
