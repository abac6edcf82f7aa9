"""DenseFormer without its smallest weights over depth: docs/evidence/unscaled-pruning.json."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.evidence.studies import RESULTS, UNSCALED, Measure
from crosslayer.files import read_json, write_json
from crosslayer.inspect.report import JSON_FILE

PRUNING_FILE = f"{UNSCALED}pruning.json"  # of models with embeddings × 1


@dataclass
class PrunedModels:
    """The losses of one model a seed, with its smallest weights over depth set to zero.

    Attributes:
        by_share: loss of each seed, by the share of the weights that are zero, like "15 %".
    """

    by_share: dict[str, list[float]] = field(default_factory=dict)

    def losses(self, share: str, at: Measure = "end") -> dict[int, float]:
        """The losses at a share like "15 %", by seed; none before the end of training."""
        return dict(enumerate(self.by_share.get(share, []))) if at == "end" else {}

    def is_paired(self, share: str) -> bool:
        """The same models lose their weights at every share."""
        return True


def read_pruned_models(folder: Path = RESULTS) -> PrunedModels:
    """The committed losses; empty if there are none."""
    file = folder / PRUNING_FILE
    return PrunedModels(**read_json(file)) if file.exists() else PrunedModels()


def take_over_pruning(inspection: Path, folder: Path = RESULTS) -> Path:
    """Copy the pruning curves of `crosslayer inspect --sections pruning`.

    Args:
        inspection: its folder. The models are those of seeds 0, 1, 2, in this order.
        folder: of the committed file.

    Raises:
        ValueError: a model has no such curve.
    """
    pruned = PrunedModels()
    for model in read_json(inspection / JSON_FILE)["models"]:
        curve = model["results"].get("pruning")
        if curve is None:
            raise ValueError(f"{inspection}: the model {model['name']} has no losses of pruning")
        for share, loss in zip(curve["shares"], curve["losses"], strict=True):
            pruned.by_share.setdefault(f"{share:.0%}".replace("%", " %"), []).append(loss)
    file = folder / PRUNING_FILE
    write_json(file, asdict(pruned))
    return file
