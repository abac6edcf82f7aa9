"""Whatever a command is given, it works or says in one line what is wrong."""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import crosslayer
from crosslayer.cli import main as cli_main
from crosslayer.cli.main import main
from tests.support.bad_inputs import Case, cases, options_of, run_case, specs
from tests.support.scenes import SCENES, write_inputs

SECONDS = 60  # that a case may take: most take less than one


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def generated(number: int):
    """So many generated examples, the same in every run."""
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


# A comparison that is not refused trains several models.
CASES = dict.fromkeys(SCENES, 40) | {"compare": 20}


def check_cases(name: str, number: int, inputs, root) -> None:
    """Run generated cases of a scene."""
    count = 0
    unchanged = run_case(Case(list(SCENES[name].words)), inputs, root / "unchanged", SECONDS)
    assert unchanged.kind == "succeeded", unchanged.text

    @generated(number)
    @given(cases(name, options_of(name)))
    def check(case):
        nonlocal count
        count += 1
        outcome = run_case(case, inputs, root / str(count), SECONDS)
        assert outcome.kind in ("refused", "succeeded"), f"{case}: {outcome.kind} {outcome.text}"

    check()


@generated(300)
@given(specs() | st.text(max_size=20))
def test_a_connection_is_made_or_refused(spec):
    try:
        made = crosslayer.make(spec)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert crosslayer.make(str(made)) == made


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_every_command(name, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_cases(name, CASES[name], inputs, tmp_path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory: a smaller model, context or batch needs less"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: a smaller"),
        (RuntimeError("CUDA error: out of memory"), "out of memory: a smaller"),
        (RecursionError("maximum recursion depth"), "a value of the input is nested too deep"),
        (OSError(28, "No space left on device", "a.json"), "the disk is full ([Errno 28] No space"),
        (RuntimeError("I/O error: No space left on device"), "the disk is full (I/O error"),
        (FileExistsError(17, "File exists", "my.yaml"), "crosslayer: my.yaml: File exists"),
        (ValueError("x" * 5000), "xxx … xxx"),
    ],
)
def test_the_machines_limits_are_one_line(error, message, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(cli_main, "_run_command", fail)
    assert main(["train"]) == 1
    line = capsys.readouterr().err
    assert message in line and line.startswith("crosslayer: ") and len(line) < 1100


@pytest.mark.parametrize("error", [TypeError, KeyError, AssertionError, AttributeError])
def test_an_error_of_ours_keeps_its_traceback(error, monkeypatch):
    def fail(_):
        raise error("ours")

    monkeypatch.setattr(cli_main, "_run_command", fail)
    with pytest.raises(error):
        main(["train"])


LINES = [
    ("train --arm prenorm", {"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR"),
    ("train --arm prenorm", {"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number of processes"),
    ("train pipe", {}, "pipe: cannot be read as a recipe"),
    ("eval model --spans pipe", {}, "pipe: cannot be read (not a file)"),
    ("compare --arms ,", {}, "--arms names no connection; known: altup"),
    ("cost --arms ,", {}, "--arms names no connection; known: altup"),
    ("cost --layers 1000000000", {}, "num_hidden_layers must be from 1 to 10,000, got 1000000000"),
    ("cost --batch 2000000000", {}, "batch × context must be at most"),
    ("cost --family vit", {}, "'vit' is no family of language models"),
    (
        "cost --family DiTTransformer2DModel",
        {},
        "unknown family 'DiTTransformer2DModel'",
    ),
    (
        'cost --model-config {"hidden_act":"x"}',
        {},
        "no llama can be built of this config: KeyError",
    ),
    ('cost --model-config {"hidden_size":null}', {}, "llama refuses these values: StrictData"),
    ('cost --model-config {"num_key_value_heads":3}', {}, "must be a multiple of num_key_value"),
    ('train --model-config {"a":2001-01-01}', {}, "granite has no config key 'a'"),
    ("train --lr -1", {}, "lr must be a number of at least 0, got -1.0"),
]


@pytest.mark.parametrize(("line", "variables", "message"), LINES)
def test_one_line(line, variables, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "text.txt").write_text("words " * 2000)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arguments = line.split(" ")
    if arguments[0] in ("train", "compare"):
        arguments += ["--data", "text.txt"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("crosslayer: ") and error.count("\n") == 1


@pytest.mark.slow
def test_a_full_disk(inputs, tmp_path):
    """The model does not fit on the disk: one line, by a limit on the size of files."""
    command = f"ulimit -f 8; exec {sys.executable} -m crosslayer convert published {tmp_path}/new"
    done = subprocess.run(
        ["bash", "-c", command], cwd=inputs, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and done.stderr.startswith("crosslayer: "), done.stderr
