"""The data command of every recipe, on a local copy of the layout that its source has in public.

A local server stands in for the Hub: same names, folders, formats, compressions and fields, a few
documents a file. Whether the Hub still has these names is not tested.
"""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
import zstandard
from pyarrow import parquet

import crosslayer
from tests.support.hub import serve_hub

ROOT = Path(__file__).parent.parent.parent
RECIPES = [*ROOT.glob("recipes/*.yaml"), ROOT / "benchmarks" / "evidence_short.yaml"]
PACKAGE = str(Path(crosslayer.__file__).parent.parent)
DOCUMENTS = 45  # of each training file
# Of each document: the fields beside its text.
PILE = {"meta": {"pile_set_name": "Pile-CC"}}
DOLMA = {"id": "a1", "source": "c4", "added": "2023", "created": "2019", "metadata": {"url": "x"}}
FINEWEB = {"id": "u", "dump": "CC", "url": "x", "language_score": 0.9, "token_count": 3}
PG19 = {"short_book_title": "A", "publication_date": 1900, "url": "x"}
# The files of each repository. A training file has `DOCUMENTS` documents, any other has one.
REPOSITORIES: dict[str, dict[str, dict[str, Any]]] = {
    "monology/pile-uncopyrighted": {
        "train/00.jsonl.zst": PILE,
        "train/01.jsonl.zst": PILE,
        "val.jsonl.zst": PILE,
        "test.jsonl.zst": PILE,
    },
    "vietgpt/the_pile_openwebtext2": {
        "data/train-00000-of-00035-0ffa1b2c1533e462.parquet": {"title": "A", "reddit_scores": [3]},
        "data/train-00001-of-00035-872e837e0ce2b7b8.parquet": {"title": "B", "reddit_scores": []},
    },
    "emozilla/pg19": {
        "data/train-00000-of-00023-01.parquet": PG19,
        "data/validation-00000-of-00001-02.parquet": PG19,
        "data/test-00000-of-00001-29a571947c0b5ccc.parquet": PG19,
    },
    "HuggingFaceFW/fineweb": {
        "data/CC-MAIN-2013-20/000_00000.parquet": FINEWEB,
        "sample/10BT/000_00000.parquet": FINEWEB,
        "sample/10BT/014_00000.parquet": FINEWEB,
    },
    "allenai/OLMoE-mix-0924": {
        "data/algebraic-stack/algebraic-stack-train-0000.json.gz": {
            "id": "1",
            "metadata": {"a": 1},
        },
        "data/arxiv/train/arxiv-train-0000.json.gz": {"id": 4, "yymm": "2001"},
        "data/dclm/dclm-0000.json.zst": {"url": "x", "metadata": {"WARC": "y"}},
        "data/open-web-math/041.jsonl.gz": {"url": "x", "metadata": "text"},
        "data/wiki/wiki-0000.json.gz": {"id": 7, "source": "wiki"},
    },
    "Salesforce/wikitext": {
        "wikitext-2-raw-v1/train-00000-of-00001.parquet": {},
        "wikitext-2-raw-v1/validation-00000-of-00001.parquet": {},
        "wikitext-2-raw-v1/test-00000-of-00001.parquet": {},
        "wikitext-103-raw-v1/train-00000-of-00002.parquet": {},
    },
}
CARDS = {
    "HuggingFaceFW/fineweb": """---
configs:
- config_name: default
  data_files: [{split: train, path: data/*/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---""",
    "Salesforce/wikitext": """---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: wikitext-2-raw-v1/train-*}
  - {split: validation, path: wikitext-2-raw-v1/validation-*}
- config_name: wikitext-103-raw-v1
  data_files: [{split: train, path: wikitext-103-raw-v1/train-*}]
---""",
}
# Downloaded with wget from a list of URLs.
FOLDERS = {
    "data/dolma-v1_5-sample": {
        "c4/c4-0000.json.gz": DOLMA,
        "stack/stack-0000.json.gz": DOLMA | {"metadata": {"stars": 3}},
        "wiki/en_simple_wiki_v0-0000.json.gz": DOLMA | {"created": None, "version": "v0"},
    }
}
# Documents of a source, by the files that its pattern or split selects.
EXPECTED = {
    "datasets:monology/pile-uncopyrighted": 2 * DOCUMENTS,
    "datasets:vietgpt/the_pile_openwebtext2": 2 * DOCUMENTS,
    "datasets:emozilla/pg19": DOCUMENTS,
    "datasets:HuggingFaceFW/fineweb,sample-10BT": 2 * DOCUMENTS,
    "datasets:Salesforce/wikitext,wikitext-2-raw-v1": DOCUMENTS,
    "datasets:Salesforce/wikitext,wikitext-2-raw-v1@validation": 1,
    "hf://datasets/allenai/OLMoE-mix-0924/data/**/*.json*": 5 * DOCUMENTS,
    "data/dolma-v1_5-sample": 3 * DOCUMENTS,
}
PREPARE_ALL = """
import json, sys
from crosslayer.cli.main import main
for number, source in enumerate(json.loads(sys.argv[1])):
    assert main(["data", "prepare", source, "--out", f"out{number}"]) == 0, source
"""


def write_file(path: Path, fields: dict[str, Any]) -> None:
    count = 1 if re.search("val|test", path.name) else DOCUMENTS
    rows = [{"text": f"{path.name} {i} some words", **fields} for i in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[path.suffix]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(compress(lines.encode()))


def stated_sources(recipe: Path) -> set[str]:
    """The sources of a recipe's options, which are those of the command in its header."""
    text = recipe.read_text("utf8")
    header = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    options = yaml.safe_load(text)
    command = re.search(r"crosslayer data prepare (\S+) --tokenizer (\S+) --out \S+,", header)
    if recipe.parent.name == "recipes":
        assert command.groups() == (options["data"], options["tokenizer"]), recipe.name
    sets = options.get("valid", {}).values()
    return {options["data"], *(source for source in sets if not source.endswith(".npy"))}


def test_every_source_has_a_layout():
    sources = set().union(*map(stated_sources, RECIPES))
    assert sources == EXPECTED.keys()


@pytest.mark.slow
def test_every_recipes_data_can_be_read(tmp_path):
    sources = list(EXPECTED)
    for name, files in REPOSITORIES.items():
        for file, fields in files.items():
            write_file(tmp_path / "hub" / name / file, fields)
        (tmp_path / "hub" / name / "README.md").write_text(CARDS.get(name, "# A data set"))
    for folder, files in FOLDERS.items():
        for file, fields in files.items():
            write_file(tmp_path / folder / file, fields)
    with serve_hub(tmp_path / "hub") as address:
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        settings |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment = os.environ | settings | {"PYTHONPATH": PACKAGE}
        command = [sys.executable, "-c", PREPARE_ALL, json.dumps(sources)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    for number, source in enumerate(sources):
        sets = json.loads((tmp_path / f"out{number}" / "corpus.json").read_text())["sets"]
        documents = sum(sizes["documents"] for sizes in sets.values())
        # of a few documents the tail is held out, and counts as one more
        assert documents - (EXPECTED[source] < 40) == EXPECTED[source], source
