"""Hooks of mkdocs: a page for every connection from its docstrings, and a table of all.

A page shows the connection's pictures (tools/update_pictures.py) and its rows of the evidence
(`python -m benchmarks.evidence`), where there are any. The first page has sections of README.md.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import crosslayer
from crosslayer.connection import InitialFunction

TABLE_MARK = "<!-- table of connections -->"
ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
EVIDENCE = DOCS / "evidence" / "connections.json"
# the picture of docs/inspect-pictures.md that shows what a connection has learned
LEARNED = {
    "denseformer": "mixing",
    "mudd": "mixing",
    "hyper": "stream_weights",
    "mgr": "stream_weights",
}
STREAM_WEIGHTS_CAPTION = (
    "Left and middle: the write and the mixing of streams of hyper. Right: mgr's write. "
)
# the labels that begin a line of a docstring
LABELS = r"Paper|State|Names|Learned parameters[\w -]*|Traffic[^:]*"
PICTURES_LINK = "[what each picture tells you](../inspect-pictures.md)"
LEGEND = (
    "B, T and D are sequences, tokens and width; F_k is sub-layer k and y_k its output. "
    "[Concepts](../concepts.md) explains site, state and pending write. The host is the model that "
    "is connected. Traffic is the number of elements that one read of a site moves to and from "
    "memory."
)
EVIDENCE_LEGEND = (
    "The loss of pre-norm in nats a token, and differences of the others to it, of Llamas. A "
    "column is named by the tokens a parameter and the factor of the token embeddings. With 20 "
    "tokens a parameter there are 6 layers of width 64, with 0.2 there are 8 of width 128. The "
    "smaller model has 6 layers of width 96, 0.2 tokens a parameter, embeddings × 50, and three "
    "tenths of its steps are warm-up. Differences have 95 % intervals; one that contains zero "
    "shows nothing. How it was measured: [Evidence](../evidence.md)."
)
MAP_CAPTION = (
    "How much of each output reaches each later input, in four layers of two sub-layers, at "
    "initialisation. Where the connection has weights of its own, a second map shows the paths "
    "that they can form: random numbers are added to them. Weights above 2 have the colour of 2."
)


def on_config(config: Any) -> Any:
    """Put the pages of the connections into the navigation, under the page that lists them."""
    pages = [{name: f"connections/{name}.md"} for name in own_connections()]
    for entry in config.nav:
        if "Connections" in entry:
            entry["Connections"] = [{"All connections": "connections.md"}, *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every connection."""
    for name in own_connections():
        files.append(
            File.generated(config, f"connections/{name}.md", content=connection_page(name))
        )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the table of connections, and sections of README.md."""
    page = markdown.replace(TABLE_MARK, connections_table())
    return re.sub(r"<!-- README\.md: (.*) -->", lambda mark: readme_section(mark[1]), page)


def readme_section(title: str) -> str:
    """The text below a heading of README.md, up to the next one, with the links of a page."""
    _, heading, rest = README.read_text("utf8").partition(f"# {title}\n")
    assert heading, f"README.md has no section {title!r}"
    section = re.split(r"^## ", rest, maxsplit=1, flags=re.M)[0]
    return section.strip().replace("](docs/", "](")


def connection_page(name: str) -> str:
    """The docstring of the file, with its equations, and that of the class, with its options."""
    method = crosslayer.make(name).method
    return (
        f"# {name}\n\n{as_markdown(module_docstring(name))}\n\n{LEGEND}\n\n"
        f"**Equivalent to pre-norm at initialisation:** {EQUIVALENCE[method.initial_function]}.\n\n"
        f"{pictures(name)}"
        f"## Evidence\n\n{evidence(name)}\n\n"
        "## Options\n\n"
        "Every connection also accepts `stream_dtype`, the dtype of its streams: `'float32'` "
        "or `'bfloat16'`.\n\n"
        f"::: {method.__module__}.{method.__name__}\n"
        "    options:\n      members: false\n      show_bases: false\n"
    )


def pictures(name: str) -> str:
    """Its map, and what a trained model has learned; what has not been drawn is left out."""
    text = ""
    if (DOCS / "pictures" / "connections" / f"{name}.png").exists():
        text += f"![Map of {name}](../pictures/connections/{name}.png)\n\n{MAP_CAPTION}\n\n"
    if name in LEARNED:
        picture = f"![Weights of trained models](../pictures/{LEARNED[name]}.png)"
        caption = STREAM_WEIGHTS_CAPTION if LEARNED[name] == "stream_weights" else ""
        text += f"{picture}\n\n{caption}What small models learned: {PICTURES_LINK}.\n\n"
    return f"## Picture\n\n{text}" if text else ""


def evidence(name: str) -> str:
    """Its results in the main studies."""
    rows = json.loads(EVIDENCE.read_text("utf8")).get(name, "")
    if not rows:
        return "No result yet in [Evidence](../evidence.md)."
    return f"{rows}\n\n{EVIDENCE_LEGEND}"


EQUIVALENCE: dict[InitialFunction, str] = {
    "bitwise prenorm": "yes, bitwise",
    "prenorm": "yes, up to the epsilon of the norms",
    "prenorm up to scales": "yes, up to the epsilon of the norms, if each sub-layer has one",
    "prenorm up to scale of readout": "yes, up to the epsilon of the final norm, if there is one",
    "bitwise postnorm": "no, but bitwise to post-norm",
    "other": "no",
}


def connections_table() -> str:
    rows = [
        "| connection | what it is | paper | equivalent to pre-norm at initialisation |",
        "| --- | --- | --- | --- |",
    ]
    for name in own_connections():
        method = crosslayer.make(name).method
        doc = module_docstring(name)
        summary = " ".join(doc.split("\n\n")[0].split()).rstrip(".")
        paper = re.search(r"^Paper: (.*?\)),\s+arXiv\s+([\d.]+\d)", doc, re.M | re.S)
        assert paper, f"{name}: no line 'Paper: Title (Authors, year), arXiv 0000.00000'"
        title = " ".join(paper[1].split())
        link = f"[{title}](https://arxiv.org/abs/{paper[2]})"
        equivalence = EQUIVALENCE[method.initial_function]
        rows.append(f"| [`{name}`](connections/{name}.md) | {summary} | {link} | {equivalence} |")
    return "\n".join(rows)


def own_connections() -> list[str]:
    """Without those of other packages that are installed here."""
    methods = {name: crosslayer.make(name).method for name in crosslayer.available()}
    return [name for name, own in methods.items() if own.__module__.startswith("crosslayer.")]


def module_docstring(name: str) -> str:
    module = sys.modules[crosslayer.make(name).method.__module__]
    return inspect.cleandoc(module.__doc__ or "")


def as_markdown(doc: str) -> str:
    """A docstring as Markdown: indented lines become code, arXiv numbers become links."""
    parts: list[str] = []
    in_block = False
    for line in doc.splitlines():
        is_indented = line.startswith("    ")
        if in_block and not is_indented and line:
            parts.append("```\n")
            in_block = False
        if is_indented and not in_block:
            parts.append("\n```text")
            in_block = True
        parts.append(line[4:] if in_block else escape(line))
    if in_block:
        parts.append("```")
    return "\n".join(parts)


def escape(line: str) -> str:
    """Escape Markdown's characters outside `code`, link arXiv numbers, set off labels."""
    pieces = re.split(r"(`[^`]*`)", line)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([*_<\[\]|])", r"\\\1", pieces[i])
    line = "".join(pieces)
    line = re.sub(r"arXiv ([\d.]+\d)", r"[arXiv \1](https://arxiv.org/abs/\1)", line)
    return re.sub(rf"^({LABELS}):", r"\n**\1:**", line)
