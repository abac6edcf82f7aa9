"""The connections in the main studies, in short: the table of README and those of their pages."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.evidence.studies import (
    BASELINE,
    FIRST_STUDY,
    SMALL_STUDY,
    TWENTY_TOKENS_SCALED,
    TWENTY_TOKENS_STUDY,
    UNSCALED,
    Measure,
    Study,
    read_recipe,
)
from benchmarks.evidence.tables import (
    NO_BREAK,
    Cells,
    difference_to_baseline,
    format_difference,
    format_speed,
)
from crosslayer.number_texts import NOT_KNOWN, markdown_table
from crosslayer.spec import connection_name

TIMES = f"×{NO_BREAK}"
SpeedSource = tuple[str, str, str]
# By tokens a parameter and the factor of the embeddings: which study's losses, and when they are
# read.
LOSS_COLUMNS: dict[str, tuple[str, Measure]] = {
    f"20 tokens, {TIMES}1": (TWENTY_TOKENS_STUDY, "end"),
    f"20 tokens, {TIMES}1, equal time": (TWENTY_TOKENS_STUDY, "equal time, compiled"),
    f"20 tokens, {TIMES}50": (TWENTY_TOKENS_SCALED, "end"),
    f"0.2 tokens, {TIMES}1": (UNSCALED + FIRST_STUDY, "end"),
    f"0.2 tokens, {TIMES}50": (FIRST_STUDY, "end"),
}
# The same on the page of a connection.
PAGE_COLUMNS: dict[str, tuple[str, Measure]] = {
    **{name: LOSS_COLUMNS[name] for name in LOSS_COLUMNS if "equal time" not in name},
    "smaller model": (SMALL_STUDY, "end"),
}
# Of whose models, of which call, and of which variant each speed is.
SPEED_COLUMNS: dict[str, SpeedSource] = {
    "training speed": (TWENTY_TOKENS_STUDY, "step", "compiled"),
    "decoding speed": (TWENTY_TOKENS_STUDY, "decode", "compiled"),
    "training speed, not compiled": (TWENTY_TOKENS_STUDY, "step", "eager"),
}
PAGE_SPEED_COLUMNS: dict[str, SpeedSource] = {
    "training speed, not compiled": (FIRST_STUDY, "step", "eager"),
    "decoding speed, not compiled": (FIRST_STUDY, "decode", "eager"),
}
INITIAL_STD = 0.02  # of Llama's weights


def summary_table(studies: Mapping[str, Study], arms: Sequence[str]) -> str:
    """The arms that have a result in the first study, in short, and how they were run."""
    study = studies[FIRST_STUDY]
    rows = []
    for name in arms:
        if not study.runs(name):
            continue
        cells = _summary_cells(studies, name, LOSS_COLUMNS, SPEED_COLUMNS)
        rows.append({"connection": f"`{name}`"} | cells)
    return f"{markdown_table(tuple(rows[0]), rows)}\n\n{_describe_models(studies)}"


def connection_tables(studies: Mapping[str, Study], connections: Sequence[str]) -> dict[str, str]:
    """The arms of each connection in the main studies, by its name; "" where there are none."""
    known = [studies[source] for source, _ in PAGE_COLUMNS.values() if source in studies]
    tables = {}
    for connection in connections:
        rows = []
        for arm in read_recipe().arms:
            is_run = any(study.runs(arm.name) for study in known)
            if is_run and connection_name(arm.connection) == connection:
                cells = _summary_cells(studies, arm.name, PAGE_COLUMNS, PAGE_SPEED_COLUMNS)
                rows.append({"arm": arm.name} | cells)
        tables[connection] = markdown_table(tuple(rows[0]), rows) if rows else ""
    return tables


def _summary_cells(
    studies: Mapping[str, Study],
    name: str,
    columns: Mapping[str, tuple[str, Measure]],
    speed_columns: Mapping[str, SpeedSource],
) -> Cells:
    """The losses and speeds of an arm, by the names of the columns."""
    cells = {
        column: _summary_loss(studies.get(source), name, at)
        for column, (source, at) in columns.items()
    }
    for column, (source, call, variant) in speed_columns.items():
        speed = format_speed(studies.get(source), name, call, variant)
        cells[column], _, _ = speed.partition(" ± ")
    return cells


def _summary_loss(study: Study | None, name: str, at: Measure) -> str:
    """Of pre-norm the loss, like "4.473", and of another arm the difference to it."""
    if name != BASELINE:
        return format_difference(difference_to_baseline(study, name, at))
    if study is None:
        return NOT_KNOWN
    losses = study.losses(name, at)
    return f"{statistics.fmean(losses.values()):.3f}" if losses else NOT_KNOWN


def _describe_models(studies: Mapping[str, Study]) -> str:
    model, _, _, _ = studies[FIRST_STUDY].comparison.recipe.settings()
    factor = model.model_config.get("embedding_multiplier", 1)
    models = {  # those of one number of tokens a parameter are the same
        column.partition(",")[0]: _describe_model(studies[source])
        for column, (source, _) in LOSS_COLUMNS.items()
        if source in studies
    }
    columns = " ".join(f"{tokens.capitalize()}: {text}" for tokens, text in models.items())
    return (
        "Validation losses of Llamas in nats a token: pre-norm's, and the differences of the "
        "others to it with 95 % intervals. Negative is better; bold means that the interval, "
        "before rounding, excludes zero; –: not run. A column is named by the training tokens "
        f"a parameter and the factor of the token embeddings. × 1: Llama's own, which start at a "
        f"standard deviation of {INITIAL_STD:g}. × {factor:g}: they start at "
        f"{factor * INITIAL_STD:g} and change {factor:g} times as fast. {columns} Each connection "
        "has its own best learning rate, found with seed 0 among rates a factor of 2 apart; means "
        "of three or five seeds. Equal time: the losses when the fastest connection has finished, "
        "all compiled. "
        "The learning rates of the others are still falling then, so they look worse. Speeds are "
        "multiples of pre-norm's in the model that sees 20 tokens a parameter, on one CPU core in "
        "float32, without crosslayer's kernels, which need a GPU. All are compiled with "
        "`torch.compile`, pre-norm too, unless the column says that they are not. In the study of "
        "0.2 tokens, not compiled, models of one architecture differed by up to 0.14."
    )


def _describe_model(study: Study) -> str:
    """Like "8 layers of width 128, 0.5M tokens of wikitext-2, warm-up 0.1."."""
    model, data, optimization, _ = study.comparison.recipe.settings()
    return (
        f"{model.layers} layers of width {model.dim}, {study.tokens / 1e6:.1f}M tokens of "
        f"{' and '.join(data.valid)}, warm-up {optimization.warmup:g}."
    )
