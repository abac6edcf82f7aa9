"""README's blocks run as a stranger would run them: no environment variable, no file of our own.

Every Python block is executed. Every line of a shell block is run through the command line's entry
point, in order, in a folder with the recipes and LICENSE alone. Two things differ from a stranger's
machine. `TINY_OPTIONS` are appended to a command, so that it takes seconds. Names of the Hub are
resolved from a cache (tests/support/hub.py), because tests have no network. `.ci/run` runs the
lines of `pip`; here their extras and the versions of torch are checked.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch

import crosslayer
from crosslayer.connection import PRENORM_FUNCTIONS
from tests.hf.plain_models import nanogpt_module
from tests.support.hub import save_dataset, snapshot_folder

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]

RUN_OPTIONS = (
    "--layers 1 --dim 32 --heads 2 --steps 2 --warmup 0.1 --batch 2 --context 32 --evals 1"
    " --eval-batches 2 --precision 32-true --accumulate 1 --compile none"
)
# What is appended to a command of README: the first entry that it begins with.
TINY_OPTIONS = {
    "crosslayer compare benchmarks": f"{RUN_OPTIONS} --seeds 1 --search-rates false",
    "crosslayer compare": f"{RUN_OPTIONS} --seeds 1",
    "crosslayer train": RUN_OPTIONS,
    "crosslayer generate": "--max-new-tokens 4",
    "crosslayer eval first-model/model --text": "",
    "crosslayer eval": "--limit 2",
    "crosslayer cost": "--layers 2 --dim 64 --heads 4 --batch 1 --context 128",
    "crosslayer": "",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def shell_lines() -> list[str]:
    """The commands of README's shell blocks, without comments; a backslash joins two lines."""
    text = "".join(blocks("sh")).replace("\\\n", " ")
    lines = [re.sub(r"(^|\s+)#.*", "", line) for line in text.splitlines()]
    return [line for line in lines if line.strip()]


COMMANDS = [line for line in shell_lines() if not line.startswith("pip")]
INSTALLS = [line for line in shell_lines() if line.startswith("pip")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with recipes, LICENSE and a published checkpoint, and caches instead of the Hub."""
    import datasets.config
    import lm_eval.tasks
    from huggingface_hub import constants

    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "evidence_short.yaml", folder / "benchmarks")
    write_published_checkpoint(folder / "MUDDFormer-2.8B")
    fill_hub(folder / "hub", folder / "datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        patch.setattr(lm_eval.tasks, "TaskManager", index_few_tasks)
        patch.chdir(folder)
        yield folder


def index_few_tasks(include_path: None):
    """lm_eval's own definitions of the tasks in README. It takes 15 s to index all of them."""
    from lm_eval.tasks.manager import TaskManager

    own = Path(sys.modules[TaskManager.__module__].__file__).parent
    return TaskManager(include_path=[own / "lambada", own / "piqa"], include_defaults=False)


def fill_hub(hub_cache: Path, datasets_cache: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from tests.hf.backbones import build

    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [(library / f"{name}.py").read_text("utf8") for name in ("ast", "argparse", "typing")]
    rows = [{"text": part} for text in texts for part in text.split("\n\n")]
    tokenizer = train_tokenizer(texts)
    tokenizer.save(str(snapshot_folder(hub_cache, "openai-community/gpt2") / "tokenizer.json"))
    pythia = snapshot_folder(hub_cache, "EleutherAI/pythia-160m")
    build("neox-parallel").save_pretrained(pythia)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(pythia)
    save_dataset(datasets_cache, "HuggingFaceFW/fineweb", "sample-10BT", {"train": rows})
    splits = {"train": rows, "validation": rows[:50]}
    save_dataset(datasets_cache, "Salesforce/wikitext", "wikitext-2-raw-v1", splits)
    sentences = [{"text": "A connection reads the state and writes it"}] * 3
    save_dataset(datasets_cache, "EleutherAI/lambada_openai", "default", {"test": sentences})
    question = {"goal": "Open a jar", "sol1": "Turn its lid", "sol2": "Sing to it", "label": 0}
    splits = {"train": [question] * 3, "validation": [question] * 3}
    save_dataset(datasets_cache, "baber/piqa", "default", splits)


def train_tokenizer(texts: list[str]):
    """A small byte-level BPE with GPT-2's end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_published_checkpoint(folder: Path) -> None:
    """A checkpoint in the published layout of MUDDFormer-2.8B, four layers of width 64."""
    golden = ROOT / "tests" / "golden" / "muddformer_llama_L4_D64_qknorm_round64_expandlast"
    folder.mkdir()
    shutil.copyfile(f"{golden}.params.safetensors", folder / "model.safetensors")
    config = json.loads(Path(f"{golden}.json").read_text())["config"]
    (folder / "config.json").write_text(json.dumps(config))


def tiny(command: str) -> list[str]:
    """The command's arguments after `crosslayer`, with its tiny options."""
    command = re.sub(r"^torchrun .*? -m crosslayer", "crosslayer", command)
    options = next(found for start, found in TINY_OPTIONS.items() if command.startswith(start))
    return shlex.split(f"{command} {options}")[1:]


@pytest.mark.slow
@pytest.mark.xdist_group("readme")  # a command reads what those before it wrote
@pytest.mark.parametrize("command", COMMANDS, ids=[f"line{i}" for i in range(len(COMMANDS))])
def test_commands_run(command, checkout, capsys):
    from crosslayer.cli.main import main

    code = main(tiny(command))
    output = capsys.readouterr()
    assert code == 0, output.err
    assert output.out


@pytest.mark.slow
def test_the_entry_point_runs_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "crosslayer", *tiny("crosslayer compare")]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)


@pytest.mark.xdist_group("readme")
@pytest.mark.parametrize("block", blocks("python"), ids=["hugging face", "nanogpt"])
def test_python_blocks_run(block, checkout, monkeypatch):
    monkeypatch.setitem(sys.modules, "model", nanogpt_module())
    names: dict = {}
    exec(block, names)
    assert any(isinstance(value, torch.Tensor | torch.nn.Module) for value in names.values())


def test_install_lines_name_what_pyproject_has():
    (torch_versions,) = (line for line in PYPROJECT["dependencies"] if line.startswith("torch"))
    extras = set(PYPROJECT["optional-dependencies"])
    assert len(INSTALLS) >= 2
    for line in INSTALLS:
        if "torch" in line:
            assert f"'{torch_versions}'" in line
        else:
            assert set(re.search(r"\.\[(.*)\]", line)[1].split(",")) <= extras


def test_table_of_connections_is_true():
    kinds = {**dict.fromkeys(PRENORM_FUNCTIONS, "up to an epsilon"), "bitwise prenorm": "bitwise"}
    rows = re.findall(r"^\| `(\w+)` \|.*abs/([\d.]+)\) \| ([\w ]+) \|$", README, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `\w+` \|.*abs/", README, re.MULTILINE)) > 0
    for name, arxiv, starts_as_prenorm in rows:
        method = crosslayer.make(name).method
        assert arxiv in sys.modules[method.__module__].__doc__
        assert starts_as_prenorm == kinds.get(method.initial_function, "no")


def test_table_and_figure_of_results_are_those_of_results_json():
    from tools import update_results

    page = update_results.PAGE.read_text("utf8")
    comparison = update_results.read_comparison(update_results.RESULTS)
    table = update_results.results_table(comparison)
    assert update_results.replace_table(page, table) == page
    mark = update_results.data_mark(update_results.RESULTS.read_text("utf8"))
    assert update_results.FIGURE.read_text("utf8").endswith(mark)


def test_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 150
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("https://arxiv.org/") or (ROOT / target).exists(), target


def test_the_example_trains():
    from examples import gpt

    assert gpt.main("mudd(dilation=2)", steps=10) < 4.5
