"""How a model's weights and numbers change over the steps of its training run.

Paper: DenseFormer (arXiv 2402.02622), Figure 10: the weights at several steps, which soon have
their final pattern.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .inspection import ModelInspection


def split_runs(models: Sequence[ModelInspection]) -> dict[str, list[ModelInspection]]:
    """The models of each run by their step, ascending, by the run's name.

    Models of no known step are left out, and so are runs with a single one.
    """
    runs: dict[str, list[ModelInspection]] = {}
    for model in models:
        if model.step is not None:
            runs.setdefault(model.run, []).append(model)
    return {
        name: sorted(of_run, key=lambda model: model.step or 0)
        for name, of_run in runs.items()
        if len({model.step for model in of_run}) > 1
    }


def weights_over_steps(models: Sequence[ModelInspection], input_label: str) -> Tensor:
    """What an input mixes with, [parts steps].

    Args:
        models: inspections with "mixing", of one run, of `split_runs`.
        input_label: like "3.mlp", "3.q" or "readout".

    Raises:
        ValueError: the models have no such input.
    """
    columns = []
    for model in models:
        for site in model["mixing"]:
            if input_label in site.inputs:
                columns.append(site.read_mean[site.inputs.index(input_label)])
    if len(columns) != len(models):
        known = [label for site in models[0]["mixing"] for label in site.inputs]
        raise ValueError(f"no input {input_label!r}; the inputs are {', '.join(known)}")
    return torch.stack(columns, -1)


def distance_to_last(models: Sequence[ModelInspection]) -> list[float]:
    """How far the weights of a model's reads and writes that change are from the last step's.

    ‖w − w_last‖ / ‖w_last‖, at each step.
    """
    weights = []
    for model in models:
        of_sites = []
        for site in model["mixing"]:
            means = (site.read_mean, site.carry_mean, site.keep_mean, site.write_mean)
            of_sites += [mean.flatten() for mean in means]
        weights.append(torch.cat(of_sites))
    all_steps = torch.stack(weights)
    changing = all_steps[:, (all_steps != all_steps[-1]).any(0)]
    last = changing[-1]
    return [((w - last).norm() / last.norm().clamp_min(1e-30)).item() for w in changing]


def collect_scalars(value: Any, path: str = "") -> dict[str, float]:
    """Every number in an analysis's result by its path, like "findings.lambda_score".

    Items of a list are named by their label where they have one: "scales.3.mlp.output_rms". Tensors
    and texts are left out.
    """
    if isinstance(value, bool):
        return {}
    if isinstance(value, int | float):
        return {path: float(value)}
    prefix = f"{path}." if path else ""
    items: list[tuple[str, Any]] = []
    if dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(getattr(item, "label", str(place)), item) for place, item in enumerate(value)]
    scalars: dict[str, float] = {}
    for name, item in items:
        scalars |= collect_scalars(item, prefix + name)
    return scalars


def scalars_over_steps(models: Sequence[ModelInspection]) -> dict[str, list[float]]:
    """Every number of the analyses at each step, by its path; NaN where a step does not have it.

    Args:
        models: inspections of one run, of `split_runs`.
    """
    of_steps = [collect_scalars(model.results) for model in models]
    return {path: [step.get(path, math.nan) for step in of_steps] for path in of_steps[-1]}
