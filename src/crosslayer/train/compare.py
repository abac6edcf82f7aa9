"""Compare arms: every arm × seed, on the same batches from the same backbone weights.

results.json is rewritten after every run, and an unfinished run is saved when it is stopped. The
same comparison, started again in the same folder, does what is missing.
"""

import gc
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch

from ..errors import is_out_of_memory
from ..files import write_json
from ..run_folders import (
    COMPARISON_RESULTS_FILE,
    DATA_DIGEST,
    RUNS_FOLDER,
    default_folder,
    run_folder_name,
)
from ..spec import make
from ..validation import check_positive
from .checkpoint import list_checkpoints, remove_checkpoint
from .comparison_results import (
    DIGEST_KEY,
    ComparisonResults,
    DivergedRun,
    describe_environment,
    join_environments,
    load_matching_results,
)
from .method_code import code_digest
from .metrics_log import check_loggers
from .optimizers import build_optimizers
from .parallel import apply_recomputation, launch_fabric, launched_ranks
from .rate_search import best_factor, names_at_rates, next_factor, scale_rates
from .recipe import Arm, Recipe
from .run import train_arm
from .run_state import RunResult, StepResult
from .settings import RATE_OPTIONS, OptimizationSettings
from .signals import StopSignals
from .task import Examples, build_model, check_outside_data, check_vocab, load_examples
from .trainer import RunDiverged


@dataclass
class Comparison:
    """What is compared, and the results so far.

    Args:
        recipe: the arms and their settings.
        seeds: number of runs of each arm.
        folder: of results.json, the report and the runs.
        examples: the data of each arm, by its name.
        results: content of results.json.
        search_rates: find each arm's learning rate before its other seeds are run.
        without_memory: arm and seed of the runs that did not fit in memory. No more runs of such an
            arm are tried until the comparison is started again.
    """

    recipe: Recipe
    seeds: int
    folder: Path
    examples: dict[str, Examples]
    results: ComparisonResults
    search_rates: bool = False
    without_memory: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def from_results(cls, results: ComparisonResults, folder: Path) -> Self:
        """A comparison to report on, without its data.

        Args:
            results: of a results.json.
            folder: where it lies.
        """
        scaled: set[str] = set()
        for name in results.arms:
            scaled |= results.arms.keys() & (names_at_rates(name).keys() - {name})
        arms = [
            Arm(name, row["connection"], paper=row["paper"], options=row["options"])
            for name, row in results.arms.items()
            if name not in scaled
        ]
        of_runs = [run.seed for run in results.runs] + [run.seed for run in results.diverged]
        seeds = 1 + max(of_runs, default=0)
        return cls(Recipe(arms, results.settings), seeds, folder, {}, results, bool(scaled))

    def resume_results(self) -> None:
        """Take over the runs of the folder's results.json, if it has one.

        Raises:
            ValueError: the folder is not a comparison's, or that of another one.
        """
        previous = load_matching_results(self.folder, self.results)
        if previous is not None:
            self.results.arms = {**previous.arms, **self.results.arms}
            self.results.runs = previous.runs
            self.results.diverged = previous.diverged
            now = self.results.environment if self.missing_runs() else {}
            self.results.environment = join_environments(previous.environment, now)

    @property
    def arms(self) -> list[Arm]:
        """The compared arms: those of the recipe, each at its best rate where rates are searched.

        Until an arm's search ends, it is at the best rate so far.
        """
        return [self.at_best_rate(arm) for arm in self.recipe.arms]

    def at_best_rate(self, arm: Arm) -> Arm:
        """An arm of the recipe at its best rate so far, where rates are searched."""
        return self.arm_at(arm, best_factor(self.rate_trials(arm))) if self.search_rates else arm

    def arm_at(self, arm: Arm, factor: float) -> Arm:
        """An arm of the recipe with its learning rates times a factor."""
        return scale_rates(arm, self._optimization_settings[arm.name], factor)

    @cached_property
    def _optimization_settings(self) -> dict[str, OptimizationSettings]:
        """Those of each arm of the recipe. A report asks for them hundreds of times."""
        return {arm.name: self.recipe.settings(arm).optimization for arm in self.recipe.arms}

    def losses_by_rate(self, arm: Arm) -> dict[float, dict[int, float]]:
        """The loss of each seed at each factor of an arm's rates; infinite where it diverged."""
        factors = names_at_rates(arm.name)
        losses: dict[float, dict[int, float]] = {}
        for run in self.results.runs:
            if run.arm in factors:
                losses.setdefault(factors[run.arm], {})[run.seed] = run.valid_loss
        for diverged in self.results.diverged:
            if diverged.arm in factors:
                losses.setdefault(factors[diverged.arm], {})[diverged.seed] = math.inf
        return dict(sorted(losses.items()))

    def rate_trials(self, arm: Arm) -> dict[float, float]:
        """The loss of seed 0 at each factor of an arm's rates; infinite where the run diverged."""
        losses = self.losses_by_rate(arm)
        return {factor: of_seeds[0] for factor, of_seeds in losses.items() if 0 in of_seeds}

    def missing_runs(self) -> list[tuple[Arm, int]]:
        """Arms and seeds to run, the first seed of every arm before the second of any.

        Where rates are searched, the next trial of each arm whose search has not ended.
        """
        arms = [arm for arm in self.recipe.arms if not self.lacks_memory(arm)]
        done = {(run.arm, run.seed) for run in self.results.runs}
        done |= {(run.arm, run.seed) for run in self.results.diverged}
        missing = []
        if self.search_rates:
            for arm in arms:
                factor = next_factor(self.rate_trials(arm))
                if factor is not None:
                    missing.append((self.arm_at(arm, factor), 0))
        if not missing:
            arms = [self.at_best_rate(arm) for arm in arms]
            for seed in range(self.seeds):
                missing += [(arm, seed) for arm in arms if (arm.name, seed) not in done]
        return missing

    def lacks_memory(self, arm: Arm) -> bool:
        """Whether a run of an arm of the recipe did not fit in memory, at any rate."""
        names = names_at_rates(arm.name)
        return any(name in names for name, _ in self.without_memory)

    def finished_runs(self, arm: Arm) -> dict[int, RunResult]:
        """An arm's finished runs, by seed."""
        return {
            run.seed: run
            for run in self.results.runs
            if run.arm == arm.name and run.seed < self.seeds
        }


def prepare_comparison(
    recipe: Recipe, seeds: int, folder: Path | None, search_rates: bool = False
) -> Comparison:
    """Check all that a comparison needs, load its data, and read the results that its folder has.

    Args:
        recipe: the arms and their settings.
        seeds: number of runs of each arm.
        folder: by default one named after the settings, so that the same command resumes.
        search_rates: find each arm's learning rate before its other seeds are run.

    Raises:
        ValueError: an arm, an option, the data or the folder cannot be used. Nothing has been
            written.
    """
    check_positive(seeds=seeds)
    if search_rates:
        recipe = _rates_in_options(recipe)
    for arm in recipe.arms:
        if search_rates and recipe.settings(arm).optimization.lr == 0:
            raise ValueError(f"search_rates scales the learning rate, and {arm.name} has lr 0")
        check_outside_data(folder or Path(), recipe.settings(arm).data, recipe.task)
    examples = _load_checked_examples(recipe)
    first = examples[recipe.arms[0].name]
    shared = recipe.settings().fixed_options()
    data = {**first.sizes, DIGEST_KEY: first.digest}
    if folder is None:
        folder = default_folder("compare", {"settings": shared, "data": data})
    results = ComparisonResults(describe_environment(), shared, data, recipe.scale, first.entropy)
    comparison = Comparison(recipe, seeds, folder, examples, results, search_rates)
    for arm in recipe.arms:
        results.arms[arm.name] = _describe_arm(comparison, arm)
        if search_rates:
            examples |= dict.fromkeys(names_at_rates(arm.name), examples[arm.name])
    comparison.resume_results()
    return comparison


def _load_checked_examples(recipe: Recipe) -> dict[str, Examples]:
    """The data of each arm, by its name.

    An arm that cannot be trained must say so before any other is trained.
    """
    pretrained = [arm for arm in recipe.arms if recipe.settings(arm).model.pretrained is not None]
    for arm in recipe.arms:
        if arm not in pretrained:  # without memory, and before data are read
            with torch.device("meta"):
                _check_model(recipe, arm, num_classes=256)
    examples = _load_examples(recipe)
    for arm in recipe.arms:
        with _named_in_errors(recipe, arm):
            check_vocab(recipe.settings(arm).model, examples[arm.name])
    for arm in pretrained:
        _check_model(recipe, arm, examples[arm.name].num_classes)
    return examples


def _check_model(recipe: Recipe, arm: Arm, num_classes: int) -> None:
    """Raise a ValueError where an arm's model cannot be built, or not be trained as asked."""
    settings = recipe.settings(arm)
    ranks, _ = launched_ranks()
    with _named_in_errors(recipe, arm):
        settings.micro_batch(ranks)
        check_loggers(settings.engine.loggers)
        model = build_model(settings, arm.connection, num_classes, 0, recipe.task)
        apply_recomputation(model, settings.engine)
        build_optimizers(model, settings.optimization)


@contextmanager
def _named_in_errors(recipe: Recipe, arm: Arm) -> Iterator[None]:
    """Let a ValueError say which of several arms it is of."""
    try:
        yield
    except ValueError as error:
        if len(recipe.arms) == 1:
            raise
        raise ValueError(f"the arm {arm.name!r}: {error}") from None


def _rates_in_options(recipe: Recipe) -> Recipe:
    """The same recipe with overridden learning rates among its options, where arms can scale them.

    An override would replace a scaled rate too.
    """
    rates = {name: value for name, value in recipe.overrides.items() if name in RATE_OPTIONS}
    overrides = {
        name: value for name, value in recipe.overrides.items() if name not in RATE_OPTIONS
    }
    arms = []
    for arm in recipe.arms:
        options = {name: value for name, value in arm.options.items() if name not in rates}
        arms.append(replace(arm, options=options))
    options = {**recipe.options, **rates}
    return replace(recipe, arms=arms, options=options, overrides=overrides)


def _describe_arm(comparison: Comparison, arm: Arm) -> dict[str, Any]:
    """An arm in results.json."""
    used = comparison.recipe.settings(arm).to_options()
    # those that it is trained with: a small scale and overrides have others than the recipe
    options = {name: used.get(name, value) for name, value in arm.options.items()}
    if "pretrained" in options:  # it decides the tokenizer, unless another one is given
        options["tokenizer"] = used["tokenizer"]
    described = {"connection": arm.connection, "options": options, "paper": arm.paper}
    digest = comparison.examples[arm.name].digest
    if digest != comparison.results.data[DIGEST_KEY]:  # that of the first arm
        described[DATA_DIGEST] = digest
    return described


def _load_examples(recipe: Recipe) -> dict[str, Examples]:
    """The data of each arm, by its name. Arms with the same data settings share them."""
    loaded: dict[str, Examples] = {}
    examples = {}
    for arm in recipe.arms:
        settings = recipe.settings(arm)
        key = json.dumps([asdict(settings.data), settings.model.model_config], sort_keys=True)
        if key not in loaded:
            with _named_in_errors(recipe, arm):
                loaded[key] = load_examples(settings, recipe.task)
        examples[arm.name] = loaded[key]
    return examples


def run_folder(comparison: Comparison, arm: str, seed: int) -> Path:
    """The folder of the checkpoints and metrics of one run of the arm of this name."""
    return comparison.folder / RUNS_FOLDER / run_folder_name(arm, seed)


def run_comparison(comparison: Comparison, on_step: Callable[[Arm, int, StepResult], Any]) -> None:
    """Do the runs that are missing, and write results.json after each, on rank 0.

    The caller holds the folder (`files.lock_folder`): two processes would do the same runs.

    Args:
        comparison: of `prepare_comparison`; its results grow.
        on_step: called with arm, seed and result after every step.

    Raises:
        RunStopped: Ctrl-C or SIGTERM; the run is saved.
    """
    fabric = launch_fabric(comparison.recipe.settings().engine)
    if fabric.is_global_zero:
        comparison.folder.mkdir(parents=True, exist_ok=True)
        comparison.resume_results()  # another process may have finished runs before this one's lock
        _remove_checkpoints(comparison)
    comparison.results = fabric.broadcast(comparison.results)
    with StopSignals():  # a signal between two runs stops the second
        while missing := comparison.missing_runs():  # a search depends on its results
            arm, seed = missing[0]
            report_step = partial(on_step, arm, seed)
            result = None
            try:
                result = _do_run(comparison, arm, seed, report_step)
            except Exception as error:
                # The other ranks would wait for ever for one without memory.
                if fabric.world_size > 1 or not is_out_of_memory(error):
                    error.add_note(f"in the run of {arm.name}, seed {seed}")  # of the traceback
                    raise
            gc.collect()  # the model is in cycles of references, and may be large
            if result is None:
                comparison.without_memory.append((arm.name, seed))
                torch.cuda.empty_cache()
                continue
            comparison.results.arms.setdefault(arm.name, _describe_arm(comparison, arm))
            if isinstance(result, RunResult):
                comparison.results.runs.append(result)
            else:
                comparison.results.diverged.append(result)
            if fabric.is_global_zero:
                write_json(comparison.folder / COMPARISON_RESULTS_FILE, asdict(comparison.results))
                _remove_checkpoints(comparison)
            fabric.barrier()


def _do_run(
    comparison: Comparison, arm: Arm, seed: int, on_step: Callable[[StepResult], Any]
) -> RunResult | DivergedRun:
    """Train one arm from one seed, and return the result. Only `keep_models` keeps models of it."""
    folder = run_folder(comparison, arm.name, seed)
    settings = comparison.recipe.settings(arm)
    examples = comparison.examples[arm.name]
    task = comparison.recipe.task
    try:
        trainer = train_arm(settings, arm, seed, examples, task, folder, on_step)
        return trainer.result()
    except RunDiverged as error:  # a result too, and no reason to stop the other arms
        code = code_digest(make(arm.connection).method)
        return DivergedRun(arm.name, seed, error.step, str(error.loss), error.problem, code)


def _remove_checkpoints(comparison: Comparison) -> None:
    """Remove the checkpoints of runs whose result is written: they are of no use any more."""
    results = comparison.results
    done: list[RunResult | DivergedRun] = [*results.runs, *results.diverged]
    for run in done:
        for checkpoint in list_checkpoints(run_folder(comparison, run.arm, run.seed)):
            remove_checkpoint(checkpoint)
