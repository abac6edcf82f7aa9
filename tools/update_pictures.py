"""Draws pictures of docs/.

python tools/update_pictures.py         # those of the connections' pages
python tools/update_pictures.py runs    # those of docs/inspect-pictures.md too, from its runs

Those of training are copied from a report of `crosslayer inspect runs/* --sections training`.
"""

import io
import sys
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

import crosslayer
from crosslayer.convert import open_model, open_tokenizer
from crosslayer.inspect import unfold_connections
from crosslayer.inspect.figures import draw_matrix
from crosslayer.inspect.inspection import ModelInspection, inspect_model
from crosslayer.inspect.sections import SECTIONS
from crosslayer.inspect.subjects import text_subject
from crosslayer.plotting import render_figure

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
# the runs of each picture, by the name of its section
RUNS = {
    "unfolded": ("prenorm", "mudd", "hyper"),
    "one_token": ("hyper",),
    "streams": ("hyper",),
    "mixing": ("denseformer", "mudd"),
    "stream_weights": ("hyper", "mgr"),
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
CONNECTIONS = PICTURES / "connections"
LAYERS, DIM = 4, 64
NOISE = 0.3  # of changed weights, as a share of the largest one of their parameter
LIMIT = 2.0  # of the colours


class FirstInput(nn.Linear):
    """A sub-layer that takes any number of inputs and reads the first."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x)


def draw_connection(name: str) -> bytes:
    """A PNG of a connection's unfolded map: as it starts, and after noise on its weights."""
    torch.manual_seed(0)
    sublayers = [FirstInput(DIM, DIM, bias=False) for _ in range(2 * LAYERS)]
    stack = crosslayer.Stack(name, sublayers, DIM, norm=nn.RMSNorm)
    batches = [{"embedding": torch.randn(2, 32, DIM)}]
    maps = {"as it starts": unfold_connections(stack, batches)}
    if change_weights(stack):
        maps["after noise on its weights"] = unfold_connections(stack, batches)
    panels = [
        (
            title,
            partial(draw_matrix, values=m.mean, rows=m.inputs, columns=m.sources, limit=LIMIT),
        )
        for title, m in maps.items()
    ]
    return render_figure(panels, suffixes=["png"])["png"]


@torch.no_grad()
def change_weights(stack: crosslayer.Stack) -> bool:
    """Add noise to the connections' own weights, and say whether there are any."""
    changed = False
    for connection in stack.connections:
        for path, weight in connection.named_parameters():
            if "norm" not in path:
                scale = weight.abs().max().item() or 1.0
                weight.add_(NOISE * scale * torch.randn_like(weight))
                changed = True
    return changed


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


def draw_runs(runs: Path) -> None:
    """The pictures of docs/inspect-pictures.md."""
    unknown = RUNS.keys() - {section.name for section in SECTIONS}
    if unknown:
        raise ValueError(f"no section of `crosslayer inspect` has the name {', '.join(unknown)}")
    inspections = {}
    for run in sorted({run for names in RUNS.values() for run in names}):
        wanted = {name for name, names in RUNS.items() if run in names}
        inspections[run] = inspect_run(runs / run, wanted)
        print_numbers(inspections[run])
    for section in SECTIONS:
        panels = section.panels([inspections[run] for run in RUNS.get(section.name, ())])
        if panels:
            png = render_figure(panels, suffixes=["png"])["png"]
            save_picture(section.name, png)


def save_picture(name: str, png: bytes) -> None:
    """Save a PNG with 256 colours, a third of its size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256).save(PICTURES / f"{name}.png", optimize=True)


def main(runs: list[str]) -> None:
    CONNECTIONS.mkdir(parents=True, exist_ok=True)
    for name in crosslayer.available():
        # Those of other packages that are installed here have no page.
        if crosslayer.make(name).method.__module__.startswith("crosslayer."):
            save_picture(f"connections/{name}", draw_connection(name))
    for folder in runs:
        draw_runs(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
