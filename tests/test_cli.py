"""The messages of `crosslayer` that belong to no single command."""

import io
import logging
import sys
from dataclasses import fields

import pytest

from crosslayer.cli import main as cli_main
from crosslayer.cli.console import (
    InspectionBar,
    ProgressBars,
    can_redraw,
    make_console,
    make_progress,
    silence_libraries,
)
from crosslayer.cli.main import COMMANDS, main
from crosslayer.train.run_state import StepResult


def error_of(capsys, *arguments: str) -> str:
    assert main(arguments) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["train"], "lightning", "train"),
        (["eval", "x"], "lm_eval", "eval"),
        (["train", "--kernels"], "triton", "kernels"),
    ],
)
def test_a_missing_package(arguments, package, extra, monkeypatch, capsys):
    def run_without(_):
        raise ModuleNotFoundError("no module", name=package + ".part")

    monkeypatch.setattr(cli_main, "_run_command", run_without)
    assert error_of(capsys, *arguments) == (
        f"crosslayer: {package} is not installed; "
        f"in the clone of crosslayer: pip install -e '.[{extra}]'\n"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --save-every x", "--save-every must be a whole number, got 'x'"),
        ("data", "crosslayer data needs one of: prepare, show"),
        ("train --lr fast", "--lr must be a finite number, got 'fast'"),
        (
            "train --strategy fdsp",
            "--strategy must be one of 'ddp', 'fsdp', got 'fdsp' (did you mean 'fsdp'?)",
        ),
        (
            "train --loggers x",
            (
                "--loggers must be a list, each item one of 'tensorboard', 'wandb', got 'x'; "
                "write --loggers+=VALUE for each"
            ),
        ),
        ("train --lr 1" + "0" * 400, "a number among the options is larger than any float"),
        ("eval model --out=", "the output folder has no name; give it one, like ./results"),
        ("train --vocab many", "--vocab must be a whole number or None, got 'many'"),
        ("train --layers 1000000000", "layers must be at most 10,000, got 1000000000"),
        (
            "trian",
            f"unknown command 'trian' (did you mean 'train'?); the commands: {', '.join(COMMANDS)}",
        ),
        ("eval", "missing: model; see crosslayer eval --help"),
    ],
)
def test_a_wrong_option_or_command(line, message, capsys):
    assert error_of(capsys, *line.split()) == f"crosslayer: {message}\n"


@pytest.mark.parametrize("line", ["eval m", "data show m", "inspect m", "convert m o", "cost"])
def test_several_processes_of_a_command_for_one(line, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    name = line.partition(" ")[0]
    expected = f"{name} runs in one process; start it without torchrun (WORLD_SIZE is 2)"
    assert error_of(capsys, *line.split()) == f"crosslayer, rank 1: {expected}\n"


def test_windows(capsys, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    expected = "crosslayer: the command line runs on Linux and macOS; on Windows, use it in WSL\n"
    assert error_of(capsys, "cost") == expected


def test_an_error_of_another_rank(capsys, monkeypatch):
    def lose_a_rank(_):
        raise RuntimeError("[pair.cc:538] Connection closed by peer [127.0.0.1]:48642")

    monkeypatch.setattr(cli_main, "_run_command", lose_a_rank)
    message = "crosslayer: another rank has ended; see what it printed\n"
    assert error_of(capsys, "train") == message


def test_a_missing_recipe(tmp_path, capsys):
    (tmp_path / "wikitext.yaml").write_text("arms: [prenorm]")
    path = tmp_path / "wikitex.yaml"
    expected = f"crosslayer: {path}: no such file (did you mean 'wikitext.yaml'?)\n"
    assert error_of(capsys, "train", str(path)) == expected
    assert "mudd: no such file; connections are named by --arm" in error_of(capsys, "train", "mudd")


def test_the_hub_does_not_print_its_retries():
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    try:
        silence_libraries()
        assert not logger.isEnabledFor(logging.WARNING) and logger.isEnabledFor(logging.ERROR)
    finally:
        logger.setLevel(level)


def test_a_progress_bar_shows_brackets_of_a_name():
    written = io.StringIO()
    with make_progress(make_console(file=written, width=80)) as progress:
        progress.add_task("mudd [bold] 3")
    assert written.getvalue().strip() == "mudd [bold] 3"


def test_a_long_path_is_not_broken():
    written = io.StringIO()
    make_console(file=written, width=20).print("Report: " + "folder/" * 9)
    assert written.getvalue() == "Report: " + "folder/" * 9 + "\n"


def test_a_log_file_has_a_line_for_the_first_step_and_each_evaluation():
    written = io.StringIO()
    with ProgressBars(make_console(file=written), "tokens") as bars:
        for step in (1, 2, 3):
            evaluation = {"held-out": {"loss": 2.35}} if step == 2 else None
            bars.show_step("mudd", 3, step_result(step, evaluation))
            first = "mudd 1/3: loss 2.510, 2,900 tokens/s\n"
            second = "mudd 2/3: loss 2.510, held-out loss 2.350, 2,900 tokens/s\n"
            assert written.getvalue() == (first + second if step > 1 else first)
    assert bars.have_shown


def test_a_pipe_whose_reader_wants_colours_is_a_log_file(monkeypatch):
    """A notebook sets this variable for the commands of its cells."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console(file=io.StringIO())
    assert console.is_terminal and not can_redraw(console)


def test_a_notebook_has_bars_where_it_can_show_them(monkeypatch):
    console = make_console(file=io.StringIO(), force_jupyter=True)
    assert not console.soft_wrap
    for found in (None, object()):
        monkeypatch.setattr("crosslayer.cli.console.find_spec", lambda name, found=found: found)
        assert can_redraw(console) == (found is not None)


def test_a_log_file_has_a_line_for_each_analysis():
    written = io.StringIO()
    with InspectionBar(make_console(file=written)) as bar:
        for done in range(3):
            bar.show_step("mudd", "lens", done, 2)
        bar.show_step("mudd", "ablation", 0, 2)
        assert written.getvalue() == "mudd: lens\nmudd: ablation\n"
    assert written.getvalue() == "mudd: lens\nmudd: ablation\n"


def step_result(step, evaluation):
    numbers = {field.name: 0.0 for field in fields(StepResult)}
    given = {"step": step, "loss": 2.51, "tokens_per_second": 2900.0, "mfu": None}
    return StepResult(**{**numbers, **given, "evaluation": evaluation})
