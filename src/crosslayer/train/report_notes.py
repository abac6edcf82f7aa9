"""What a reader of a comparison's table must know, in sentences."""

import itertools
import math
from dataclasses import fields

from ..hf.config import make_config
from ..number_texts import format_loss
from ..spec import make
from .arm_options import arms_alike, describe_options, differing_options, option_values, range_text
from .compare import Comparison
from .comparison_results import DIGEST_KEY, TORCH_OPERATIONS, DivergedRun
from .method_code import code_digest
from .optimizers import warmup_steps
from .rate_search import best_factor, is_limit, names_at_rates, next_factor
from .results_table import TableRow, differing_execution, find_baseline_arms, result_table
from .run_state import RunResult
from .settings import CHANGEABLE_OPTIONS, RATE_OPTIONS, DataSettings, ModelSettings, Settings

SAME_RATE = "at the given lr"
_SPEED_NOTE = (
    "Speeds are of the runs themselves, one after the other: what else runs on the machine changes "
    "them."
)
# A warm-up of fewer steps can favour other connections over pre-norm (docs/evidence.md).
_SHORT_WARMUP = 48

# Arms that differ in none of an entry's options have the same data, batches or initial backbone
# weights; `_OPTIONS_OF_RATES` below decide the learning rates.
_DATA_OPTIONS = {"data", "valid", "tokenizer", "context", "task_options", "model_config"}
_BATCH_OPTIONS = {"steps", *(field.name for field in fields(DataSettings))} - CHANGEABLE_OPTIONS
_WEIGHT_OPTIONS = {"precision", *_DATA_OPTIONS, *(field.name for field in fields(ModelSettings))}
# Multiples of the learning rate, and the parameters that have them.
_RATE_SCALES = {
    "connection_lr_scale": "the connections' parameters",
    "embedding_lr_scale": "embeddings",
}
_OPTIONS_OF_RATES = {*RATE_OPTIONS, *_RATE_SCALES, "optimizer"}


def report_notes(comparison: Comparison) -> list[str]:
    """The notes below the table, one item each."""
    notes = [
        _setup_note(comparison),
        _data_note(comparison),
        _environment_note(comparison),
        _fairness_note(comparison),
    ]
    rows = result_table(comparison)
    seeds = _most_seeds(rows)
    if seeds > 1:
        fewer = "".join(f", {row.seeds} for {row.arm}" for row in rows if row.seeds < seeds)
        notes.append(
            f"Mean ± standard deviation over {seeds} seeds{fewer}. Differences are seed by seed, "
            "of the seeds that both arms have, with their 95 % interval."
        )
    notes += _baseline_notes(comparison)
    notes += scope_notes(comparison)
    notes += _rate_notes(comparison)
    notes += run_notes(comparison)
    missing = dict.fromkeys(arm.name for arm, _ in comparison.missing_runs())
    if missing:
        notes.append(f"Not finished: {', '.join(missing)}. The same command resumes.")
    return notes


def table_notes(comparison: Comparison) -> list[str]:
    """The notes below the table in a terminal, where the others are in the report."""
    return [
        _SPEED_NOTE,
        *_baseline_notes(comparison),
        *run_notes(comparison),
        *scope_notes(comparison),
    ]


def _baseline_notes(comparison: Comparison) -> list[str]:
    """A note where the arms have no baseline, and one for each baseline after the first."""
    baselines = find_baseline_arms(comparison.recipe, comparison.arms)
    arms_of_baseline: dict[str, list[str]] = {}
    for name, baseline in baselines.items():
        if baseline is not None:
            arms_of_baseline.setdefault(baseline.name, []).append(name)
    if not arms_of_baseline:
        return ["No arm is prenorm, so there is nothing to compare with; add it to the arms."]
    first, *others = arms_of_baseline
    notes = []
    for other in others:
        compared = ", ".join(name for name in arms_of_baseline[other] if name != other)
        if compared:
            notes.append(f"Compared with {other} in place of {first}: {compared}.")
    return notes


def _setup_note(comparison: Comparison) -> str:
    """Backbones, steps, optimizer and precision."""
    options = {name: range_text(values) for name, values in option_values(comparison).items()}
    optimizer = f"{options['optimizer'].replace('adamw', 'AdamW')} at {options['lr']}"
    optimizer = optimizer.replace("muon", f"Muon at {options['muon_lr']} and AdamW")
    for name, parameters in _RATE_SCALES.items():
        if options[name] != "1":
            optimizer += f", {parameters} at {options[name]} times this rate"
    backbones = []
    if "family" in options:
        backbones.append(
            f"{options['family']} backbone, {options['layers']} layers, width {options['dim']}, "
            f"{options['heads']} heads"
        )
    if options["pretrained"]:
        backbones.append(f"pretrained backbone {options['pretrained']}")
    amount = f"{options['batch']} {comparison.recipe.task.unit}"
    if comparison.recipe.task.unit == "tokens":
        amount = f"{options['batch']} × {options['context']} {_sequence_unit(comparison)}"
    note = (
        f"{' and '.join(backbones)}; {options['steps']} steps of {amount}, {optimizer}, "
        f"precision {options['precision']}."
    )
    if comparison.results.scale != "full":
        note += f" Scale: {comparison.results.scale}."
    return note


def _data_note(comparison: Comparison) -> str:
    """The data of the first arm: results.json has its sizes."""
    results = comparison.results
    first = comparison.recipe.arms[0]
    sizes = " and ".join(
        f"{count:,} {name}" for name, count in results.data.items() if name != DIGEST_KEY
    )
    entropy = ""
    if results.entropy:
        entropy = (
            f"; the frequencies of single {_sequence_unit(comparison)} of the first validation set "
            f"give {results.entropy:.3f} bits per byte"
        )
        bits = [run.metrics["bits/byte"] for run in results.runs if "bits/byte" in run.metrics]
        if bits and min(bits) > results.entropy:
            entropy += ", less than every run: train longer before you compare"
    owner = f" of {first.name}" if _DATA_OPTIONS & differing_options(comparison).keys() else ""
    return (
        f"Data{owner}: {comparison.recipe.settings(first).data.data}, {sizes}{entropy}"
        f"{_passes_text(comparison)}."
    )


def _environment_note(comparison: Comparison) -> str:
    versions = comparison.results.environment
    return (
        f"Measured on {versions['device']}; torch {versions['torch']}, "
        f"Python {versions['python']}, crosslayer {versions['crosslayer']}."
    )


def _fairness_note(comparison: Comparison) -> str:
    """What the arms share, and what their differences and ratios are to."""
    differing = differing_options(comparison)
    operations = comparison.results.environment.get("operations", TORCH_OPERATIONS)
    return (
        f"{arms_alike(differing, _BATCH_OPTIONS)} see the same batches in the same order. "
        f"{arms_alike(differing, _WEIGHT_OPTIONS)} start from the same backbone weights. "
        f"vs prenorm is the difference in validation loss ({loss_unit_of(comparison)}). Speed "
        "and activations (what one forward pass stores for the backward pass) are ratios to "
        f"prenorm's, with {operations}. {_SPEED_NOTE}"
    )


def _passes_text(comparison: Comparison) -> str:
    """How often a run saw its data, where that is more than once and the data are at hand."""
    passes = []
    for arm in comparison.recipe.arms:
        if arm.name in comparison.examples:
            _, data, optimization, _ = comparison.recipe.settings(arm)
            passes.append(comparison.examples[arm.name].epochs(optimization.steps, data.batch))
    if not passes or max(passes) <= 1:
        return ""
    least = f"{min(passes):.1f}"
    most = f"{max(passes):.1f}"
    if least == most:
        return f"; each run saw them {most} times"
    return f"; a run saw them {least} to {most} times"


def run_notes(comparison: Comparison) -> list[str]:
    """What is to be said of single runs, with the table or where there is none."""
    return [
        *_memory_notes(comparison),
        *_instability_notes(comparison),
        *_code_notes(comparison),
        *_execution_notes(comparison),
    ]


def _execution_notes(comparison: Comparison) -> list[str]:
    """The arms whose speeds cannot be compared with the baseline's."""
    baselines = find_baseline_arms(comparison.recipe, comparison.arms)
    differing = {
        arm.name: differing_execution(comparison, arm, baselines[arm.name])
        for arm in comparison.arms
    }
    names = [name for name, options in differing.items() if options]
    if not names:
        return []
    options = dict.fromkeys(itertools.chain(*differing.values()))
    note = (
        f"Without a ratio of speed and activations: {', '.join(names)}. Their runs and prenorm's "
        f"were made with different {', '.join(options)}."
    )
    return [note]


def _memory_notes(comparison: Comparison) -> list[str]:
    if not comparison.without_memory:
        return []
    runs = "; ".join(f"{name}, seed {seed}" for name, seed in comparison.without_memory)
    note = (
        f"Out of memory: {runs}. No more runs of such an arm were tried. The same command tries "
        "again; with --accumulate or --recompute it needs less memory, and its speed is not "
        "comparable with the others'."
    )
    return [note]


def _instability_notes(comparison: Comparison) -> list[str]:
    """The runs of the compared arms that diverged, and those of which batches were skipped."""
    names = {arm.name for arm in comparison.arms}
    notes = []
    for diverged in comparison.results.diverged:
        if diverged.arm in names and diverged.seed < comparison.seeds:
            problem = diverged.problem or f"the loss is {diverged.loss}"
            name = f"{diverged.arm}, seed {diverged.seed}"
            notes.append(f"{name}: diverged at step {diverged.step}: {problem}.")
    for arm in comparison.arms:
        for seed, run in comparison.finished_runs(arm).items():
            if run.skipped:
                count = len(run.skipped)
                notes.append(
                    f"{arm.name}, seed {seed}: the batches of {count} unstable steps were skipped."
                )
    return notes


def _code_notes(comparison: Comparison) -> list[str]:
    """The arms with runs that were made with other code of the connection than today's.

    Trials of a rate and diverged runs count.
    """
    notes = []
    runs: list[RunResult | DivergedRun] = [*comparison.results.runs, *comparison.results.diverged]
    for arm in comparison.recipe.arms:
        today = code_digest(make(arm.connection).method)
        names = names_at_rates(arm.name)
        codes = [run.method_code for run in runs if run.arm in names]
        other = [code for code in codes if code not in ("", today)]
        if other:
            notes.append(
                f"{arm.name}: {len(other)} of {len(codes)} runs were made with other code of "
                f"{arm.connection}; another --out makes them again."
            )
    return notes


def _rate_notes(comparison: Comparison) -> list[str]:
    if not comparison.search_rates:
        return []
    explanation = (
        "Each arm is at the best learning rate of those that were tried with seed 0, whose loss is "
        f"therefore a little too low. The column {SAME_RATE!r} has the loss of seed 0 at the given "
        "rate, 1 ×."
    )
    notes = [explanation]
    for arm in comparison.recipe.arms:
        trials = sorted(comparison.rate_trials(arm).items())
        losses = ", ".join(f"{format_loss(loss)} at {factor:g} ×" for factor, loss in trials)
        if losses:
            notes.append(f"{arm.name}: {losses}.")
    return notes


def _open_rates(comparison: Comparison, of_arms: list[Settings]) -> list[str]:
    """What a comparison leaves open about learning rates. of_arms: the settings of its arms."""
    if not comparison.search_rates:
        rates = range_text(settings.optimization.lr for settings in of_arms)
        return [f"each arm at its best learning rate instead of {rates} (--search-rates true)"]
    at_limit: dict[float, list[str]] = {}
    searching = []
    for arm in comparison.recipe.arms:
        trials = comparison.rate_trials(arm)
        factor = best_factor(trials)
        if trials and next_factor(trials) is not None:
            searching.append(arm.name)
        elif is_limit(factor):
            at_limit.setdefault(factor, []).append(arm.name)
    questions = [
        f"the best learning rate of {', '.join(names)}, as the search ended at its limit, "
        f"{factor:g} × the given rate (start from another --lr)"
        for factor, names in at_limit.items()
    ]
    if searching:
        questions.append(
            f"the best learning rate of {', '.join(searching)}, as the search has not ended"
        )
    return questions


def _steps_text(count: float) -> str:
    return "1 step" if count == 1 else f"{count:g} steps"


def _most_seeds(rows: list[TableRow]) -> int:
    """The largest number of finished runs of an arm."""
    return max((row.seeds for row in rows), default=0)


def scope_notes(comparison: Comparison) -> list[str]:
    """What a comparison of this size can and cannot tell."""
    rows = result_table(comparison)
    if not rows:
        return []
    scope = "This comparison can show an effect that is large from the start. Not tested: "
    notes = [f"{scope}{'; '.join(_open_questions(comparison, rows))}."]
    differing = differing_options(comparison)
    if differing:
        notes.append(f"The arms differ in options too: {describe_options(differing)}.")
    rates_text = "one learning rate for all"
    if comparison.search_rates:
        rates_text = "each arm at its best rate of those tried"
    elif _OPTIONS_OF_RATES & differing.keys():
        rates_text = "each arm at its given rate"
    return notes + _interval_notes(comparison, rows, rates_text)


def _open_questions(comparison: Comparison, rows: list[TableRow]) -> list[str]:
    """What a comparison leaves open. rows: its table."""
    recipe = comparison.recipe
    of_arms = [recipe.settings(arm) for arm in comparison.arms]
    amounts = [settings.optimization.steps * settings.data.batch for settings in of_arms]
    unit = recipe.task.unit
    if unit == "tokens":
        contexts = [settings.data.context for settings in of_arms]
        amounts = [amount * length for amount, length in zip(amounts, contexts, strict=True)]
        unit = _sequence_unit(comparison)
    backbones = [round(row.parameters / (1 + row.extra)) for row in rows]
    size = f"{range_text(amounts)} {unit} and {range_text(backbones)} parameters"
    questions = [f"whether a difference lasts beyond {size}"]
    questions += _open_rates(comparison, of_arms)
    scales = {settings.optimization.connection_lr_scale for settings in of_arms}
    if scales == {1} and any(row.extra for row in rows):
        questions.append(
            "the connections' own parameters at a lower learning rate than the others "
            "(--connection-lr-scale 0.1)"
        )
    if recipe.task.unit == "tokens" and any(map(_has_slow_embeddings, of_arms)):
        questions.append(
            "whether a gain lasts where the embeddings learn faster than other weights "
            "(--embedding-lr-scale 50)"
        )
    warmup = min(warmup_steps(settings.optimization) for settings in of_arms)
    if warmup < _SHORT_WARMUP:
        questions.append(
            f"whether a gain lasts with a longer warm-up than {_steps_text(warmup)} (--warmup)"
        )
    if _most_seeds(rows) == 1:
        questions.append(
            "which of two close arms is better, as one seed has no interval (--seeds 3)"
        )
    return questions


def _has_slow_embeddings(settings: Settings) -> bool:
    """Whether embeddings have the rate of other weights and no factor: docs/evidence.md."""
    model = settings.model
    if model.pretrained is not None:  # they have learned already
        return False
    config = make_config(
        model.family, model.layers, model.dim, model.heads, overrides=model.model_config
    )
    factor = getattr(config, "embedding_multiplier", 1)
    return bool(factor == 1 and settings.optimization.embedding_lr_scale == 1)


def _interval_notes(comparison: Comparison, rows: list[TableRow], rates: str) -> list[str]:
    """Which differences count, where there are seeds enough to say. rates: the arms', in words."""
    names: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for row in rows:
        if row.difference is not None and not math.isnan(row.difference.low):
            name = row.arm + _diverged_text(comparison, row.arm)
            names[row.difference.sign].append(name)
    if not any(names.values()):
        return []
    words = {-1: "better", 1: "worse", 0: "no significant difference"}
    verdicts = "; ".join(
        f"{words[sign]}: {', '.join(arms)}" for sign, arms in names.items() if arms
    )
    tested = sum(map(len, names.values()))
    by_chance = ""
    if tested > 1:
        by_chance = (
            f" By chance, about {0.05 * tested:.2g} of {tested} arms without any effect would be "
            "called better or worse."
        )
    return [f"Against prenorm, by 95 % intervals over seeds, {rates}: {verdicts}.{by_chance}"]


def _diverged_text(comparison: Comparison, arm: str) -> str:
    """How many of an arm's compared runs diverged, which its difference does not contain."""
    seeds = [
        run.seed
        for run in comparison.results.diverged
        if run.arm == arm and run.seed < comparison.seeds
    ]
    return f" ({len(seeds)} of {comparison.seeds} seeds diverged)" if seeds else ""


def _sequence_unit(comparison: Comparison) -> str:
    tokenizers = option_values(comparison)["tokenizer"]
    return "bytes" if set(tokenizers) == {"bytes"} else "tokens"


def loss_unit_of(comparison: Comparison) -> str:
    """The unit of the losses, in words."""
    recipe = comparison.recipe
    return range_text(recipe.task.loss_unit(recipe.settings(arm).data) for arm in comparison.arms)
