"""What a reader of a comparison's table must know, in sentences."""

from ..hf.config import make_config
from .compare import Comparison
from .results_table import TableRow, result_table
from .settings import Settings

SAME_RATE = "at the shared lr"


def report_notes(comparison: Comparison) -> list[str]:
    """All of it, a sentence or a few each."""
    results, rows = comparison.results, result_table(comparison)
    model, data, optimization, engine = comparison.recipe.settings()
    optimizer = "Muon and AdamW" if optimization.optimizer == "muon" else "AdamW"
    unit = _sequence_unit(comparison)
    setup = (
        f"{model.family} backbone, {model.layers} layers, width {model.dim}, {model.heads} heads; "
        f"{optimization.steps} steps of {data.batch} × {data.context} {unit}, "
        f"{optimizer} at {optimization.lr:g}, precision {engine.precision}."
    )
    if results.scale != "full":
        setup += f" Scale: {results.scale}."
    sizes = " and ".join(
        f"{count:,} {name}" for name, count in results.data.items() if name != "sha256"
    )
    entropy = ""
    if results.entropy:
        entropy = f"; order-0 entropy {results.entropy:.3f} bits per byte"
    versions = results.environment
    notes = [
        setup,
        f"Data: {data.data}, {sizes}{entropy}.",
        (
            f"Measured on {versions['device']}; torch {versions['torch']}, "
            f"Python {versions['python']}, crosslayer {versions['crosslayer']}."
        ),
        (
            "Every arm sees the same batches in the same order from the same backbone weights. "
            f"vs prenorm is the difference in validation loss ({loss_unit_of(comparison)}). Speed "
            "and activations (what one forward pass stores for the backward pass) are ratios to "
            "prenorm's, with the PyTorch operations, not with fused kernels."
        ),
    ]
    seeds = most_seeds(rows)
    if seeds > 1:
        notes.append(f"Mean ± standard deviation over {seeds} seeds; differences seed by seed.")
    notes += scope_notes(comparison)
    notes += _rate_notes(comparison)
    for diverged in results.diverged:
        notes.append(
            f"{diverged.arm}, seed {diverged.seed}: diverged with the loss {diverged.loss} at "
            f"step {diverged.step}."
        )
    for arm in comparison.arms:
        for seed, run in comparison.finished_runs(arm).items():
            if run.skipped:
                count = len(run.skipped)
                notes.append(
                    f"{arm.name}, seed {seed}: the batches of {count} unstable steps were skipped."
                )
    missing = dict.fromkeys(arm.name for arm, _ in comparison.missing_runs())
    if missing:
        notes.append(f"Not finished: {', '.join(missing)}. The same command resumes.")
    return notes


def _rate_notes(comparison: Comparison) -> list[str]:
    if not comparison.search_rates:
        return []
    explanation = (
        "Each arm is at its own best learning rate, found with seed 0. The column "
        f"{SAME_RATE!r} has the loss of seed 0 at the given rate, 1 ×."
    )
    notes = [explanation]
    for arm in comparison.recipe.arms:
        trials = sorted(comparison.rate_trials(arm).items())
        losses = ", ".join(f"{loss:.4f} at {factor:g} ×" for factor, loss in trials)
        notes.append(f"{arm.name}: {losses}.")
    return notes


def most_seeds(rows: list[TableRow]) -> int:
    """The largest number of finished runs of an arm."""
    return max((row.seeds for row in rows), default=0)


def scope_notes(comparison: Comparison) -> list[str]:
    """What a comparison of this size can and cannot tell."""
    rows, recipe = result_table(comparison), comparison.recipe
    if not rows:
        return []
    _, data, optimization, _ = recipe.settings()
    amount, unit = optimization.steps * data.batch, recipe.task.unit
    if unit == "tokens":
        amount, unit = amount * data.context, _sequence_unit(comparison)
    size = f"{amount:,} {unit} and {rows[0].parameters:,} parameters"
    open_questions = [f"what is left of a difference beyond {size}"]
    of_arms = [recipe.settings(arm) for arm in comparison.arms]
    rates = {settings.optimization.lr for settings in of_arms}
    if not comparison.search_rates and len(rates) == 1:
        open_questions.append(
            f"how an arm does at its own learning rate, as all are at {optimization.lr:g} "
            "(--search-rates true)"
        )
    if recipe.task.unit == "tokens" and any(map(_has_slow_embeddings, of_arms)):
        open_questions.append(
            "what is left of a gain where the embeddings learn faster than other weights "
            "(--embedding-lr-scale 50)"
        )
    if most_seeds(rows) == 1:
        open_questions.append(
            "which of two close arms is better, as one seed has no interval (--seeds 3)"
        )
    scope = "This comparison can show an effect that is large from the start. It cannot show "
    return [
        f"{scope}{', nor '.join(open_questions)}.",
        *_interval_notes(rows, comparison.search_rates),
    ]


def _has_slow_embeddings(settings: Settings) -> bool:
    """Whether embeddings have the rate of other weights and no factor: docs/evidence.md."""
    model = settings.model
    config = make_config(
        model.family, model.layers, model.dim, model.heads, overrides=model.model_config
    )
    factor = getattr(config, "embedding_multiplier", 1)
    return bool(factor == 1 and settings.optimization.embedding_lr_scale == 1)


def _interval_notes(rows: list[TableRow], search_rates: bool) -> list[str]:
    """Which differences count, where there are seeds enough to say."""
    known = [(row, row.interval) for row in rows if row.interval is not None]
    if not known:
        return []
    names: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for row, interval in known:
        ends = f"{row.arm} ({interval.low:+.4f} to {interval.high:+.4f})"
        names[interval.sign].append(ends)
    words = {-1: "better", 1: "worse", 0: "not told apart"}
    rates = "each arm at its own best rate" if search_rates else "one learning rate for all"
    verdicts = "; ".join(
        f"{words[sign]}: {', '.join(arms)}" for sign, arms in names.items() if arms
    )
    return [f"Against prenorm, by 95 % intervals over seeds, {rates}: {verdicts}."]


def _sequence_unit(comparison: Comparison) -> str:
    return "bytes" if comparison.recipe.settings().data.tokenizer == "bytes" else "tokens"


def loss_unit_of(comparison: Comparison) -> str:
    """The unit of the losses, in words."""
    return comparison.recipe.task.loss_unit(comparison.recipe.settings().data)
