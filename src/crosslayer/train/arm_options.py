"""The options of a comparison's arms: their values, in which they differ, and both in words."""

from collections.abc import Iterable
from typing import Any

from .compare import Comparison


def differing_options(comparison: Comparison) -> dict[str, dict[str, list[str]]]:
    """The options in which the arms differ, with the names of the arms that have each value.

    `CHANGEABLE_OPTIONS` are left out.
    """
    differing = {}
    for name, values in option_values(comparison).items():
        arms_by_value: dict[str, list[str]] = {}
        for arm, value in zip(comparison.arms, values, strict=True):
            arms_by_value.setdefault(_value_text(value), []).append(arm.name)
        if len(arms_by_value) > 1:
            differing[name] = arms_by_value
    return differing


def option_values(comparison: Comparison) -> dict[str, list[Any]]:
    """The value of each arm, by the name of the option; None where an arm has no such option."""
    rows = [comparison.recipe.settings(arm).fixed_options() for arm in comparison.arms]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _value_text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def range_text(values: Iterable[Any]) -> str:
    """Values in words: the smallest and the largest number, or every text."""
    texts = {_value_text(value): value for value in values if value is not None}
    if len(texts) > 1 and all(isinstance(value, int | float) for value in texts.values()):
        low = min(texts, key=texts.__getitem__)
        high = max(texts, key=texts.__getitem__)
        return f"{low} to {high}"
    return " or ".join(texts)


def describe_options(differing: dict[str, dict[str, list[str]]]) -> str:
    """Like "layers 2 (prenorm, mudd), 4 (deep); lr 0.006 (prenorm, deep), 0.001 (mudd)"."""
    options = []
    for name, arms_by_value in differing.items():
        values = [f"{value} ({', '.join(arms)})" for value, arms in arms_by_value.items()]
        options.append(f"{name} {', '.join(values)}")
    return "; ".join(options)


def arms_alike(differing: dict[str, dict[str, list[str]]], names: set[str]) -> str:
    """The arms that differ in none of the options of these names, in words."""
    found = [name for name in differing if name in names]
    return f"Arms with the same {' and '.join(found)}" if found else "All arms"
