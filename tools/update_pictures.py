"""Draws the pictures of docs/inspect-pictures.md, from runs that the page says how to train.

python tools/update_pictures.py runs

Those of training are copied from a report of `crosslayer inspect runs/* --sections training`.
"""

import sys
from pathlib import Path

from crosslayer.convert import open_model, open_tokenizer
from crosslayer.inspect.figures import render_figure
from crosslayer.inspect.inspection import ModelInspection, inspect_model
from crosslayer.inspect.sections import SECTIONS
from crosslayer.inspect.subjects import text_subject

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
# the runs of each picture, by the name of its section
RUNS = {
    "unfolded": ("prenorm", "mudd", "hyper"),
    "one_token": ("hyper",),
    "streams": ("hyper",),
    "mixing": ("denseformer", "mudd"),
    "wiring": ("hyper", "mgr"),
    "cosines": ("prenorm", "denseformer", "mudd", "hyper", "mgr"),
    "block_cosines": ("prenorm", "mudd"),
    "embedding": ("prenorm", "denseformer"),
    "distances": ("prenorm", "mgr"),
    "cka": ("prenorm", "hyper", "mgr"),
    "block_scales": ("prenorm", "denseformer", "mudd", "hyper", "mgr"),
    "activations": ("prenorm", "mgr"),
    "stream_scales": ("hyper", "mgr"),
    "gains": ("hyper",),
    "gates": ("mgr",),
    "attention": ("prenorm", "mudd"),
    "patterns": ("mudd",),
    "lens": ("prenorm", "denseformer", "mudd", "hyper", "mgr"),
    "blocks": ("prenorm", "hyper", "mgr"),
    "ways": ("mudd",),
    "pruning": ("denseformer",),
    "singular_values": ("prenorm", "denseformer"),
}
SEQUENCES, BATCH, CONTEXT = 32, 8, 256


def inspect_run(folder: Path, names: set[str]) -> ModelInspection:
    """The analyses that the sections of these names need, of a run's model."""
    source = folder / "model"
    subject = text_subject(
        open_model(source, "auto"), open_tokenizer(source), "stdlib", SEQUENCES, BATCH, CONTEXT
    )
    analyses = {a for section in SECTIONS if section.name in names for a in section.analyses}
    return inspect_model(folder.name, subject, analyses)


def print_numbers(inspection: ModelInspection) -> None:
    """The numbers that the page states beside the papers'."""
    print(inspection.name)
    results = inspection.results
    if "findings" in results:
        print("  findings", results["findings"])
    if "cosines" in results:
        cosines = results["cosines"]
        print("  median cosine with the input before", cosines.adjacent[1:, 1].tolist())
        for way, quantiles in cosines.blocks.items():
            print("  between layers,", way, quantiles[:, 1].tolist())
        print("  with the embedding", cosines.depths.tolist())
    if "attention" in results:
        print("  active heads", results["attention"].active.tolist())
    for analysis in ("blocks", "ways", "pruning", "gradients", "alarms"):
        if analysis in results:
            print(" ", analysis, results[analysis])


def main(runs: Path) -> None:
    PICTURES.mkdir(exist_ok=True)
    inspections = {}
    for run in sorted({run for names in RUNS.values() for run in names}):
        wanted = {name for name, names in RUNS.items() if run in names}
        inspections[run] = inspect_run(runs / run, wanted)
        print_numbers(inspections[run])
    for section in SECTIONS:
        panels = section.panels([inspections[run] for run in RUNS.get(section.name, ())])
        if panels:
            png = render_figure(panels)["png"]
            (PICTURES / f"{section.name}.png").write_bytes(png)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
