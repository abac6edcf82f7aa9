"""When to connect: from the start, late in training, or never.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, Table 5, which starts a 4x5-DenseFormer after N of 40k
iterations of a 72-block model on OpenWebText2, the schedule unchanged:

    N            never   0      1k     2k     4k     6k     10k    20k    30k
    perplexity   18.61   17.87  17.99  18.07  18.13  18.17  18.23  18.33  18.40

Here: any connection, on a body small enough for minutes. A run trains with PreNorm up to the switch, calls
`crosslayer.connect` on the trained model, and goes on with the same schedule, batches and optimizer state; what the
switch itself did to the validation loss is in the results. Expected, as in the paper: the later, the less is gained.
docs/retrofit.md is what this gave, with the hardware and the command.

    python recipes/retrofit.py run --out retrofit --arms '[prenorm, mudd]' --settings.data novels/  # resumes
    python recipes/retrofit.py report --out retrofit --page docs/retrofit.md
"""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import crosslayer
from crosslayer.costs import loss_of
from crosslayer.train import run as training
from crosslayer.train.data import Text, load

SWITCHES = (0.0, 0.05, 0.25, 0.5, 0.75)  # shares of the steps; 0 is from scratch
SETTINGS = training.Settings(
    steps=2000, batch=16, context=512, lr=1e-3, layers=10, dim=256, heads=4, precision="bf16-mixed"
)


def run(
    out: str,
    arms: list[str],
    switches: tuple[float, ...] = SWITCHES,
    seed: int = 0,
    settings: training.Settings = SETTINGS,
    device: str = "auto",
) -> None:
    """Train every arm with every switch that `out` has no result of yet.

    Args:
        out: folder of one result a run.
        arms: like mudd "attnres(block_size=4)"; prenorm is never switched.
        switches: when to connect, as shares of the steps.
        seed: of the body's weights and of the batches.
        settings: the body, the data and the training that every run shares.
        device: cuda or cpu.
    """
    text = load(settings.data, settings.context)
    for arm in arms:
        for share in switches if arm != "prenorm" else (0.0,):
            file = Path(out) / f"{arm} {share} {seed}.json".replace("/", "-")
            if not file.exists():
                row = retrofit(settings, text, arm, round(share * settings.steps), seed, device)
                file.parent.mkdir(parents=True, exist_ok=True)
                part = file.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps(row))
                part.replace(file)
                print(
                    f"{arm}, from step {row['switch']}: {row['valid_loss']:.4f} in {row['seconds']:.0f} s", flush=True
                )


def retrofit(settings: Any, text: Text, arm: str, switch: int, seed: int, device: str) -> dict[str, Any]:
    """One run: PreNorm for `switch` steps, the arm from there on."""
    fabric = training.Fabric(accelerator=device, devices=1, precision=settings.precision)
    model = training.build(settings, "prenorm" if switch else arm, seed)
    bare, optimizer = model, training.optimizer(model, settings)
    rates = [group["lr"] for group in optimizer.param_groups]
    model, optimizer = fabric.setup(model, optimizer)
    held_out = [fabric.to_device(batch) for batch in text.held_out(settings.batch, settings.context, 8)]
    batches, start, curve, jump = text.batches(seed, settings.batch, settings.context), time.perf_counter(), [], None
    for step in range(settings.steps):
        if step == switch > 0:
            before = training.evaluate(model, held_out)
            crosslayer.connect(crosslayer.disconnect(bare), arm)
            optimizer = carried(optimizer, bare, settings)
            rates = [group["lr"] for group in optimizer.param_groups]
            model, optimizer = fabric.setup(bare, optimizer)
            jump = training.evaluate(model, held_out) - before
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * training.schedule(step, settings.steps)
        loss = loss_of(model, fabric.to_device(next(batches)))
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        if (step + 1) % max(1, settings.steps // 20) == 0:
            curve.append([step + 1, training.evaluate(model, held_out)])
    return {
        "arm": arm,
        "switch": switch,
        "seed": seed,
        "jump": jump,
        "valid_loss": curve[-1][1],
        "curve": curve,
        "seconds": time.perf_counter() - start,
        "settings": vars(settings) | {"data": Path(settings.data).name},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "crosslayer": crosslayer.__version__,
    }


def carried(old: torch.optim.Optimizer, model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    """An optimizer of the connected model that remembers what the plain model's knew of its parameters."""
    new = training.optimizer(model, settings)
    new.state.update(old.state)
    return new


def report(out: str, page: str) -> None:
    """Write a page and its picture from the results.

    Args:
        out: folder of the results.
        page: a .md file to write; the picture is an .svg beside it.
    """
    rows = [json.loads(file.read_text()) for file in sorted(Path(out).glob("*.json"))]
    print(rows, page)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, report])
