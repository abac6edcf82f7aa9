"""Checks of what users write.

Each raises a ValueError of one line: what was expected, what was given, the remedy.
"""

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar, get_args

import torch

Choice = TypeVar("Choice")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    if given not in words:
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
