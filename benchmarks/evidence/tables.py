"""The tables of the evidence pages, as Markdown."""

import math
from collections.abc import Collection, Mapping

from benchmarks.evidence.claims import (
    CLAIM_VERDICTS,
    Claim,
    SeedLosses,
    judge_claim,
    read_claims,
    sum_losses,
)
from benchmarks.evidence.holm import remaining_after_holm
from benchmarks.evidence.studies import (
    BASELINE,
    FIRST_STUDY,
    NOVELS_STUDY,
    SMALL_STUDY,
    TIMED_VARIANTS,
    TWENTY_TOKENS_STUDY,
    UNSCALED,
    Measure,
    Part,
    Plan,
    Study,
    read_plans,
)
from crosslayer.intervals import Interval, MeanEstimate, mean_and_std
from crosslayer.number_texts import (
    NOT_KNOWN,
    format_interval,
    format_loss,
    format_mean_std,
    markdown_table,
)

NOT_RUN = "not run yet"
NO_BREAK = "\N{NO-BREAK SPACE}"
VERDICTS = {-1: "better", 1: "worse", 0: "cannot tell"}
LEAST_DIFFERENCE = 0.01  # nats a token, 1 % of perplexity; an interval inside it is "equal"
STARTING_RATE = "seed 0, starting rate (vs prenorm)"
LOSS_COLUMNS = (
    *("arm", "parameters", "rate", STARTING_RATE, "seeds", "loss, best rate"),
    *("vs prenorm", "verdict"),
)
COST_CALLS = {"training": "step", "forward": "forward", "decoding": "decode"}
COST_COLUMNS = ("arm", *COST_CALLS, "loss at equal time", "vs prenorm at equal time")
# Before the table of each measure at equal time.
COST_TITLES: dict[Measure, str] = {
    "equal time": "Shares of pre-norm's speed, not compiled:",
    "equal time, compiled": "Shares of pre-norm's speed, all compiled:",
}
Cells = dict[str, str]


def arm_cells(study: Study, name: str) -> Cells:
    """The sizes and the losses of an arm, by the names of the columns."""
    cells = dict.fromkeys(LOSS_COLUMNS, NOT_KNOWN)
    cells |= {"arm": name, "loss, best rate": NOT_RUN}
    runs = study.runs(name)
    if not runs:
        return cells
    first = next(iter(runs.values()))
    cells["parameters"] = f"{first.parameters:,}"
    cells["rate"] = f"{study.comparison.recipe.settings(study.arms[name]).optimization.lr:g}"
    if not study.has_best_rate(name):
        cells["rate"] += " so far"
    cells[STARTING_RATE] = _format_first_trial(study, name)
    final = [run.valid_loss for run in runs.values()]
    cells["seeds"] = str(len(final))
    cells["loss, best rate"] = format_mean_std(mean_and_std(final), ".4f")
    difference = difference_to_baseline(study, name)
    cells["vs prenorm"] = format_interval(difference)
    if difference is not None:
        cells["verdict"] = judge_difference(difference)
    return cells


def cost_cells(study: Study, name: str, at: Measure) -> Cells:
    """The speeds of an arm and its losses at equal time, by the names of the columns."""
    variant = TIMED_VARIANTS[at]
    cells = {"arm": name}
    for column, call in COST_CALLS.items():
        cells[column] = format_speed(study, name, call, variant)
    early = list(study.losses(name, at).values())
    cells["loss at equal time"] = (
        format_mean_std(mean_and_std(early), ".4f") if early else NOT_KNOWN
    )
    cells["vs prenorm at equal time"] = format_interval(difference_to_baseline(study, name, at))
    return cells


def format_speed(study: Study | None, name: str, call: str, variant: str) -> str:
    """The share of pre-norm's speed, like "0.79 ± 0.01"."""
    if study is None:
        return NOT_RUN
    shares = study.relative_speeds(name, call, variant)
    if name == BASELINE and shares:
        return "1"
    return format_mean_std(mean_and_std(shares), ".2f") if shares else NOT_RUN


def _format_first_trial(study: Study, name: str) -> str:
    """The loss of seed 0 at the rate that a search starts from, and its difference to pre-norm's.

    Like "4.5221 (+0.0046)".
    """
    original = {row.name: row for row in study.comparison.recipe.arms}
    losses = {
        arm: study.comparison.rate_trials(original[arm]).get(1.0)
        for arm in (name, BASELINE)
        if arm in original
    }
    loss, of_baseline = losses[name], losses.get(BASELINE)
    text = format_loss(loss)
    if name != BASELINE and loss is not None and of_baseline is not None:
        text += f" ({loss - of_baseline:+.4f})"
    return text


def estimate_difference(study: Study | None, name: str, at: Measure = "end") -> MeanEstimate | None:
    """An arm's loss minus pre-norm's.

    None for pre-norm, without a study or a common seed, and before the search of both rates has
    ended.
    """
    if study is None or name == BASELINE:
        return None
    return sum_losses({FIRST_STUDY: study}, {name: 1, BASELINE: -1}, at)


def difference_to_baseline(study: Study | None, name: str, at: Measure = "end") -> Interval | None:
    """The interval of `estimate_difference`, or None like it."""
    estimate = estimate_difference(study, name, at)
    return None if estimate is None else estimate.interval


def judge_difference(interval: Interval) -> str:
    """Whether a difference counts: "better", "worse", "equal" or "cannot tell"."""
    if max(abs(interval.low), abs(interval.high)) < LEAST_DIFFERENCE:
        return "equal"
    return VERDICTS[interval.sign]


def arms_tables(part: Part, studies: Mapping[str, Study]) -> str:
    """All arms of a part's one study, and what a reader must know of them."""
    (plan,) = part.plans
    study = studies.get(plan.name)
    if study is None:
        return f"Not run yet.\n\n```sh\n{plan.command}\n```"
    names = plan.arm_names
    extra = [name for name in study.arms if name not in names]
    finished = [name for name in [*names, *extra] if study.runs(name)]
    rows = [arm_cells(study, name) for name in finished]
    tables = [markdown_table(LOSS_COLUMNS, rows)]
    for at, title in COST_TITLES.items():
        if TIMED_VARIANTS[at] in study.speeds:
            costs = [cost_cells(study, name, at) for name in finished]
            tables += [title, markdown_table(COST_COLUMNS, costs)]
            tested, remaining = corrected_arms(study, at)
            if tested > 1:
                tables.append(
                    f"At equal time, with Holm's correction for {tested} arms, {remaining}."
                )
    notes = [*_arms_notes(study), f"```sh\n{plan.command}\n```"]
    missing = [name for name in names if name not in finished]
    if missing:
        notes.append(f"Not run yet: {', '.join(missing)}.")
    return "\n\n".join([*tables, *notes])


def describe_commands(part: Part) -> str:
    """The commands of the studies that a part describes, and where those of the others are."""
    commands = "\n".join(plan.command for plan in part.plans if plan.part == part.title)
    texts = [f"```sh\n{commands}\n```"] if commands else []
    others = dict.fromkeys(plan.part for plan in part.plans if plan.part != part.title)
    if others:
        names = ", ".join(f'"{title}"' for title in others)
        texts.append(f"Commands of the other studies: under {names}.")
    return "\n\n".join(texts)


def _arms_notes(study: Study) -> list[str]:
    results = study.comparison.results
    device, torch = (results.environment[name] for name in ("device", "torch"))
    hours = f"{study.hours:.1f} hours"
    notes = [f"{len(results.runs)} runs, {hours} of training on {device}, torch {torch}."]
    tested, remaining = corrected_arms(study)
    if tested > 1:
        notes.append(
            f"With Holm's correction for the {tested} arms that have an interval {remaining}."
        )
    if not study.plan.paired:
        notes.append(
            f"Differences are to all {len(study.losses(BASELINE))} seeds of {BASELINE}, without "
            "pairing (Welch's intervals)."
        )
    for run in results.diverged:
        notes.append(f"{run.arm}, seed {run.seed}: diverged at step {run.step}.")
    return notes


def corrected_arms(study: Study, at: Measure = "end") -> tuple[int, str]:
    """The number of arms with an interval, and which of them differ with Holm's correction for it,
    in words.
    """
    differences = {name: estimate_difference(study, name, at) for name in study.arms}
    remaining, tested = remaining_after_holm(differences)
    return tested, _count_remaining(remaining)


def _count_remaining(names: Collection[str]) -> str:
    """Like "two differ from pre-norm: mudd, mgr"."""
    if not names:
        return "none differs from pre-norm"
    verb = "differs" if len(names) == 1 else "differ"
    return f"{len(names)} {verb} from pre-norm: {', '.join(names)}"


def claims_table(studies: Mapping[str, SeedLosses]) -> str:
    """The claims with the paper's numbers and our verdicts in each setting, and the names of those
    that nothing was run for.

    Args:
        studies: that have results, by name.
    """
    plans = read_plans()
    known = plans.keys() | studies.keys()
    long_runs = {name for name in known if name.startswith(TWENTY_TOKENS_STUDY)}
    # for each setting, the study that takes the place of each that claims name
    settings = {
        "20 tokens a parameter": {
            FIRST_STUDY: TWENTY_TOKENS_STUDY,
            **{name: name for name in long_runs},
        },
        "embeddings × 50": {name: name for name in known - long_runs},
        "embeddings × 1": {
            name.removeprefix(UNSCALED): name for name in known if name.startswith(UNSCALED)
        },
        "smaller model, longer warm-up": {FIRST_STUDY: SMALL_STUDY, "moe": f"{SMALL_STUDY}-moe"},
        "smaller model, novels": {FIRST_STUDY: NOVELS_STUDY},
    }
    columns = ("claim", "source", "paper", "tested sum", *settings)
    rows = []
    pending = []
    tested: dict[str, dict[str, MeanEstimate | None]] = {setting: {} for setting in settings}
    for claim in read_claims():
        verdicts = []
        for setting, names in settings.items():
            estimate, verdict = _test_claim(claim, names, plans, studies)
            tested[setting][claim.claim] = estimate
            verdicts.append(_format_verdict(estimate, verdict))
        if NOT_RUN in verdicts and set(verdicts) <= {NOT_RUN, NOT_KNOWN}:
            pending.append(claim.claim)
            continue
        arms = " ".join(f"{_format_weight(weight)} {arm}" for arm, weight in claim.sum.items())
        if claim.at != "end":
            arms += f", at {claim.at}"
        cells = (claim.claim, claim.source, claim.paper, arms or claim.needs, *verdicts)
        rows.append(dict(zip(columns, cells, strict=True)))
    notes = [_correct_claims(setting, estimates) for setting, estimates in tested.items()]
    if pending:
        notes.append(f"Not run yet: {'; '.join(pending)}.")
    of_ours = [row for row in rows if row["source"].startswith("ours")]
    of_papers = [row for row in rows if row not in of_ours]
    texts = [markdown_table(columns, of_papers, texts=columns)]
    if of_ours:
        columns = tuple(name for name in columns if name != "paper")
        texts += ["Claims of ours:", markdown_table(columns, of_ours, texts=columns)]
    return "\n\n".join([*texts, *filter(None, notes)])


def _test_claim(
    claim: Claim,
    names: Mapping[str, str],
    plans: Mapping[str, Plan],
    studies: Mapping[str, SeedLosses],
) -> tuple[MeanEstimate | None, str]:
    """Our number and verdict; None and "–" where no study that is planned can tell.

    Args:
        claim: any.
        names: of the studies of one setting, by those that claims name.
        plans: by the names of their studies.
        studies: that have results, by name.
    """
    if claim.needs:
        return None, NOT_KNOWN
    for study, arm in claim.arms:
        if study not in names:
            return None, NOT_KNOWN
        plan = plans.get(names[study])
        if plan and (arm not in plan.arm_names or (claim.at == "equal time" and not plan.speeds)):
            return None, NOT_KNOWN
    of_setting = {name: studies[real] for name, real in names.items() if real in studies}
    return judge_claim(claim, of_setting)


def _format_verdict(estimate: MeanEstimate | None, verdict: str) -> str:
    """Like "agrees: -0.012 ± 0.003"."""
    if estimate is None:
        return verdict
    number = _format_half_width(estimate.interval, 3).replace(" ", NO_BREAK)
    return f"{verdict}: {number}"


def _correct_claims(setting: str, estimates: Mapping[str, MeanEstimate | None]) -> str:
    """The claims of a setting that are decided after Holm's correction; "" where none was tested.

    Args:
        setting: its column.
        estimates: by the claims' words.
    """
    remaining, tested = remaining_after_holm(estimates)
    if not tested:
        return ""
    text = (
        f"With Holm's correction for the {tested} claims that have an interval in the column "
        f'"{setting}", {len(remaining) or "none"} can be told'
    )
    lines = [
        f"- {CLAIM_VERDICTS[estimate.interval.sign]}: {claim}"
        for claim, estimate in remaining.items()
    ]
    return "\n".join([f"{text}:\n", *lines]) if lines else f"{text}."


def _format_weight(weight: float) -> str:
    sign = "−" if weight < 0 else "+"
    return sign if abs(weight) == 1 else f"{sign} {abs(weight):g} ×"


def format_difference(interval: Interval | None) -> str:
    """Like "**-0.58 ± 0.05**": bold where the interval excludes zero."""
    text = _format_half_width(interval)
    return f"**{text}**" if interval is not None and interval.sign else text


def _format_half_width(interval: Interval | None, digits: int = 2) -> str:
    """Like "-0.58 ± 0.05", with further digits for a narrow one; a single seed has no interval."""
    if interval is None:
        return NOT_KNOWN
    if math.isnan(interval.low):
        return f"{interval.mean:+.{digits}f} (one seed)"
    half = interval.high - interval.mean
    while 0 < half < 0.5 * 10**-digits:
        digits += 1
    # with no-break spaces, so that a narrow page has one line for each arm
    return f"{interval.mean:+.{digits}f}\u202f±\u202f{half:.{digits}f}"


def describe_embeddings(model_config: Mapping[str, float]) -> str:
    """Like "embeddings × 50"."""
    if "initializer_range" in model_config:
        return f"initializer_range {model_config['initializer_range']:g}"
    return f"embeddings × {model_config.get('embedding_multiplier', 1):g}"
