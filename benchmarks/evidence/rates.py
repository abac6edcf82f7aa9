"""The losses at every learning rate and warm-up that were tried, for studies of several depths."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.claims import add_losses
from benchmarks.evidence.figures import LOSS, MAIN_ARMS, Figure
from benchmarks.evidence.studies import BASELINE, Part, Study, read_recipe
from benchmarks.evidence.tables import describe_commands
from crosslayer.inspect.figures_training import LineSeries, draw_line_series
from crosslayer.number_texts import NOT_KNOWN, format_interval, markdown_table
from crosslayer.plotting import DrawPanel

SeedLoss = dict[int, float]
Schedule = tuple[float, float]  # warm-up, learning rate
# of each number of layers, arm and schedule
ScheduleLosses = dict[int, dict[str, dict[Schedule, SeedLoss]]]
HIGHEST_SHOWN = 5.15  # nats a token


def losses_by_schedule(studies: Iterable[Study]) -> ScheduleLosses:
    """The final losses of all finished runs, trials too."""
    losses: ScheduleLosses = defaultdict(lambda: defaultdict(dict))
    for study in studies:
        comparison = study.comparison
        for arm in comparison.recipe.arms:
            for factor, of_seeds in comparison.losses_by_rate(arm).items():
                scaled = comparison.arm_at(arm, factor)
                model, _, optimization, _ = comparison.recipe.settings(scaled)
                schedule = (optimization.warmup, optimization.lr)
                finished = {seed: loss for seed, loss in of_seeds.items() if math.isfinite(loss)}
                if not finished:
                    continue
                of_arm = losses[model.layers][arm.name]
                if schedule in of_arm:
                    raise ValueError(
                        f"{study.plan.name}: another study has {arm.name} with {model.layers} "
                        f"layers at {optimization.lr:g} and the same warm-up"
                    )
                of_arm[schedule] = finished
    return losses


def rate_table(part: Part, studies: Mapping[str, Study]) -> str:
    """A row for each depth and arm, a column for each schedule, with differences within it."""
    known = losses_by_schedule(_of_part(part, studies))
    of_arms = [of_arm for arms in known.values() for of_arm in arms.values()]
    columns = {schedule: _describe(schedule) for schedule in sorted(set().union(*of_arms))}
    rows = []
    for layers, arms in sorted(known.items()):
        for name in part.arms:
            of_arm = arms.get(name, {})
            cells = {
                column: _cell(of_arm.get(schedule, {}), name, arms[BASELINE].get(schedule, {}))
                for schedule, column in columns.items()
            }
            if of_arm:
                rows.append({"layers": str(layers), "arm": name} | cells)
    table = markdown_table(("layers", "arm", *columns.values()), rows, ("arm",))
    return f"{table}\n\n{describe_commands(part)}"


def rate_figure(part: Part, studies: Mapping[str, Study]) -> Figure:
    """The loss by the rate, a panel for each depth: means over seeds, and the range of the seeds.

    Runs of another warm-up than the recipe's are not shown.
    """
    shown = [
        (layers, [_rate_line(arms[name], name) for name in part.arms if name in arms])
        for layers, arms in sorted(losses_by_schedule(_of_part(part, studies)).items())
    ]
    rates = sorted({lr for _, lines in shown for line in lines for lr in line.x})
    panels = [(f"{layers} layers", _draw_rates(lines, rates)) for layers, lines in shown]
    return Figure(shown, panels, 4.8, 3.4)


def _rate_line(of_arm: Mapping[Schedule, SeedLoss], name: str) -> LineSeries:
    losses = {
        lr: list(of_seeds.values())
        for (warmup, lr), of_seeds in sorted(of_arm.items())
        if warmup == _usual_warmup()
    }
    return LineSeries(
        name,
        MAIN_ARMS.index(name),
        list(losses),
        [statistics.fmean(values) for values in losses.values()],
        [min(values) for values in losses.values()],
        [max(values) for values in losses.values()],
        is_marked=True,
    )


def _draw_rates(lines: Sequence[LineSeries], rates: Sequence[float]) -> DrawPanel:
    def draw(axes: Any) -> None:
        draw_line_series(axes, lines, ("learning rate", LOSS), log_x=True)
        axes.set_xticks(rates, [f"{lr:.2g}" for lr in rates])
        axes.minorticks_off()
        axes.set_xlim(0.9 * rates[0], 1.1 * rates[-1])
        axes.set_ylim(top=HIGHEST_SHOWN)

    return draw


def _of_part(part: Part, studies: Mapping[str, Study]) -> list[Study]:
    return [studies[plan.name] for plan in part.plans if plan.name in studies]


def _usual_warmup() -> float:
    return read_recipe().settings().optimization.warmup


def _describe(schedule: Schedule) -> str:
    warmup, lr = schedule
    return f"at {lr:.2g}" + ("" if warmup == _usual_warmup() else f", warm-up {warmup:g}")


def _cell(losses: SeedLoss, name: str, baseline: SeedLoss) -> str:
    """The mean loss and its number of seeds, and below them the difference to pre-norm."""
    if not losses:
        return NOT_KNOWN
    text = f"{statistics.fmean(losses.values()):.4f} ({len(losses)})"
    difference = add_losses([losses, {seed: -loss for seed, loss in baseline.items()}], [])
    if name == BASELINE or difference is None:
        return text
    return f"{text}<br>{format_interval(difference.interval)}"
