"""Folders of runs and comparisons whose curves have a known answer."""

import json
import math
from pathlib import Path

from crosslayer.run_folders import (
    COMPARISON_RESULTS_FILE,
    DATA_DIGEST,
    METRICS_FILE,
    RUNS_FOLDER,
    run_folder_name,
)

SETTINGS = {
    "family": "llama",
    "layers": 12,
    "dim": 64,
    "heads": 4,
    "model_config": {},
    "reallocate": False,
    "context": 100,
    "batch": 10,
    "steps": 1000,
}


def falling_loss(step: float, speed: float = 1.0) -> float:
    """A loss that falls like a power of the steps, `speed` times as fast."""
    return 2 + 8 * (1 + speed * step / 20) ** -0.7


def write_metrics(folder, loss_of=falling_loss, steps=1000, every=10, evals=20, seconds=0.1):
    """metrics.jsonl of a run. `seconds` are of a step; None leaves them out."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for step in range(1, steps + 1):
        if step % every == 0:
            row = {"step": step, "loss": loss_of(step) + 0.02 * math.sin(7 * step)}
            if seconds is not None:
                row["seconds"] = seconds * step
            rows.append(row)
        if step % (steps // evals) == 0:
            rows.append({"step": step, "held-out loss": loss_of(step)})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / METRICS_FILE).write_text(text)


def run_result(arm: str, connection: str, seed: int, loss: float, **fields) -> dict:
    """A `RunResult` as JSON."""
    return {
        "arm": arm,
        "connection": connection,
        "seed": seed,
        "parameters": 1_000_000,
        "extra_parameters": 0,
        "valid_loss": loss,
        "valid": {"held-out": {"loss": loss}},
        "metrics": {"perplexity": math.exp(loss)},
        "tokens_per_second": 1000.0,
        "activation_bytes": 1,
        "train_loss": loss,
        "curve": [[500, loss + 0.1], [1000, loss]],
        "skipped": [],
        "seconds": 100.0,
        **fields,
    }


def write_comparison(
    folder: Path, arms: dict[str, dict], seeds: int = 1, digest: str = "", **settings
) -> Path:
    """A comparison's folder.

    Args:
        folder: of the comparison.
        arms: by name: `connection`, `loss_of`, `options`, `own_digest` of other data, and fields of
            its result.
        seeds: each seed's losses are 0.01 above those of the one before.
        digest: of the data.
        settings: shared options besides `SETTINGS`.
    """
    folder.mkdir(parents=True)
    content = {
        "environment": dict.fromkeys(("device", "torch", "python", "crosslayer"), "known"),
        "settings": SETTINGS | settings,
        "data": {"sha256": digest},
        "scale": "full",
        "entropy": None,
        "arms": {},
        "runs": [],
        "diverged": [],
    }
    for name, arm in arms.items():
        arm = dict(arm)
        connection, loss_of = arm.pop("connection"), arm.pop("loss_of", falling_loss)
        options = arm.pop("options", {})
        content["arms"][name] = {"connection": connection, "options": options, "paper": {}}
        if "own_digest" in arm:
            content["arms"][name][DATA_DIGEST] = arm.pop("own_digest")
        for seed in range(seeds):
            run = folder / RUNS_FOLDER / run_folder_name(name, seed)
            write_metrics(run, lambda step: loss_of(step) + 0.01 * seed)
            result = run_result(name, connection, seed, loss_of(1000) + 0.01 * seed, **arm)
            content["runs"].append(result)
    (folder / COMPARISON_RESULTS_FILE).write_text(json.dumps(content))
    return folder
