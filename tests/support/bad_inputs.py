"""Bad inputs for every command: a line that works, and hypothesis's changes of it.

A scene is a folder of small valid inputs and a command line that reads them. A change replaces a
word, adds an option with an odd value, or spoils one file: another value at one node of its JSON,
a tail cut off, a pipe in its place.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

from crosslayer.cli.main import main
from crosslayer.spec import available, default_options, make
from tests.evaluate.tiny_models import byte_tokenizer, tiny_model, write_lines

GOLDEN = Path(__file__).parent.parent / "golden"
PUBLISHED = "muddformer_llama_L4_D64_qknorm_round64_expandlast"
MEMORY = 3 * 2**30  # bytes that a case may allocate
SHAPE = ["--layers", "1", "--dim", "16", "--heads", "2", "--context", "8", "--batch", "2"]
RUN = {
    "layers": 1, "dim": 16, "heads": 2, "context": 8, "batch": 2, "steps": 2, "evals": 1,
    "eval_batches": 1, "save_every": 1, "data": "text.txt", "valid": {"stories": "stories.jsonl"},
    "model_config": {"tie_word_embeddings": True}, "betas": [0.9, 0.95], "loggers": [],
}  # fmt: skip
ARMS = ["prenorm", {"name": "M", "connection": "mudd(dilation=1)", "paper": {"loss": 2.5}}]
TASK = """
task: local_word
dataset_path: json
dataset_kwargs: {data_files: {test: spans.jsonl}, cache_dir: cache}
test_split: test
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{target}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""


class Scene(NamedTuple):
    """A command line that works, and the files that it reads."""

    words: tuple[str, ...]
    files: tuple[str, ...] = ()  # files, or folders of them


MODEL = ("model",)
SCENES = {
    "train": Scene(("train", "recipe.yaml", "--arm", "M", "--out", "run"), ("recipe.yaml", "run")),
    "train without a recipe": Scene(
        ("train", "--arm", "mudd", "--data", "prepared", "--steps", "1", "--evals", "1", *SHAPE),
        ("prepared",),
    ),
    "compare": Scene(
        ("compare", "recipe.yaml", "--out", "comparison"), ("recipe.yaml", "comparison")
    ),
    "cost": Scene(
        ("cost", "--vocab", "64", "--connections", "mudd(dilation=1)", "hyper(streams=2)", *SHAPE)
    ),
    "data prepare": Scene(
        [
            "data",
            "prepare",
            "stories.jsonl",
            "--out",
            "new",
            "--tokenizer",
            "tokenizer",
            "--valid",
            "a=text.txt",
        ],
        ("stories.jsonl", "text.txt", "tokenizer"),
    ),
    "data show": Scene(("data", "show", "prepared"), ("prepared",)),
    "eval": Scene(
        [
            "eval",
            "model",
            "--text",
            "text.txt",
            "--spans",
            "spans.jsonl",
            "--context",
            "16",
            "--out",
            "new",
        ],
        ("model", "text.txt", "spans.jsonl"),
    ),
    "eval tasks": Scene(
        ["eval", "model", "--tasks", "local_word", "--include-path", "tasks", "--limit", "1"],
        ("tasks", "spans.jsonl"),
    ),
    "generate": Scene(["generate", "model", "ab", "--max-new-tokens", "2"], MODEL),
    "convert": Scene(["convert", "published", "new"], ("published",)),
}


def write_inputs(folder: Path) -> None:
    """The valid inputs of every scene."""
    lines = [{"text": f"{i}: a fox and {i * i} dogs.\n" * 3} for i in range(50)]
    write_lines(folder / "stories.jsonl", lines)
    (folder / "text.txt").write_text("".join(line["text"] for line in lines))
    write_lines(folder / "spans.jsonl", [{"context": "Is it? Answer:", "target": " yes"}] * 3)
    (folder / "tasks").mkdir()
    (folder / "tasks" / "word.yaml").write_text(TASK)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RUN, "arms": ARMS}))
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    tiny_model("mudd(dilation=2)").save_pretrained(folder / "model")
    for file in (folder / "tokenizer").iterdir():
        shutil.copyfile(file, folder / "model" / file.name)
    (folder / "published").mkdir()
    weights = folder / "published" / "model.safetensors"
    shutil.copyfile(GOLDEN / f"{PUBLISHED}.params.safetensors", weights)
    config = json.loads((GOLDEN / f"{PUBLISHED}.json").read_text())["config"]
    (folder / "published" / "config.json").write_text(json.dumps(config))
    with _working_in(folder), contextlib.redirect_stdout(io.StringIO()):
        assert main(["data", "prepare", "stories.jsonl", "--out", "prepared"]) == 0
        assert main([*SCENES["train"].words]) == 0
        shutil.rmtree("run/model")
        assert main([*SCENES["compare"].words]) == 0
        results = json.loads(Path("comparison/results.json").read_text())
        results["runs"].pop()
        Path("comparison/results.json").write_text(json.dumps(results))


# what people and their scripts put where something else belongs
NUMBERS = ["-1", "0", "1", "3", "nan", "inf", "-inf", "1e400", "1.5", "1e3", "1_000", "0x10"]
HUGE = ["1000000000", "9223372036854775808", "1" + "0" * 30]
WORDS = [
    "", " ", "x", "null", "true", "no", "~", "-", "--", "-x", "=", ".", "..", "/", "a=b", "ü", "\udcff",
    "a\nb", "[]", "{}", "[1, 2]", '{"a": 1}', "[[]]", "[" * 3000, "{a: " * 500, "'", "a" * 3000, ",",
    "!!python/name:os.system", "!!set {a}", "&a [*a]", "2001-01-01", "text.txt", "model", "pipe",
    "loop", "missing/x.json", "prenorm,", "mudd(", "$HOME", "bpe:300", "bpe:-1", "cuda:9", "meta",
    "datasets:", "datasets:missing", "stdlib/", "1=text.txt",
]  # fmt: skip
# huge values of these are requests for much work, which nobody refuses
LONG_OPTIONS = {"--steps", "--eval-batches", "--evals", "--seeds", "--max-new-tokens", "--workers"}
HARMLESS = {"--help", "--version", "-h", "--print_config", "--config"}
LITERALS = [
    "None", "True", "-1", "0", "1", "2", "3.5", "1e999", "1" + "0" * 25, "''", "'x'", "b'x'", "[]",
    "{}", "()", "(1, 2)", "[[1], 2]", "{1: 2}", "{1}", "{[1]: 2}", "1+2j", "...", "-'x'", "x", "f(1)",
    "[" * 150 + "]" * 150, "(" * 3000, "-" * 5000 + "1", "'" + "x" * 3000 + "'", "'float16'", "nan",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 1.5, float("nan"), 10**9, 10**30, "", "x", "1", [], {}, [None], ["x"],
    {"a": 1}, [[1]], "\ud800", "@deep@", "@name@", "../x", "float16", "x" * 3000,
]  # fmt: skip
DEEP = "[" * 20000 + "]" * 20000
SPOILT_TEXTS = [
    b"", b"\x00", b"\xff\xfe{}", b"null", b"[]", b"{}", b'"x"', b"1", b"[" * 20000, b"{", b"NaN",
    b"&a [*a]", b"? [a]: b", b"!!python/object/apply:os.system [ls]", b"arms: []", b"arms: x",
    b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9)) for c in range(97, 107)
    ),
    b"layers: 2001-01-01", b"layers: !!binary aGk=", b"1: 2", b"[1]: 2", b"arms: [{[1]: 2}]",
    b'{"text": 1}\n', b'{"context": [], "target": {}}\n', b"\xef\xbb\xbf{}", b"a\n" * 9,
]  # fmt: skip


def specs() -> st.SearchStrategy[str]:
    """Connections like mudd(dilation=x), most of which nothing can build."""

    def options_of(name: str) -> st.SearchStrategy[str]:
        known = [*default_options(make(name).method), "stream_dtype", "x"]
        option = st.tuples(st.sampled_from(known), st.sampled_from(LITERALS)).map("=".join)
        return st.lists(option, min_size=1, max_size=2).map(lambda o: f"{name}({', '.join(o)})")

    @st.composite
    def cut(draw: Any) -> str:
        text = draw(well_formed)
        place = draw(st.integers(0, len(text)))
        return (
            text[:place]
            + draw(st.sampled_from(["", "(", ")", ",", "'", "\x00", "**"]))
            + (text[place + draw(st.integers(0, 2)) :])
        )

    well_formed = st.sampled_from(available()).flatmap(options_of)
    return well_formed | cut()


class Spoilt(NamedTuple):
    """What is done to one file of a scene. Numbers are taken modulo what there is."""

    path: str
    file: int
    how: str
    place: int
    value: Any

    def apply(self) -> None:
        root = Path(self.path)
        files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file())
        file = files[self.file % len(files)]
        content = file.read_bytes()
        if self.how == "node":
            changed = _change_node(file, content, self.place, self.value)
            if changed is not None:
                file.write_bytes(changed)
                return
        match self.how:
            case "cut":
                file.write_bytes(content[: self.place % (len(content) + 1)])
            case "byte":
                place = self.place % (len(content) + 1)
                file.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
            case "text" | "node":
                file.write_bytes(SPOILT_TEXTS[self.place % len(SPOILT_TEXTS)])
            case _:
                file.unlink()
        match self.how:
            case "pipe":
                os.mkfifo(file)
            case "folder":
                file.mkdir()
            case "loop":
                file.symlink_to(file.name)


def _change_node(file: Path, content: bytes, place: int, value: Any) -> bytes | None:
    """The file with another value at one node of its JSON or YAML; None if it has none."""
    if file.suffix == ".safetensors":
        (length,) = struct.unpack("<Q", content[:8])
        header = _with_value(json.loads(content[8 : 8 + length]), place, value)
        text = _dump(header, json.dumps).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]
    if file.suffix == ".jsonl":
        first, *rest = content.decode().splitlines(keepends=True)
        return (_dump(_with_value(json.loads(first), place, value), json.dumps) + "\n").encode() + (
            "".join(rest).encode()
        )
    if file.suffix == ".json":
        return _dump(_with_value(json.loads(content), place, value), json.dumps).encode()
    if file.suffix == ".yaml":
        document = _with_value(yaml.safe_load(content), place, value)
        return _dump(document, yaml.safe_dump).encode()
    return None


def _with_value(document: Any, place: int, value: Any) -> Any:
    """The document with one node replaced, removed or (an odd key of an object) added."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in list(children)[:300]:  # a vocabulary is long
            places.append((node, key))
            if isinstance(child, dict | list):
                visit(child)

    whole = {"": document}
    visit(whole)
    node, key = places[place % len(places)]
    if value == "@remove@":
        del node[key]
    elif value == "@add@":
        node[key] = {"@name@": node[key]}
    else:
        node[key] = value
    return whole.get("", {})


def _dump(document: Any, dump: Callable[[Any], str]) -> str:
    return dump(document).replace('"@deep@"', DEEP).replace("'@deep@'", DEEP)


@dataclass
class Case:
    """A command line, and what happens to a file before it runs."""

    words: list[str]
    spoilt: Spoilt | None = None


def cases(name: str, options: list[str]) -> st.SearchStrategy[Case]:
    """Changes of a scene.

    Args:
        name: of the scene.
        options: the command's, like --layers.
    """
    scene = SCENES[name]
    words = list(scene.words)
    value = st.one_of(map(st.sampled_from, (WORDS, NUMBERS))) | specs() | st.text(max_size=9)
    first = 2 if words[0] == "data" else 1

    def replace_words(place: int, new: list[str]) -> Case:
        return Case([*words[:place], *new, *words[place + 1 :]])

    def add_option(option: str, values: list[str], huge: str) -> Case:
        if huge and option not in LONG_OPTIONS:
            values = [huge]
        return Case([*words, option, *values])

    strategies = [
        st.builds(replace_words, st.integers(first, len(words) - 1), st.lists(value, max_size=2))
    ]
    options = [option for option in options if option not in HARMLESS]
    if options:
        values = st.lists(value, min_size=1, max_size=2)
        huge = st.sampled_from(["", "", "", *HUGE])
        strategies.append(st.builds(add_option, st.sampled_from(options), values, huge))
    if scene.files:
        spoilt = st.builds(
            Spoilt,
            path=st.sampled_from(scene.files),
            file=st.integers(0, 30),
            how=st.sampled_from(
                ["node"] * 6 + ["cut", "byte", "text", "text", "pipe", "folder", "loop", "missing"]
            ),
            place=st.integers(0, 10_000),
            value=st.sampled_from([*VALUES, "@remove@", "@add@"]),
        )
        strategies += [st.builds(Case, st.just(words), spoilt)] * 2
    return st.one_of(strategies)


class TimedOut(BaseException):
    """A case took longer than it may."""


class Outcome(NamedTuple):
    """How a command ended: refused (in one line), succeeded, traceback, hung, or other (text)."""

    kind: str
    text: str


def run_case(case: Case, inputs: Path, folder: Path, seconds: float) -> Outcome:
    """Run a case in a new folder with copies of the valid inputs."""
    shutil.copytree(inputs, folder)
    errors = io.StringIO()
    with _working_in(folder), _bounded(seconds), contextlib.redirect_stderr(errors):
        os.mkfifo("pipe")
        os.symlink("loop", "loop")
        if case.spoilt is not None:
            case.spoilt.apply()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = main(case.words)
        except TimedOut:
            return Outcome("hung", traceback.format_exc())
        except SystemExit as error:
            return Outcome("other", f"SystemExit {error.code}")
        except BaseException:
            return Outcome("traceback", traceback.format_exc())
    text = errors.getvalue()
    if code == 0:
        return Outcome("succeeded", text)
    is_line = text.startswith("crosslayer: ") and text.count("\n") == 1 and len(text) < 2000
    return Outcome("refused" if is_line else "other", text)


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """In the folder, with nothing on standard input."""
    before, stdin = os.getcwd(), sys.stdin
    os.chdir(folder)
    sys.stdin = io.StringIO("")
    try:
        yield
    finally:
        os.chdir(before)
        sys.stdin = stdin


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """At most so many seconds, and `MEMORY` more than now."""

    def stop(*_: Any) -> None:
        raise TimedOut

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def options_of(name: str) -> list[str]:
    """The options of a scene's command."""
    command, action = SCENES[name].words[:2]
    module = importlib.import_module(f"crosslayer.cli.{command}")
    parser = module.parser()
    if hasattr(module, "actions"):
        (parser,) = [p for p in module.actions(parser) if action in p.prog]
    return sorted({option for known in parser._actions for option in known.option_strings})
