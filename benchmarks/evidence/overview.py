"""The picture of all settings: what each connection gains in each study, at one glance."""

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from benchmarks.evidence.figures import VERDICT_MARKS, Figure
from benchmarks.evidence.size_tables import describe_options
from benchmarks.evidence.studies import BASELINE, Study, read_recipe
from benchmarks.evidence.tables import difference_to_baseline, judge_difference
from crosslayer.intervals import Interval
from crosslayer.plotting import BLACK, DrawPanel

OVERVIEW_FILE = "all-settings.svg"
ARMS = (
    *("postnorm", "resi_dual", "denseformer", "one-way MUDD", "mudd", "hyper", "mhc", "mgr"),
    "attnres",
)
# The columns of settings, and their widths as multiples of an arm's.
SETTINGS = {
    "layers": 1.1,
    "width": 0.9,
    "tokens": 1,
    "tokens /\nparameter": 1.4,
    "warm-up": 1,
    "embeddings": 2.2,
    "text": 1.2,
}
SETTINGS_WIDTH = sum(SETTINGS.values())
EMBEDDING_OPTIONS = ("model_config", "embedding_std", "embedding_lr_scale")
COLOURED = ("better", "worse")
LARGEST = 0.25  # nats a token; larger differences have the same colour
OPACITIES = (0.15, 0.75)  # of a colour, the least and that of the largest difference
CENTRED = {"ha": "center", "va": "center"}


class SettingRow(NamedTuple):
    """A study in the picture.

    Attributes:
        settings: texts, one for each of `SETTINGS`.
        differences: to pre-norm, by arm; None where there is none.
    """

    settings: tuple[str, ...]
    differences: dict[str, Interval | None]


def overview_figure(studies: Mapping[str, Study]) -> Figure:
    """The difference to pre-norm of each arm in each study, where it has an interval."""
    rows = []
    for study in studies.values():
        differences = {arm: _known_difference(study, arm) for arm in ARMS}
        if study.plan.in_overview and any(differences.values()):
            rows.append((_sort_key(study), SettingRow(_describe(study), differences)))
    ordered = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    width = 0.72 * (SETTINGS_WIDTH + len(ARMS))
    return Figure(ordered, [("", _draw_rows(ordered))], width, 1.4 + 0.27 * len(ordered))


def _known_difference(study: Study, arm: str) -> Interval | None:
    found = difference_to_baseline(study, arm)
    return None if found is None or math.isnan(found.low) else found


def _sort_key(study: Study) -> tuple[Any, ...]:
    """Long runs first; then by embeddings, text, size, tokens and warm-up."""
    settings = study.plan.settings()
    factor = settings["model_config"].get("embedding_multiplier", 1)
    is_other_text = settings["valid"].keys() != read_recipe().settings().data.valid.keys()
    size = (settings["layers"], settings["dim"], study.tokens, settings["warmup"])
    is_short = _tokens_per_parameter(study) < 1
    return (
        is_short,
        -factor,
        describe_options(study.plan, EMBEDDING_OPTIONS),
        is_other_text,
        *size,
    )


def _tokens_per_parameter(study: Study) -> float:
    baseline = next(iter(study.runs(BASELINE).values()))
    return study.tokens / baseline.parameters


def _describe(study: Study) -> tuple[str, ...]:
    settings = study.plan.settings()
    experts = settings["model_config"].get("num_local_experts")
    return (
        f"{settings['layers']}, experts" if experts else str(settings["layers"]),
        str(settings["dim"]),
        f"{study.tokens / 1e6:.2g}M",
        f"{_tokens_per_parameter(study):.2g}",
        f"{settings['warmup']:g}",
        describe_options(study.plan, EMBEDDING_OPTIONS).removeprefix("embeddings "),
        " and ".join(settings["valid"]),
    )


def _draw_rows(rows: list[SettingRow]) -> DrawPanel:
    def draw(axes: Any) -> None:
        ends = list(accumulate(SETTINGS.values(), initial=-SETTINGS_WIDTH))
        centres = [(start + end) / 2 for start, end in pairwise(ends)]
        for centre, name in zip(centres, SETTINGS, strict=True):
            axes.text(centre, -0.4, name, ha="center", va="bottom")
        for place, name in enumerate(ARMS):
            turned = {"rotation": 35, "rotation_mode": "anchor"}
            axes.text(place + 0.5, -0.4, name, ha="left", va="bottom", **turned)
        for height, row in enumerate(rows):
            for centre, text in zip(centres, row.settings, strict=True):
                axes.text(centre, height + 0.5, text, fontsize=9, **CENTRED)
            for place, found in enumerate(row.differences.values()):
                if found is not None:
                    _draw_difference(axes, place, height, found)
        axes.hlines(range(len(rows) + 1), -SETTINGS_WIDTH, len(ARMS), color="#DDDDDD", lw=0.6)
        axes.set_xlim(-SETTINGS_WIDTH, len(ARMS) + 0.6)
        axes.set_ylim(len(rows), -2.8)
        axes.axis("off")

    return draw


def _draw_difference(axes: Any, left: int, top: int, found: Interval) -> None:
    verdict = judge_difference(found)
    colour, _ = VERDICT_MARKS[verdict]
    if verdict in COLOURED:
        least, most = OPACITIES
        opacity = max(least, most * min(1, abs(found.mean) / LARGEST))
        axes.fill_between([left, left + 1], top, top + 1, color=colour, alpha=opacity, lw=0)
        colour = BLACK
    axes.text(left + 0.5, top + 0.5, f"{found.mean:+.2f}", fontsize=9, color=colour, **CENTRED)
