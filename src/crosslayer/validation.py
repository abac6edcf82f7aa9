"""Checks of what users write, and the words of their messages.

A check raises a ValueError of one line: what was expected, what was given, the remedy.
"""

import difflib
import inspect
import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch

_Choice = TypeVar("_Choice")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF_DTYPES = (torch.bfloat16, torch.float16)
# The kinds of options' values in words, for errors.
_KIND_NAMES: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    dict: "a mapping",
    NoneType: "None",
}
LARGEST_SIZE = 2**31 - 1  # of an option
_LARGEST_SEED = 2**63 - 1
MAX_LAYERS = 10_000
_MAX_PLAIN_VALUES = 100_000  # in one file or option: no recipe has as many
_MAX_PLAIN_DEPTH = 50


def check_counts(**counts: int) -> None:
    """Raise a ValueError for a count, of any size, that is not a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_positive(**options: int) -> None:
    """Raise a ValueError for an option that is not a whole number from 1 to `LARGEST_SIZE`."""
    check_counts(**options)
    for name, value in options.items():
        if value > LARGEST_SIZE:
            raise ValueError(f"{name} must be at most {LARGEST_SIZE}, got {value!r}")


def check_non_negative(**options: float) -> None:
    """Raise a ValueError for an option that is not a number of at least 0."""
    for name, value in options.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


def has_surrogate(text: str) -> bool:
    """Whether a text has half of a surrogate pair, as from a JSON escape: it is no Unicode text."""
    return re.search("[\ud800-\udfff]", text) is not None


def check_seed(seed: int) -> None:
    """Raise a ValueError for a seed that torch's generator does not take."""
    if not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {_LARGEST_SEED}, got {seed}")


def check_idle_options(method: type, cause: str, **options: Any) -> None:
    """Raise a ValueError for an option that would change nothing.

    Args:
        method: the class whose `__init__` has the options' defaults.
        cause: the option that makes it so, like "dynamic=False".
        options: the value of each option that is idle then; its default is allowed.
    """
    parameters = inspect.signature(method).parameters
    for name, value in options.items():
        if value != parameters[name].default:
            raise ValueError(
                f"{name}={value!r} and {cause} exclude each other: {name} would change nothing; "
                "leave it out"
            )


def check_option_type(name: str, value: object, annotation: Any) -> None:
    """Raise a ValueError for an option whose value does not fit the annotation of its parameter."""
    if not _fits_kind(value, annotation):
        raise ValueError(describe_wrong_value(name, value, annotation))


def describe_wrong_value(name: str, value: object, annotation: Any) -> str:
    """The message of an error: a value that does not fit the annotation of its option."""
    words = [word for word in _words_of(annotation) if isinstance(word, str)]
    hint = did_you_mean(value, words) if isinstance(value, str) else ""
    expected = " or ".join(map(_describe_kind, _alternatives(annotation)))
    return f"{name} must be {expected}, got {reprlib.repr(value)}{hint}"


def check_plain(name: str, value: object) -> None:
    """Raise a ValueError for what JSON cannot hold: a date, a set, a key that is no string.

    YAML has all of these, and aliases by which a few lines mean billions of values.

    Args:
        name: of the file or the option, for the message.
        value: what was read.
    """
    left = _MAX_PLAIN_VALUES

    def visit(value: object, depth: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"{name}: more than {_MAX_PLAIN_VALUES:,} values, with its aliases")
        if depth > _MAX_PLAIN_DEPTH:
            raise ValueError(f"{name}: nested deeper than {_MAX_PLAIN_DEPTH} levels")
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"{name}: a key must be a string, got {reprlib.repr(key)}")
                visit(item, depth + 1)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item, depth + 1)
        elif not isinstance(value, str | int | float | NoneType):
            kind = type(value).__name__
            raise ValueError(f"{name}: has a value of type {kind}, {reprlib.repr(value)}")

    visit(value, 0)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The kinds of a union, or the only one."""
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def _words_of(annotation: Any) -> list[Any]:
    """The words of the literals in an annotation, at any depth."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in _words_of(part)]


def _fits_kind(value: object, annotation: Any) -> bool:
    kinds = _alternatives(annotation)
    if len(kinds) > 1:
        return any(_fits_kind(value, kind) for kind in kinds)
    kind = get_origin(annotation) or annotation
    parts = get_args(annotation)
    if kind is Literal:
        return any(type(value) is type(word) and value == word for word in parts)
    if kind is Any:
        return True
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and _is_finite(value)
    if kind is Sequence:  # a string is one too
        return isinstance(value, list | tuple) and _items_fit(list(value), parts)
    return isinstance(value, kind) and _items_fit(value, parts)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can be
        return False


def _items_fit(value: Any, parts: tuple[Any, ...]) -> bool:
    """Whether the items of a dict, list or tuple fit the parameters of its annotation."""
    if not parts:
        return True
    if isinstance(value, dict):
        return all(_fits_kind(key, parts[0]) and _fits_kind(value[key], parts[1]) for key in value)
    if isinstance(value, list) or parts[1:] == (...,):
        return all(_fits_kind(item, parts[0]) for item in value)
    if isinstance(value, tuple):
        return len(value) == len(parts) and all(map(_fits_kind, value, parts))
    return True


def _describe_kind(kind: Any) -> str:
    origin = get_origin(kind) or kind
    parts = get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    words = _KIND_NAMES.get(origin, getattr(origin, "__name__", str(origin)))
    if not parts or parts[-1] is Any:  # items of any kind
        return words
    if origin is dict:
        return f"{words} whose values are each {_describe_kind(parts[1])}"
    if origin is tuple and parts[-1] is not ...:
        return f"{words} of {len(parts)}, each {_describe_kind(parts[0])}"
    if origin in (list, tuple, Sequence):
        return f"{words}, each item {_describe_kind(parts[0])}"
    return words


def check_choice(name: str, given: str, choices: dict[str, _Choice]) -> _Choice:
    """The value of `choices` for the word `given`.

    Raises:
        ValueError: `given` is none of the words; the message lists them.
    """
    if not isinstance(given, str) or given not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}, got {reprlib.repr(given)}"
            f"{did_you_mean(given, choices)}"
        )
    return choices[given]


def parse_dtype(name: str, option: str = "dtype") -> torch.dtype:
    """The floating-point dtype called float32, bfloat16 or float16."""
    return check_choice(option, name, DTYPES)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, like "float32"."""
    return str(dtype).removeprefix("torch.")


def format_shape(shape: Sequence[int]) -> str:
    """Like "[2 5 64]"."""
    return f"[{' '.join(map(str, shape))}]"


def did_you_mean(word: object, known_words: Iterable[str]) -> str:
    """` (did you mean 'mudd'?)` where a known word is close to `word`, else an empty string."""
    close = difflib.get_close_matches(str(word), list(known_words), n=1)
    if not close or close[0] == str(word):
        return ""
    return f" (did you mean {close[0]!r}?)"
