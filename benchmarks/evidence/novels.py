"""Writes the novels that some studies train on, from a clone of their collection.

    git clone https://github.com/COST-ELTeC/ELTeC-eng
    git -C ELTeC-eng checkout 3db3b6738a
    python -m benchmarks.evidence.novels ELTeC-eng novels

novels.csv has the novels of each file in their order, with the digests of the texts that the
studies read. The command names each novel whose text differs.
"""

import argparse
import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from crosslayer.cli.options import OneLineParser
from crosslayer.errors import error_in_one_line
from crosslayer.files import short_digest, write_text_atomic

NOVELS = Path(__file__).parent / "novels.csv"
LEVEL = "level1"  # the folder of the texts with this much markup
NAMESPACE = "{http://www.tei-c.org/ns/1.0}"
LEFT_OUT = ("note", "ref")
WITHIN_A_LINE = ("hi", "emph", "foreign", "title", "corr", "name", "pb", "milestone", "gap")
VERSE = "l"


@dataclass
class Paragraph:
    """A paragraph, a heading or a line of verse.

    Attributes:
        kind: the name of its element.
        text: with the line breaks of the file.
    """

    kind: str
    text: str = ""


def read_novel(file: Path) -> str:
    """The body of a novel. Lines of verse follow one another, all else has an empty line between.

    Raises:
        ValueError: the file is no XML, or has no body.
    """
    try:
        body = ElementTree.parse(file).find(f"{NAMESPACE}text/{NAMESPACE}body")
    except ElementTree.ParseError as error:
        raise ValueError(f"{file}: {error}") from None
    if body is None:
        raise ValueError(f"{file}: it has no body")
    paragraphs = [Paragraph("body")]
    _collect(body, "body", paragraphs)
    text = ""
    kind_before = ""
    for paragraph in paragraphs:
        words = " ".join(paragraph.text.split())
        if words:
            is_next_verse = paragraph.kind == kind_before == VERSE
            text += ("\n" if is_next_verse else "\n\n") + words
            kind_before = paragraph.kind
    return text.strip() + "\n"


def _collect(element: ElementTree.Element, kind: str, paragraphs: list[Paragraph]) -> None:
    """Add the text of an element, which lies in a paragraph of this kind, to the last paragraph."""
    paragraphs[-1].text += element.text or ""
    for child in element:
        name = str(child.tag).removeprefix(NAMESPACE)
        if name in WITHIN_A_LINE:
            _collect(child, kind, paragraphs)
        elif name not in LEFT_OUT:
            paragraphs.append(Paragraph(name))
            _collect(child, name, paragraphs)
            paragraphs.append(Paragraph(kind))
        paragraphs[-1].text += child.tail or ""


def write_novels(collection: Path, out: Path) -> list[str]:
    """Write OUT/train.jsonl and OUT/valid.jsonl, one novel a line.

    Args:
        collection: a clone of ELTeC-eng.
        out: the folder of the two files.

    Returns:
        The names of the novels whose text is not the one that the studies read.

    Raises:
        ValueError: a novel is missing, or cannot be read. Nothing has been written.
    """
    lines: dict[str, list[str]] = {}
    changed = []
    for row in csv.DictReader(NOVELS.open(newline="")):
        file = collection / LEVEL / f"{row['id']}.xml"
        if not file.exists():
            raise ValueError(f"{file}: no such file; expected a clone of COST-ELTeC/ELTeC-eng")
        text = read_novel(file)
        if short_digest(text) != row["digest"]:
            changed.append(row["id"])
        line = json.dumps({"id": row["id"], "text": text}, ensure_ascii=False)
        lines.setdefault(row["file"], []).append(line)
    out.mkdir(parents=True, exist_ok=True)
    for name, of_file in lines.items():
        write_text_atomic(out / name, "\n".join(of_file) + "\n")
    return changed


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m benchmarks.evidence.novels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("collection", type=Path, help="a clone of COST-ELTeC/ELTeC-eng")
    parser.add_argument("out", type=Path, help="the folder of train.jsonl and valid.jsonl")
    try:
        options = parser.parse_args(arguments)
        changed = write_novels(options.collection, options.out)
    except (ValueError, OSError) as error:
        print(f"novels: {error_in_one_line(error)}", file=sys.stderr)
        return 1
    print(f"Written to {options.out}. Texts that differ from those of the studies: {len(changed)}")
    print(*changed, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
