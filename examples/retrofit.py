"""When to connect: from the start, late in training, or never.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, Table 5. A 4x5-DenseFormer starts
after N of 40k iterations of a model on OpenWebText2; the learning-rate schedule does not change:

    N            never   0      1k     2k     4k     6k     10k    20k    30k
    perplexity   18.61   17.87  17.99  18.07  18.13  18.17  18.23  18.33  18.40

Here: any connection, on a model small enough for minutes. A run trains with PreNorm up to the
switch, connects the trained model, and continues with the same schedule, batches and optimizer
states. The results contain the change of the validation loss at the switch itself. Expected, as in
the paper: the later the switch, the smaller the gain. docs/retrofit.md has results, with hardware
and settings. The same command resumes.

    python examples/retrofit.py run --out retrofit --connections '[prenorm, mudd]' \
      --settings '{"family": "llama", "lr": 0.003, "steps": 320}'
    python examples/retrofit.py report --results '[retrofit]' --page retrofit.md
"""

import sys
from argparse import ArgumentError
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from crosslayer.data.tokenizing import BYTE_TOKENIZER
from crosslayer.errors import error_in_one_line
from crosslayer.files import read_json, write_json, write_text_atomic
from crosslayer.intervals import mean_and_std, mean_interval
from crosslayer.number_texts import NOT_KNOWN, format_interval, format_mean_std, markdown_table
from crosslayer.plotting import BLACK, HUES, line_look, render_figure
from crosslayer.run_folders import DATA_DIGEST
from crosslayer.train.callbacks import ConnectAtStep
from crosslayer.train.comparison_results import describe_environment
from crosslayer.train.identity import first_difference
from crosslayer.train.parallel import launch_fabric
from crosslayer.train.recipe import Arm
from crosslayer.train.settings import CHANGEABLE_OPTIONS, Settings
from crosslayer.train.task import LANGUAGE_TASK, Examples, build_model
from crosslayer.train.trainer import RunDiverged, Trainer

SWITCHES = (0.0, 0.05, 0.25, 0.5, 0.75)  # shares of the steps; 0 connects from the start
INTRODUCTION = """\
Results of `examples/retrofit.py`, whose docstring describes a run.
`python examples/retrofit.py run --help` lists its options. At the switch, DenseFormer and MUDD
change nothing. Hyper-connections and attention residuals change the loss by the epsilon of a norm.
MGR, which cannot start as pre-norm, changes it much."""
COLUMNS = (
    "connection",
    "connected at step",
    "at the switch",
    "validation loss",
    "against prenorm",
    "runs",
)


@dataclass
class RetrofitRun:
    """The result of one run.

    Args:
        connection: from the switch on.
        switch: number of steps with PreNorm.
        seed: of the initial weights and of the batches.
        loss_change: change of the validation loss at the switch; None without one.
        valid_loss: after the last step.
        curve: (step, validation loss).
        seconds: of training.
        settings: all options.
        environment: device and versions.
    """

    connection: str
    switch: int
    seed: int
    loss_change: float | None
    valid_loss: float
    curve: list[list[float]]
    seconds: float
    settings: dict[str, Any]
    environment: dict[str, str]


def run(
    out: str,
    connections: list[str],
    switches: tuple[float, ...] = SWITCHES,
    seed: int = 0,
    settings: dict[str, Any] = {"steps": 320},  # noqa: B006
) -> None:
    """Train every connection with every switch whose result is not in `out` yet.

    Args:
        out: folder with one result a run.
        connections: like mudd "attnres(block_size=4)"; prenorm is never switched.
        switches: when to connect, as shares of the steps.
        seed: of the initial weights and of the batches.
        settings: options of `crosslayer train`, which all runs share.
    """
    steps = Settings.from_options(**settings).optimization.steps
    options = Settings.from_options(**{"evals": min(20, steps), **settings})
    examples = LANGUAGE_TASK.load_examples(options.data, options.model.model_config)
    for share in switches if {*connections} - {"prenorm"} else ():
        if not 0 <= share <= 1 or (share and not round(share * steps)):
            raise ValueError(
                f"a switch must be 0, or from {1 / steps:.2g} (a step) to 1, got {share}"
            )
    Path(out).mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(out).glob("*.json")):
        _check_settings(file, options, examples)
    for connection in connections:
        for share in (0.0,) if connection == "prenorm" else switches:
            file = Path(out) / f"{connection} {share} {seed}.json".replace("/", "-")
            if file.exists():
                continue
            result = train_retrofit(options, examples, connection, round(share * steps), seed)
            write_json(file, asdict(result))
            print(
                f"{connection}, from step {result.switch}: {result.valid_loss:.4f} "
                f"in {result.seconds:.0f} s",
                flush=True,
            )


def _check_settings(file: Path, settings: Settings, examples: Examples) -> None:
    """Raise a ValueError where a result is of a run with other settings or data."""
    wanted = settings.fixed_options() | _describe_data(settings, examples)
    saved = read_json(file).get("settings", {})
    difference = first_difference(saved, wanted, CHANGEABLE_OPTIONS)
    if difference:
        raise ValueError(f"{file}: belongs to another run, {difference}; choose another folder")


def _describe_data(settings: Settings, examples: Examples) -> dict[str, str]:
    """The name and the digest of the data, which may lie anywhere."""
    return {"data": Path(settings.data.data).name, DATA_DIGEST: examples.digest}


def train_retrofit(
    settings: Settings, examples: Examples, connection: str, switch: int, seed: int
) -> RetrofitRun:
    """One run: PreNorm for `switch` steps, then the connection."""
    start = "prenorm" if switch else connection
    fabric = launch_fabric(settings.engine)
    model = build_model(settings, start, examples.num_classes, seed)
    trainer = Trainer(fabric, model, examples, settings, Arm.from_row(connection), seed)
    callbacks = [ConnectAtStep(switch, connection)] if switch else []
    trainer.fit(callbacks)
    result = trainer.result()
    return RetrofitRun(
        connection=connection,
        switch=switch,
        seed=seed,
        loss_change=callbacks[0].loss_change if callbacks else None,
        valid_loss=result.valid_loss,
        curve=result.curve,
        seconds=result.seconds,
        settings=settings.to_options() | _describe_data(settings, examples),
        environment=describe_environment(),
    )


def report(results: list[str], page: str) -> None:
    """Write a page with a table and a figure for each folder of results.

    Args:
        results: folders of `run`.
        page: a .md file to write; its figures are .svg files in the same folder.
    """
    title = (__doc__ or "").splitlines()[0].removesuffix(".")
    sections = [f"# {title}", "", INTRODUCTION]
    for number, folder in enumerate(results, start=1):
        runs = load_runs(Path(folder))
        figure = Path(page).with_name(f"{Path(page).stem}{number}.svg")
        draw_figure(runs, figure)
        sections += ["", *report_section(runs, figure.name)]
    write_text_atomic(Path(page), "\n".join(sections) + "\n")


def load_runs(folder: Path) -> list[RetrofitRun]:
    """The results in a folder of `run`.

    Raises:
        ValueError: a file is something else, or there is no run of the baseline.
    """
    runs = []
    for file in sorted(folder.glob("*.json")):
        try:
            runs.append(RetrofitRun(**read_json(file)))
        except TypeError:
            raise ValueError(f"{file}: not a result of `run`") from None
    if not any(run.connection == "prenorm" for run in runs):
        raise ValueError(f"{folder}: has no result of prenorm, the baseline")
    if all(run.connection == "prenorm" for run in runs):
        raise ValueError(f"{folder}: has results of prenorm alone, and no connection to compare")
    return runs


def unit_of_loss(settings: dict[str, Any]) -> str:
    """What a loss is of."""
    return "byte" if settings["tokenizer"] == BYTE_TOKENIZER else "token"


def report_section(runs: list[RetrofitRun], figure: str) -> list[str]:
    """Lines of markdown: setup, figure and table."""
    options, environment = runs[0].settings, runs[0].environment
    unit = unit_of_loss(options)
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[options["optimizer"]]
    lines = [
        (
            f"## {options['steps']} steps of {options['batch']} × {options['context']} {unit}s of "
            f"{options['data']}"
        ),
        "",
        (
            f"A {options['family']} backbone of {options['layers']} layers, width "
            f"{options['dim']}, {options['heads']} heads; {optimizer} at {options['lr']:g}, "
            f"{options['precision']}; on "
            f"{environment['device']}, torch {environment['torch']}, crosslayer "
            f"{environment['crosslayer']}. Losses in nats per {unit} on held-out text, ± their "
            "standard deviation over seeds; differences seed by seed, with 95 % intervals."
        ),
        "",
        f"![Validation loss of late switches]({figure})",
        "",
    ]
    groups = group_runs(runs)
    baseline = groups["prenorm", 0]
    rows = []
    # PreNorm first
    for connection, switch in sorted(groups, key=lambda key: (key[0] != "prenorm", key)):
        group = groups[connection, switch]
        is_baseline = connection == "prenorm"
        changes = [run.loss_change for run in group.values() if run.loss_change is not None]
        differences = loss_differences(group, baseline)
        cells = [
            f"`{connection}`",
            "never" if is_baseline else str(switch),
            f"{max(changes, key=abs):+.1e}" if changes else NOT_KNOWN,
            format_mean_std(mean_and_std([run.valid_loss for run in group.values()]), ".4f"),
            NOT_KNOWN,
            str(len(group)),
        ]
        if differences and not is_baseline:
            cells[4] = format_interval(mean_interval(differences))
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return [*lines, markdown_table(COLUMNS, rows)]


def group_runs(runs: list[RetrofitRun]) -> dict[tuple[str, int], dict[int, RetrofitRun]]:
    """Runs by (connection, switch) and then by seed."""
    groups: dict[tuple[str, int], dict[int, RetrofitRun]] = defaultdict(dict)
    for run in runs:
        groups[run.connection, run.switch][run.seed] = run
    return groups


def loss_differences(
    group: dict[int, RetrofitRun], baseline: dict[int, RetrofitRun]
) -> list[float]:
    """Final losses minus the baseline's, of the seeds that both have."""
    seeds = group.keys() & baseline.keys()
    return [group[seed].valid_loss - baseline[seed].valid_loss for seed in sorted(seeds)]


def draw_figure(runs: list[RetrofitRun], file: Path) -> None:
    """Left: final loss against the switch, a line a connection. Right: curves of one connection."""
    panels = [("", partial(draw_differences, runs=runs)), ("", partial(draw_curves, runs=runs))]
    file.write_bytes(render_figure(panels, width=4.8, height=3.6)["svg"])


def draw_differences(axes: Any, runs: list[RetrofitRun]) -> None:
    """The final loss of each connection minus pre-norm's, by the share of steps before it."""
    groups = group_runs(runs)
    connections = sorted({run.connection for run in runs} - {"prenorm"})
    axes.axhline(0, color=BLACK, label="prenorm (never)", linewidth=1.2)
    for number, connection in enumerate(connections):
        shares, means = [], []
        for key in sorted(groups):
            differences = loss_differences(groups[key], groups["prenorm", 0])
            if key[0] == connection and differences:
                shares.append(key[1] / runs[0].settings["steps"])
                means.append(mean_and_std(differences).mean)
        axes.plot(shares, means, label=connection, markersize=4, **line_look(number))
    axes.set_xlabel("connected after this share of the steps")
    axes.set_ylabel("final loss minus prenorm's, nats per " + unit_of_loss(runs[0].settings))
    axes.legend(fontsize=8)


def draw_curves(axes: Any, runs: list[RetrofitRun]) -> None:
    """The validation losses of one seed of pre-norm, and of a connection after each switch."""
    groups = group_runs(runs)
    baseline = groups["prenorm", 0]
    connections = sorted({run.connection for run in runs} - {"prenorm"})
    shown = "mudd" if "mudd" in connections else connections[0]
    seed = min(baseline)
    curves = {"prenorm": baseline[seed].curve}
    for connection, switch in sorted(groups):
        if connection == shown and seed in groups[connection, switch]:
            curves[f"{shown} from step {switch}"] = groups[connection, switch][seed].curve
    for colour, (label, curve) in zip(cycle((BLACK, *HUES)), curves.items(), strict=False):
        axes.plot(*zip(*curve, strict=True), color=colour, label=label, linewidth=1.4)
    # the first quarter's steep fall would hide the rest
    axes.set_ylim(top=baseline[seed].curve[len(baseline[seed].curve) // 4][1] * 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    try:
        auto_cli([run, report], as_positional=False, exit_on_error=False)
    except (ValueError, OSError, ArgumentError, RunDiverged) as error:
        sys.exit(f"retrofit: {error_in_one_line(error)}")
