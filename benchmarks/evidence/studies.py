"""The studies: what is planned (studies.yaml), and what has been run (docs/evidence/*.json)."""

import json
import math
import shlex
import statistics
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.results import read_rows
from crosslayer.files import write_json
from crosslayer.inspect.training import loss_at_cost
from crosslayer.run_folders import COMPARISON_RESULTS_FILE
from crosslayer.train.compare import Comparison
from crosslayer.train.comparison_results import (
    ComparisonResults,
    DivergedRun,
    join_environments,
    read_comparison_results,
)
from crosslayer.train.rate_search import best_factor, is_limit, next_factor
from crosslayer.train.recipe import Arm, Recipe, load_recipe
from crosslayer.train.run_state import RunResult
from crosslayer.train.settings import GROUP_OF_OPTION, OptimizationSettings, Settings

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "benchmarks" / "evidence_short.yaml"
PLANS = Path(__file__).parent / "studies.yaml"
RESULTS = ROOT / "docs" / "evidence"
SPEEDS = ROOT / "benchmarks" / "results" / "arms.csv"
BASELINE = "prenorm"
FIRST_STUDY = "short"  # the one of all connections
TWENTY_TOKENS_STUDY = "tokens-20"  # a small model that sees twenty tokens a parameter
TWENTY_TOKENS_SCALED = "tokens-20-scaled"  # the same with the embeddings of the first study
SMALL_STUDY = "warm-small"  # most of these in a smaller model, with a longer warm-up
NOVELS_STUDY = "warm-small-novels-half"  # some of these on another text, with a still longer one
UNSCALED = "unscaled-"  # before the name of a study: with Llama's own embeddings
SEEDS = 3
# Where the data are may differ between machines. What they are is known by their digest, and whose
# study it is by the names of the validation sets.
LOCAL_OPTIONS = ("data", "valid")
# Of a part, for each of its studies that has no other value.
PLAN_KEYS = ("arms", "seeds", "search_rates", "speeds", "paired", "in_overview")
# When losses are taken: at the end, after an eighth of the steps, or when the fastest arm ends,
# as the models are and as `torch.compile` makes them.
Measure = Literal["end", "an eighth of the steps", "equal time", "equal time, compiled"]
# By those of equal time, what was timed: the column "variant" of SPEEDS.
TIMED_VARIANTS: dict[Measure, str] = {"equal time": "eager", "equal time, compiled": "compiled"}
# The shares of pre-norm's speed, one a measurement, by variant, arm and call.
Speeds = dict[str, dict[str, dict[str, list[float]]]]


@cache
def read_recipe() -> Recipe:
    """The recipe of all studies."""
    return load_recipe(RECIPE)


@dataclass
class Plan:
    """A study that is planned.

    Attributes:
        name: of its files.
        part: the title of the part that describes it.
        options: in which it differs from the recipe.
        arms: names; empty for all of the recipe's.
        seeds: of each arm.
        search_rates: each arm has its best rate; otherwise all have that of the options.
        speeds: the study whose models are as fast as its own, and were measured by
            `python -m benchmarks arms --study NAME`; "" for none.
        paired: an arm is compared with pre-norm seed by seed; otherwise with all seeds of pre-norm,
            which has more than the others.
        in_overview: it is a row of the picture of all settings.
    """

    name: str
    part: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    arms: list[str] = field(default_factory=list)
    seeds: int = SEEDS
    search_rates: bool = True
    speeds: str = ""
    paired: bool = True
    in_overview: bool = True

    @property
    def command(self) -> str:
        """What runs it. The same command resumes it."""
        words = ["crosslayer", "compare", str(RECIPE.relative_to(ROOT))]
        for option, value in self.options.items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += ["--" + option.replace("_", "-"), text]
        if self.arms:
            words += ["--arms", *self.arms]
        if self.search_rates:
            words += ["--search-rates", "true"]
        words += ["--seeds", str(self.seeds)]
        return shlex.join([*words, "--out", f"evidence-{self.name}"])

    @property
    def arm_names(self) -> list[str]:
        """The names of its arms in the recipe."""
        return self.arms or [arm.name for arm in read_recipe().arms]

    @property
    def recipe(self) -> Recipe:
        """The recipe of all studies with its options."""
        return replace(read_recipe(), overrides=self.options)

    def settings(self) -> dict[str, Any]:
        """What its results.json has as settings."""
        identity = self.recipe.settings().fixed_options()
        plain: dict[str, Any] = json.loads(json.dumps(identity))
        return plain


@dataclass
class Part:
    """A part of the page: studies that are read together.

    Attributes:
        title: its name on the page.
        shows: names in `pages.PARTS`.
        arms: that are shown; empty for all of the recipe's.
        plans: its studies.
    """

    title: str
    shows: list[str]
    arms: list[str]
    plans: list[Plan]


def read_parts() -> list[Part]:
    """The parts of studies.yaml."""
    parts = []
    plans = read_plans()
    for row in _read_rows():
        of_part = [plans[name] for name in row["studies"]]
        parts.append(Part(row["part"], row["shows"], row.get("arms", []), of_part))
    return parts


def read_plans() -> dict[str, Plan]:
    """All planned studies by their names."""
    plans = {}
    for row in _read_rows():
        of_part = {key: row[key] for key in PLAN_KEYS if key in row}
        for name, options in row["studies"].items():
            if options is not None:  # it is described in this part
                of_plan = of_part | {key: options.pop(key) for key in PLAN_KEYS if key in options}
                plans[name] = Plan(name, row["part"], options, **of_plan)
    return plans


def _read_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load(PLANS.read_text("utf8"))
    return rows


@dataclass
class Study:
    """A study with results.

    Attributes:
        plan: what it is.
        comparison: its merged results.
        speeds: of its arms; empty where they were measured for other models.
    """

    plan: Plan
    comparison: Comparison
    speeds: Speeds = field(default_factory=dict)

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """Each arm at its own rate, by its name in the recipe, in the recipe's order."""
        recipe = self.comparison.recipe
        order = [arm.name for arm in read_recipe().arms]
        found = {row.name: arm for row, arm in zip(recipe.arms, self.comparison.arms, strict=True)}
        known = [name for name in order if name in found]
        return {name: found[name] for name in [*known, *(found.keys() - known)]}

    @cached_property
    def tokens(self) -> int:
        """Of the training of one run."""
        _, data, optimization, _ = self.comparison.recipe.settings()
        return optimization.steps * data.batch * data.context

    @property
    def hours(self) -> float:
        """The training of all runs. By the median step, as a run may have been held up."""
        seconds = [self.tokens / run.tokens_per_second for run in self.comparison.results.runs]
        return sum(seconds) / 3600

    def runs(self, name: str) -> dict[int, RunResult]:
        """The finished runs of an arm at its own rate, by seed."""
        return self.comparison.finished_runs(self.arms[name]) if name in self.arms else {}

    def compared_runs(self, name: str) -> dict[int, RunResult]:
        """The same, but none before the search of the arm's rate has ended."""
        return self.runs(name) if self.has_best_rate(name) else {}

    def losses(self, name: str, at: Measure = "end") -> dict[int, float]:
        """The losses of an arm's compared runs, by seed; those before the end from their curves."""
        if at == "end":
            return {seed: run.valid_loss for seed, run in self.compared_runs(name).items()}
        if at in TIMED_VARIANTS:
            return self._losses_at_equal_time(name, TIMED_VARIANTS[at])
        losses = {}
        for seed, run in self.compared_runs(name).items():
            steps, curve = zip(*run.curve, strict=True)
            loss = loss_at_cost(steps, curve, steps[-1] / 8)
            if loss is not None:
                losses[seed] = loss
        return losses

    def is_paired(self, name: str) -> bool:
        """Whether an arm's losses are taken together with others' of the same seed."""
        return self.plan.paired or name != BASELINE

    def has_best_rate(self, name: str) -> bool:
        """Whether the search of an arm's rate, if there is one, has ended within its limits."""
        if not self.plan.search_rates:
            return True
        recipe = self.comparison.recipe
        original = next((arm for arm in recipe.arms if arm.name == name), None)
        trials = self.comparison.rate_trials(original) if original else {}
        if not trials or next_factor(trials) is not None:
            return False
        best = best_factor(trials)
        return math.isfinite(trials[best]) and not is_limit(best)

    def relative_speeds(self, name: str, call: str, variant: str) -> list[float]:
        """The shares of pre-norm's speed, one a measurement.

        Args:
            name: of an arm.
            call: "step", "forward" or "decode".
            variant: "eager" or "compiled", which pre-norm is then too.
        """
        return self.speeds.get(variant, {}).get(name, {}).get(call, [])

    def step_times(self, name: str, variant: str) -> list[float]:
        """The training time of a step as a multiple of pre-norm's; one a measurement."""
        return [1 / share for share in self.relative_speeds(name, "step", variant)]

    def seed_step_time(self, name: str, seed: int, variant: str) -> float | None:
        """The time of a step by one of the measurements, another for each seed.

        So the spread over seeds has the spread of the measurements in it. None without any.
        """
        times = self.step_times(name, variant)
        return times[seed % len(times)] if times else None

    def equal_time(self, variant: str) -> float | None:
        """The training time of the fastest arm with a result, in steps of pre-norm."""
        of_runs = []
        for name in self.arms:
            step_times = self.step_times(name, variant)
            runs = self.runs(name)
            if step_times and 0 in runs:
                steps, _ = runs[0].curve[-1]
                of_runs.append(statistics.fmean(step_times) * steps)
        return min(of_runs, default=None)

    def _losses_at_equal_time(self, name: str, variant: str) -> dict[int, float]:
        """The losses when the fastest arm ends, by seed."""
        losses = {}
        end = self.equal_time(variant)
        for seed, run in self.compared_runs(name).items():
            time = self.seed_step_time(name, seed, variant)
            if time is None or end is None:
                continue
            steps, curve = zip(*run.curve, strict=True)
            costs = [step * time for step in steps]
            # by this seed's measurement the fastest arm may end a little earlier than by their mean
            loss = loss_at_cost(costs, curve, min(end, costs[-1]))
            if loss is not None:
                losses[seed] = loss
        return losses


def read_studies(folder: Path = RESULTS, speeds: Path = SPEEDS) -> dict[str, Study]:
    """The studies that have results, by name. The files NAME.*.json are one study.

    Raises:
        ValueError: files of one study have other settings or data, or the same run.
    """
    studies = {}
    for name, plan in read_plans().items():
        files = sorted(folder.glob(f"{name}.*.json"))
        if files:
            results = merge_results({file.name: _read_results(file) for file in files})
            comparison = Comparison.from_results(results, folder)
            studies[name] = Study(plan, comparison, _read_speeds(speeds, plan.speeds))
    return studies


def _read_results(file: Path) -> ComparisonResults:
    results = read_comparison_results(file)
    for name, value in Settings.from_options().fixed_options().items():
        if value is None:  # an option that is younger than some results
            results.settings.setdefault(name, None)
    return results


def _read_speeds(file: Path, study: str) -> Speeds:
    """The speeds of a study's arms, as shares of pre-norm's.

    An arm that differs from another in the optimizer alone need not be measured. A variant that
    fewer arms were measured with than another is left out, as a measurement may be unfinished.
    """
    speeds: Speeds = {}
    for row in read_rows(file):
        if row["study"] == study:
            of_arm = speeds.setdefault(row["variant"], {}).setdefault(row["arm"], {})
            for call in ("step", "forward", "decode"):
                of_arm.setdefault(call, []).append(float(row[f"{call} of PreNorm"]))
    for arm in read_recipe().arms:
        is_same_model = all(
            GROUP_OF_OPTION[option] is OptimizationSettings for option in arm.options
        )
        for of_variant in speeds.values():
            if arm.name not in of_variant and is_same_model and arm.connection in of_variant:
                of_variant[arm.name] = of_variant[arm.connection]
    most = max(map(len, speeds.values()), default=0)
    return {variant: of_arms for variant, of_arms in speeds.items() if len(of_arms) == most}


def merge_results(parts: dict[str, ComparisonResults]) -> ComparisonResults:
    """The results of several comparisons with the same settings and data as those of one.

    Args:
        parts: by the names of their files.

    Raises:
        ValueError: settings, data or an arm differ, or two files have the same run.
    """
    names = list(parts)
    results = list(parts.values())
    environment = reduce(join_environments, [part.environment for part in results])
    merged = replace(results[0], environment=environment, arms={}, runs=[], diverged=[])
    owners: dict[tuple[str, int], str] = {}
    for name, part in zip(names, results, strict=True):
        if (part.settings, part.data) != (merged.settings, merged.data):
            raise ValueError(f"{name} and {names[0]} have other settings or data")
        for arm, row in part.arms.items():
            if merged.arms.setdefault(arm, row) != row:
                raise ValueError(f"{name}: the arm {arm!r} has other options in another file")
        runs: list[RunResult | DivergedRun] = [*part.runs, *part.diverged]
        for run in runs:
            owner = owners.setdefault((run.arm, run.seed), name)
            if owner != name:
                raise ValueError(f"{name} and {owner} both have {run.arm!r}, seed {run.seed}")
        merged.runs += part.runs
        merged.diverged += part.diverged
    return merged


def take_over(comparison: Path, folder: Path = RESULTS) -> Path:
    """Copy a comparison's results.json as a file of its study, without the paths of its machine.

    Args:
        comparison: its folder.
        folder: of the studies' files.

    Raises:
        ValueError: it is not a study of studies.yaml.
    """
    results = _read_results(comparison / COMPARISON_RESULTS_FILE)
    for plan in read_plans().values():
        settings = plan.settings()
        local = {name: settings[name] for name in LOCAL_OPTIONS}
        same_texts = settings["valid"].keys() == results.settings["valid"].keys()
        if same_texts and settings == results.settings | local:
            results.settings |= local
            file = folder / f"{plan.name}.{comparison.name}.json"
            folder.mkdir(parents=True, exist_ok=True)
            write_json(file, asdict(results))
            return file
    raise ValueError(
        f"{comparison}: no study of {PLANS.name} has its settings; they differ from those of "
        f"{RECIPE.name} in {', '.join(_changed_options(results.settings)) or 'nothing'}"
    )


def _changed_options(settings: dict[str, Any]) -> list[str]:
    recipe = Plan("").settings()
    return [
        f"{name} = {value!r}"
        for name, value in settings.items()
        if name not in LOCAL_OPTIONS and recipe.get(name) != value
    ]
