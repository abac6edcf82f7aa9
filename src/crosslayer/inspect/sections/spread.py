"""The spread over seeds in any picture: another panel for a matrix, a band for a line.

A picture is drawn from every seed separately, and the mean and deviation are those of what is
drawn. So they hold for what a picture computes of a model's numbers, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...plotting import DrawPanel
from ..figures import draw_lines, draw_matrix
from ..figures_ablation import draw_ablation, draw_block_ablation
from ..inspection import ModelInspection
from ..seed_averages import combine_values, seed_deviation, seed_mean

FigurePanels = list[tuple[str, DrawPanel]]  # titles and functions that draw


# The argument that has a name and values, a pair a line.
_LINE_ARGUMENTS: dict[Any, str] = {
    draw_lines: "lines",
    draw_ablation: "models",
    draw_block_ablation: "models",
}


def draw_with_spread(
    draw_panels: Callable[[Sequence[ModelInspection]], FigurePanels],
    models: Sequence[ModelInspection],
) -> FigurePanels:
    """The panels of a section, with the spread of those models that are means over seeds."""
    panels_of_seeds = [dict(draw_panels(of_seed)) for of_seed in _models_of_seeds(models)]
    panels: FigurePanels = []
    for title, draw in draw_panels(models):
        of_seeds = [found[title] for found in panels_of_seeds if title in found]
        panels += _spread_panels(title, draw, of_seeds)
    return panels


def _models_of_seeds(models: Sequence[ModelInspection]) -> list[list[ModelInspection]]:
    """The first seeds of all means, then the second ones, …, with the names of their means."""
    of_seeds = []
    for number in range(max(len(model.seeds) for model in models)):
        members = []
        for model in models:
            if number < len(model.seeds):
                members.append(replace(model.seeds[number], name=model.name, run=model.run))
        of_seeds.append(members)
    return of_seeds


def _spread_panels(title: str, draw: DrawPanel, of_seeds: list[DrawPanel]) -> FigurePanels:
    """A panel, drawn from the mean over seeds, and that of the deviation where it is a matrix."""
    if not isinstance(draw, partial) or len(of_seeds) < 2:
        return [(title, draw)]
    arguments = [seed.keywords for seed in of_seeds if isinstance(seed, partial)]
    if draw.func is draw_matrix:
        values = [seed["values"] for seed in arguments]
        mean = partial(draw, values=combine_values(values, seed_mean))
        deviations = combine_values(values, seed_deviation)
        deviation = partial(draw, values=deviations, limit=None, signed=False)
        return [(title, mean), (f"{title}, deviation over {len(values)} seeds", deviation)]
    if draw.func in _LINE_ARGUMENTS:
        key = _LINE_ARGUMENTS[draw.func]
        return [(title, _draw_bands(draw, key, [seed[key] for seed in arguments]))]
    return [(title, draw)]


def _draw_bands(draw: Any, key: str, of_seeds: Sequence[Sequence[tuple[str, Any]]]) -> DrawPanel:
    """Lines of means with their deviations; those of single models as they are."""
    by_name: dict[str, list[Any]] = {}
    for lines in of_seeds:
        for name, values in lines:
            by_name.setdefault(name, []).append(values)
    means = [
        (name, combine_values(by_name[name], seed_mean) if name in by_name else values)
        for name, values in draw.keywords[key]
    ]
    deviations = {
        name: combine_values(seeds, seed_deviation)
        for name, seeds in by_name.items()
        if len(seeds) > 1
    }
    return partial(draw, **{key: means}, deviations=deviations)
