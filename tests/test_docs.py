"""The documentation is true: its Python blocks run, the tutorial's connection works, arms exist."""

import importlib
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import crosslayer
from crosslayer import connections
from crosslayer.train.recipe import load_recipe
from tests.hf.plain_models import GPT, nanogpt_module
from tests.support.hub import snapshot_folder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "add-a-connection.md"


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf8"), re.DOTALL)


PAGES = [page for page in sorted(DOCS.glob("*.md")) if page != TUTORIAL]
BLOCKS = [
    pytest.param(
        block,
        id=f"{page.stem}-{i}",
        marks=[pytest.mark.slow] if "torch.export" in block else [],
    )
    for page in PAGES
    for i, block in enumerate(python_blocks(page))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from tests.hf.backbones import build

    if "import onnxruntime" in block:
        pytest.importorskip("onnxruntime")
    build("neox-parallel").save_pretrained(snapshot_folder(tmp_path, "EleutherAI/pythia-160m"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "model", nanogpt_module())
    for name in ("olmo_core", "olmo_core.nn", "olmo_core.nn.transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    config = SimpleNamespace(build=lambda init_device: GPT())
    olmo = SimpleNamespace(olmo2_190M=lambda vocab_size: config)
    vars(sys.modules["olmo_core.nn.transformer"])["TransformerConfig"] = olmo
    exec(block, {})


def commands_with_a_recipe_and_an_arm() -> list[tuple[Path, str, str]]:
    """(page, recipe, arm) of every `RECIPE … --arm NAME` in README and docs."""
    commands = []
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        text = page.read_text("utf8").replace("\\\n", " ")
        for recipe, arm in re.findall(
            r"(recipes/[\w.]+\.yaml)[^\n]*? --arm[ =](\"[^\"]+\"|'[^']+'|[^\s`]+)", text
        ):
            commands.append((page, recipe, shlex.split(arm)[0]))
    return commands


def test_arms_of_commands_exist():
    commands = commands_with_a_recipe_and_an_arm()
    assert len(commands) >= 4
    for page, recipe, arm in commands:
        assert arm in [row.name for row in load_recipe(ROOT / recipe).arms], f"{page.name}: {arm}"


def test_tables_are_whole():
    """A blank line within a table makes text of the rows after it."""
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        for paragraph in re.split(r"\n\s*\n", page.read_text("utf8")):
            rows = [line for line in paragraph.splitlines() if line.startswith("|")]
            if rows:
                assert re.fullmatch(r"[|: -]+", rows[1] if rows[1:] else ""), rows[0]


def github_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings on GitHub, which keeps a hyphen for each space.

    mkdocs, which has a hyphen for spaces that follow each other, checks the links of the site.
    """
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf8"), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).lower() for heading in headings]
    return {text.replace(" ", "-") for text in words}


def test_links_to_headings_work_on_github():
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        for file, anchor in re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", page.read_text("utf8")):
            target = (page.parent / file).resolve() if file else page
            if target.suffix == ".md":
                assert anchor in github_anchors(target), f"{page.name}: {file}#{anchor}"


def test_no_item_is_within_another():
    """As where the lines of a list were joined."""
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        assert not re.findall(r".*[.;:] - \*\*.*", page.read_text("utf8")), page


@pytest.fixture
def laurel(tmp_path, monkeypatch):
    """The tutorial's file, as if it lay in src/crosslayer/connections."""
    (tmp_path / "laurel.py").write_text(python_blocks(TUTORIAL)[0], "utf8")
    monkeypatch.setattr(connections, "__path__", [*connections.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    yield
    sys.modules.pop("crosslayer.connections.laurel", None)
    vars(connections).pop("laurel", None)


def test_the_connection_of_the_tutorial_needs_its_file_only(laurel):
    assert "laurel" in crosslayer.available()
    sublayers = [torch.nn.Linear(8, 8) for _ in range(4)]
    hidden = torch.randn(2, 3, 8)
    prenorm = crosslayer.Stack("prenorm", sublayers, 8)
    connected = crosslayer.Stack("laurel", sublayers, 8)
    assert torch.equal(prenorm(hidden), connected(hidden))


def test_the_tutorial_adds_half_precision_writes_in_the_streams_dtype(laurel):
    from tests import test_laws

    test_laws.test_half_precision_outputs_are_summed_in_the_embeddings_dtype("laurel", False)


def test_the_mixing_weights_of_the_tutorial_agree(laurel):
    from crosslayer.inspect import unfold_connections

    sublayers = [torch.nn.Linear(8, 8) for _ in range(4)]
    stack = crosslayer.Stack("laurel", sublayers, 8)
    for connection in stack.connections[:-1]:
        torch.nn.init.normal_(connection.w)
    unfolded = unfold_connections(stack, [{"embedding": torch.randn(2, 3, 8)}])
    assert unfolded.error < 1e-6
    assert unfolded.mean[1, 0] != 1


def test_the_memory_traffic_of_the_tutorial_is_that_of_streams():
    names = {}
    exec(python_blocks(TUTORIAL)[1], names)
    make = crosslayer.make("hyper")
    sites = crosslayer.plan(3)
    for connection in [make(site, 8, lambda port: torch.nn.RMSNorm(8)) for site in sites]:
        assert names["memory_traffic"](connection) == connection.memory_traffic()


def test_the_loop_of_the_tutorial_agrees(laurel, monkeypatch):
    from tests.connections import test_loops

    monkeypatch.setattr(test_loops, "LOOPS", dict(test_loops.LOOPS))
    exec(python_blocks(TUTORIAL)[2], dict(vars(test_loops)))
    test_loops.check("laurel", test_loops.LOOPS["laurel"], test_loops.Case())
