"""One arm, trained: the loop that `compare` and `train` share, on one process or many, from any checkpoint.

What a step does depends on its number and the seed alone (its examples, its rates, its dropout), so a run that was
stopped or killed goes on bit by bit as if it had not been.
"""

import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..costs import GPUS, activation_bytes, counter, parameters
from .checkpoint import Checkpoints
from .data import Order
from .journal import Journal, loggers
from .optimizers import optimizers, set_rates
from .parallel import launch, setup
from .recipe import Arm
from .settings import Settings
from .tasks import Task, build, task
from .watch import measures


class Progress(NamedTuple):
    step: int
    loss: float
    tokens_per_second: float
    mfu: float | None  # share of the GPU's peak that the model's FLOPs take
    memory: int  # bytes, at the most so far
    seconds_left: float


class Diverged(Exception):
    """The loss is no longer a number, or has jumped."""

    def __init__(self, arm: str, step: int, loss: float, checkpoint: Path | None):
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        super().__init__(f"{arm}: the loss is {loss:.4g} at step {step}; {kept}")
        self.step, self.loss = step, loss


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, once the run has been saved."""

    def __init__(self, step: int, checkpoint: Path | None):
        super().__init__(f"stopped after step {step}" + (f"; saved as {checkpoint}" if checkpoint else ""))
        self.step, self.checkpoint = step, checkpoint


Watch = Callable[[Progress], None]


def train(
    settings: Settings, arm: Arm, seed: int, corpus: Any, watch: Watch, folder: Path | None = None
) -> tuple[dict[str, Any], nn.Module, Fabric]:
    """Train one arm from one seed.

    Args:
        settings: the arm's.
        arm: its name and connection.
        seed: of the body's weights, the order of the examples, and dropout.
        corpus: the examples.
        watch: told of every step.
        folder: of checkpoints and metrics.jsonl, from which a run goes on; None for neither.

    Returns:
        The row of results (sizes, curve, losses, speed and memory), the model, and Fabric, which knows its shards.

    Raises:
        Diverged: the loss is no number, or spikes.
        Stopped: Ctrl-C or SIGTERM; the run is saved.
        ValueError: the folder's checkpoint is another run's or damaged.
    """
    model_settings, data, optimization, engine = settings
    fabric = launch(engine, loggers(engine.loggers, folder or Path(), arm.name))
    job = task(model_settings)
    bare = build(settings, arm.connection, corpus.classes, seed)
    total, extra = parameters(bare)
    model = setup(fabric, bare, engine)
    found = fabric.setup_optimizers(*optimizers(bare, optimization))
    opts = list(found) if isinstance(found, tuple) else [found]

    identity = {**settings.identity(), "connection": arm.connection, "seed": seed, "data sha256": corpus.digest}
    checkpoints = Checkpoints(fabric, folder, identity, engine.keep) if folder else None
    facts = (checkpoints and checkpoints.load(bare, [o.optimizer for o in opts])) or {}
    first, curve = facts.get("step", 0), facts.get("curve", [])
    mean, skipped, seconds_before = facts.get("mean"), facts.get("skipped", []), facts.get("seconds", 0.0)
    journal = Journal(fabric, folder, first)

    judged = {name: evenly(len(part), data.batch * data.held_out) for name, part in corpus.valid.items()}
    batches = examples(fabric, corpus.train, settings, seed, first)
    memory, flops = weigh(fabric, model, job, examples(fabric, corpus.train, settings, seed, 0))
    marks = {round(optimization.steps * i / engine.evals) for i in range(1, engine.evals + 1)}
    durations: list[float] = []
    speed, value = 0.0, facts.get("train_loss", math.nan)
    model.train()

    def save(step: int) -> None:
        if checkpoints:
            kept = {"curve": curve, "mean": mean, "skipped": skipped, "train_loss": value}
            seconds = seconds_before + sum(durations)
            checkpoints.save(step, bare, [o.optimizer for o in opts], {**kept, "seconds": seconds})

    with Signals() as signals:
        for step in range(first + 1, optimization.steps + 1):
            start = time.perf_counter()
            torch.manual_seed(hash((seed, step, fabric.global_rank)) % 2**63)
            set_rates(opts, step - 1, optimization)
            loss, tokens = torch.zeros((), device=fabric.device), 0
            for part in range(engine.accumulate):
                batch = next(batches)
                with fabric.no_backward_sync(model, enabled=part < engine.accumulate - 1):
                    share = job.loss(model, batch) / engine.accumulate
                    fabric.backward(share)
                loss, tokens = loss + share.detach(), tokens + job.size(batch)[1]
            norm = nn.utils.clip_grad_norm_(bare.parameters(), optimization.clip or math.inf)
            norm = getattr(norm, "full_tensor", lambda norm=norm: norm)()
            asked = torch.tensor(float(signals.asked is not None), device=fabric.device)
            value, stopping = fabric.all_reduce(torch.stack([loss.float(), asked])).tolist()

            spikes = engine.spike and mean is not None and step > 20 and value > mean + engine.spike
            if not math.isfinite(value) or not torch.isfinite(norm) or spikes:
                if engine.unstable == "stop":
                    raise Diverged(arm.name, step, value, checkpoints and checkpoints.newest())
                skipped.append(step)
            else:
                for optimizer in opts:
                    optimizer.step()
                mean = value if mean is None else 0.95 * mean + 0.05 * value
            for optimizer in opts:
                optimizer.zero_grad()

            durations.append(time.perf_counter() - start)
            # the first steps warm caches up
            usual = statistics.median(durations[min(3, len(durations) - 1) :][-200:])
            speed = tokens * fabric.world_size / usual
            now = Progress(
                step, value, speed, share_of_peak(flops * engine.accumulate, usual), peak_memory(),
                usual * (optimization.steps - step),
            )  # fmt: skip
            if step % engine.log_every == 0:
                journal.log(step, {**now._asdict(), "lr": opts[-1].param_groups[0]["lr"], "grad_norm": norm.item()})
            if engine.watch_every and step % engine.watch_every == 0:
                journal.log(step, measures(bare, lambda batch=batch: job.loss(model, batch)))
            if step in marks:
                valid = {name: judge(fabric, model, job, corpus.valid[name], judged[name], data.batch) for name in judged}
                curve.append([step, valid])
                journal.log(step, {f"{name} {key}": v for name, values in valid.items() for key, v in values.items()})
            watch(now)
            if stopping or (engine.save_every and step % engine.save_every == 0) or step == optimization.steps:
                save(step)
            if stopping:
                raise Stopped(step, checkpoints and checkpoints.newest())

    last = curve[-1][1]
    lead = next(iter(last))
    row = {
        "arm": arm.name,
        "connection": arm.connection,
        "seed": seed,
        "parameters": total,
        "extra_parameters": extra,
        "valid_loss": last[lead]["loss"],
        "valid": last,
        "bits_per_byte": corpus.bits_per_byte(lead, last[lead]["loss"]),
        "tokens_per_second": speed,
        "activation_bytes": memory,
        "train_loss": value,
        "curve": [[step, valid[lead]["loss"]] for step, valid in curve],
        "skipped": skipped,
        "seconds": seconds_before + sum(durations),
    }
    return row, bare, fabric


def examples(fabric: Fabric, part: Any, settings: Settings, seed: int, step: int) -> Iterator[Any]:
    """This rank's micro-batches, endless, from those of the step after `step`."""
    batch, ways = settings.data.batch, fabric.world_size * settings.engine.accumulate
    if batch % ways:
        raise ValueError(f"batch must be a multiple of ranks × accumulate, got {batch} for {ways}")
    order = Order(len(part), seed, batch, fabric.global_rank, fabric.world_size, step)
    loader = DataLoader(part, batch // ways, sampler=order, num_workers=settings.data.workers)
    return (fabric.to_device(micro) for micro in loader)


def evenly(length: int, most: int) -> list[int]:
    """At most so many indices, spread evenly over so many examples."""
    count = min(length, most)
    return [index * (length // count) for index in range(count)]


@torch.no_grad()
def judge(fabric: Fabric, model: nn.Module, job: Task, part: Any, chosen: list[int], batch: int) -> dict[str, float]:
    """Means over examples, whose batches the ranks share, each padded to the same number with examples of no weight."""
    model.eval()
    each = -(-batch // fabric.world_size)
    mine = chosen[fabric.global_rank :: fabric.world_size]
    rounds = -(-len(chosen) // (each * fabric.world_size))
    mine += [-1] * (rounds * each - len(mine))
    sums: dict[str, Tensor] = {}
    for start in range(0, len(mine), each):
        indices = mine[start : start + each]
        examples = [part[max(index, 0)] for index in indices]
        values = job.judge(model, fabric.to_device(torch.utils.data.default_collate(examples)))
        weight = torch.tensor([index >= 0 for index in indices], device=fabric.device)
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + (value.double() * weight).sum()
    model.train()
    return {name: fabric.all_reduce(total, reduce_op="sum").item() / len(chosen) for name, total in sums.items()}


def weigh(fabric: Fabric, model: nn.Module, job: Task, batches: Iterator[Any]) -> tuple[int, int]:
    """Bytes that a micro-batch's forward pass keeps for the backward, and its FLOPs."""
    batch = next(batches)
    with counter() as count, torch.compiler.set_stance("force_eager"), torch.random.fork_rng():
        kept = activation_bytes(model, batch, job.loss)
    return kept, count.get_total_flops()


def share_of_peak(flops: int, seconds: float) -> float | None:
    """Of a GPU in the table: forward and backward compute three times what the forward does."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((gpu.flops for key, gpu in GPUS.items() if key in name), None)
    return 3 * flops / seconds / peak if peak else None


def peak_memory() -> int:
    """Bytes: of the GPU, or of the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Signals:
    """SIGTERM and Ctrl-C ask a run to end with its step; a second Ctrl-C ends it at once."""

    asked: int | None = None

    def __enter__(self) -> "Signals":
        self.before = {}
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self.hear)
        except ValueError:  # not the main thread, where nothing is heard
            pass
        return self

    def hear(self, number: int, frame: Any) -> None:
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
