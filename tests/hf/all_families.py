"""Every model of transformers that generates text, fills masks or classifies images, small and
random, connected: docs/families.md.

python -m tests.hf.all_families            # writes the table, in about five minutes
python -m tests.hf.all_families llama      # prints the rows of some families
"""

import copy
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import crosslayer
from crosslayer.hf.attach import find_backbone
from crosslayer.hf.families import own_connection
from tests.hf.small_models import LANGUAGE, MODEL_KINDS, Kind, build_small, read_output

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
ROUNDING = 1e-4  # the largest difference of a logit that is rounding, in units of the largest logit
STATUSES = ("exact", "to rounding", "refused", "fails", "untried")


class Result(NamedTuple):
    family: str
    kind: str
    status: str  # one of STATUSES
    note: str  # the difference, or the reason


def build_model(family: str, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A small random language model of a family, and its logits."""
    model = build_small(LANGUAGE, family).model
    return model, read_logits(model, ids)


def read_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return read_output(model, {"input_ids": ids, "use_cache": False})


def check_family(kind: Kind, family: str) -> Result:
    """Connect a small model of a family with the residual connection that it has and with MUDD, and
    compare its logits.
    """
    try:
        plain, inputs, expected, note = build_small(kind, family)
    except Exception as error:  # of any class, from a family's own code
        return Result(family, kind.name, "untried", _one_line(error))
    try:
        own = own_connection(find_backbone(plain)[1].of_layers[0])
    except ValueError:
        own = "prenorm"
    if own == "postnorm":
        note = f"{note} post-norm".strip()
    largest = 0.0
    for method in (own, "mudd"):
        try:
            model = crosslayer.connect(copy.deepcopy(plain), method)
        except ValueError as error:
            reason = str(error).split(". In a model of your own")[0].split("\n")[0]
            return Result(family, kind.name, "refused", reason.split(": ", 1)[-1])
        except Exception as error:  # what may not be
            return Result(family, kind.name, "fails", f"connect {method}: {_one_line(error)}")
        try:
            logits = read_output(model, inputs)
        except Exception as error:
            return Result(family, kind.name, "fails", f"{method}: {_one_line(error)}")
        if own == "postnorm" and method == "mudd":  # which has another function, and runs
            continue
        difference = (logits - expected).abs().max() / expected.abs().max()
        largest = max(largest, difference.item())
    if largest == 0:
        return Result(family, kind.name, "exact", note)
    status = "to rounding" if largest < ROUNDING else "fails"
    return Result(family, kind.name, status, f"{largest:.1e} {note}".strip())


def _one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:120]}"


def format_page(results: list[Result]) -> str:
    """The page of the documentation."""
    lines = [
        "# Families",
        "",
        f"Small random models of transformers {transformers.__version__}. Their logits, or the",
        "output of a model without logits, were compared before and after `connect` with `prenorm`",
        "and `mudd`, or with `postnorm` where the layers are post-norm.",
        "This page is written by `python -m tests.hf.all_families`.",
        "",
        f"| kind | families | {' | '.join(STATUSES)} |",
        f"| --- |{' --- |' * (len(STATUSES) + 1)}",
    ]
    for kind in MODEL_KINDS:
        counts = Counter(result.status for result in results if result.kind == kind.name)
        cells = [str(counts[status]) for status in STATUSES]
        lines.append(f"| {kind.name} | {counts.total()} | {' | '.join(cells)} |")
    lines += [
        "",
        "- **exact**: bitwise the same logits.",
        "- **to rounding**: equal up to the difference shown, in units of the largest logit.",
        "- **refused**: `connect` raises this error and leaves the model unchanged.",
        "- **post-norm**: exact with `postnorm`; other connections change the function, and warn.",
        "- **untried**: no small model of this family could be built or run, so nothing is known.",
        "",
        "Of a multi-modal model, `connect` connects the language model.",
        "",
        "| family | kind | connected | |",
        "| --- | --- | --- | --- |",
    ]
    for result in results:
        note = result.note.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {result.family} | {result.kind} | {result.status} | {note} |")
    return "\n".join(lines) + "\n"


def main(families: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for kind in MODEL_KINDS:
        for family in kind.classes:
            if families and family not in families and kind.name not in families:
                continue
            results.append(check_family(kind, family))
            print(*results[-1], sep="\t", flush=True)
    if not families:
        PAGE.write_text(format_page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
