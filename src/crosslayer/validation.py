"""Checks of what users write.

Each raises a ValueError of one line: what was expected, what was given, the remedy.
"""

import difflib
import math
import reprlib
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch

Choice = TypeVar("Choice")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The kinds of options' values in words, for errors.
KIND_NAMES: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    NoneType: "None",
}


def check_positive(**options: int) -> None:
    """Raise a ValueError for an option that is not a whole number of at least 1."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_non_negative(**options: float) -> None:
    """Raise a ValueError for an option that is not a number of at least 0."""
    for name, value in options.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


def check_option_type(name: str, value: object, annotation: Any) -> None:
    """Raise a ValueError for an option whose value does not fit the annotation of its parameter."""
    kinds = [annotation]
    if get_origin(annotation) in (Union, UnionType):
        kinds = list(get_args(annotation))
    if not any(_fits_kind(value, kind) for kind in kinds):
        expected = " or ".join(_describe_kind(kind) for kind in kinds)
        words = [word for kind in kinds for word in get_args(kind) if isinstance(word, str)]
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be {expected}, got {reprlib.repr(value)}{hint}")


def _fits_kind(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(kind))
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    if get_origin(kind) is Sequence:
        return isinstance(value, list | tuple)
    return isinstance(value, kind)


def _describe_kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is Sequence:
        return "a list"
    return KIND_NAMES[kind]


def check_choice(name: str, given: str, choices: dict[str, Choice]) -> Choice:
    """The value of `choices` for the word `given`.

    Raises:
        ValueError: `given` is none of the words; the message lists them.
    """
    if not isinstance(given, str) or given not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}, got {given!r}"
            f"{did_you_mean(given, choices)}"
        )
    return choices[given]


def check_literal(name: str, given: object, literal: Any) -> None:
    """Raise a ValueError for an option that is none of the words of a `Literal` type."""
    words = get_args(literal)
    if not isinstance(given, str) or given not in words:
        raise ValueError(
            f"{name} must be one of {', '.join(map(str, words))}, got {given!r}"
            f"{did_you_mean(given, words)}"
        )


def parse_dtype(name: str, option: str = "dtype") -> torch.dtype:
    """The floating-point dtype called float32, bfloat16 or float16."""
    return check_choice(option, name, DTYPES)


def did_you_mean(word: object, known_words: Iterable[str]) -> str:
    """` (did you mean 'mudd'?)` where a known word is close to `word`, else an empty string."""
    close = difflib.get_close_matches(str(word), list(known_words), n=1)
    if not close or close[0] == word:
        return ""
    return f" (did you mean {close[0]!r}?)"
