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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

from crosslayer.cli.main import main
from crosslayer.methods import available
from crosslayer.spec import default_options, make
from tests.support.scenes import SCENES, working_in

MEMORY = 3 * 2**30  # bytes that a case may allocate

# what people and their scripts put where something else belongs
NUMBERS = ["-1", "0", "1", "3", "nan", "inf", "-inf", "1e400", "1.5", "1e3", "1_000", "0x10"]
HUGE = ["1000000000", "9223372036854775808", "1" + "0" * 30]
WORDS = [
    "", " ", "x", "null", "true", "no", "~", "-", "--", "-x", "=", ".", "..", "/", "a=b", "ü",
    "\udcff", "a\nb", "[]", "{}", "[1, 2]", '{"a": 1}', "[[]]", "[" * 3000, "{a: " * 500, "'",
    "a" * 3000, ",", "!!python/name:os.system", "!!set {a}", "&a [*a]", "2001-01-01", "text.txt",
    "model", "pipe", "loop", "missing/x.json", "prenorm,", "mudd(", "$HOME", "bpe:300", "bpe:-1",
    "cuda:9", "meta", "datasets:", "datasets:missing", "stdlib/", "1=text.txt",
]  # fmt: skip
# huge values of these are requests for much work, which nobody refuses
LONG_OPTIONS = {"--steps", "--eval-batches", "--evals", "--seeds", "--max-new-tokens", "--workers"}
HARMLESS = {"--help", "--version", "-h", "--print_config", "--config"}
LITERALS = [
    "None", "True", "-1", "0", "1", "2", "3.5", "1e999", "1" + "0" * 25, "''", "'x'", "b'x'", "[]",
    "{}", "()", "(1, 2)", "[[1], 2]", "{1: 2}", "{1}", "{[1]: 2}", "1+2j", "...", "-'x'", "x",
    "f(1)",
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
    with working_in(folder), _bounded(seconds), contextlib.redirect_stderr(errors):
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
    # a progress bar of transformers is no message
    lines = [line for line in errors.getvalue().splitlines() if line and "it/s]" not in line]
    text = "".join(f"{line}\n" for line in lines)
    if code == 0:
        return Outcome("succeeded", text)
    is_line = text.startswith("crosslayer: ") and text.count("\n") == 1 and len(text) < 2000
    return Outcome("refused" if is_line else "other", text)


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
