"""One arm, trained: the loop that `compare` and `train` share, on one process or many, from any checkpoint.

What a step does depends on its number and the seed alone (its examples, its rates, and on each rank its dropout), so a
run that was stopped or killed goes on bit by bit as if it had not been.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ..cost.estimate import count_parameters
from ..optim import zero_connection_updates
from .checkpoint import Checkpoints
from .diagnostics import connection_diagnostics
from .evaluation import evaluate_examples, evenly_spaced
from .metrics_log import Journal, loggers
from .optimizers import build_optimizers, set_learning_rates
from .parallel import launch_fabric, setup_model
from .profiling import measure_forward, model_flops_utilization, peak_memory
from .recipe import Arm
from .settings import Settings
from .signals import Signals
from .task import Examples, Task, build_model, find_task, metrics


class Progress(NamedTuple):
    step: int
    loss: float
    tokens_per_second: float
    mfu: float | None  # share of the GPU's peak that the model's FLOPs take
    memory: int  # bytes, at the most so far
    seconds_left: float


class Diverged(Exception):
    """The loss or its gradient is no longer a number, or the loss has jumped."""

    def __init__(
        self, fabric: Fabric, arm: str, step: int, loss: float, norm: float, checkpoint: Path | None
    ):
        what = f"the loss is {loss:.4g}"
        if math.isfinite(loss) and not math.isfinite(norm):
            what += f" and the norm of its gradient {norm:.4g}"
        kept = (
            f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        )
        super().__init__(f"{arm}: {what} at step {step}; {kept}")
        self.fabric, self.step, self.loss = fabric, step, loss


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, once the run has been saved."""

    def __init__(self, step: int, checkpoint: Path | None):
        super().__init__(
            f"Stopped after step {step}" + (f"; saved as {checkpoint}" if checkpoint else "")
        )


Watch = Callable[[Progress], None]


@dataclass
class Facts:
    """What a run knows beside its weights; a checkpoint has it too."""

    step: int = 0
    curve: list[Any] = field(default_factory=list)  # [step, losses of the validation sets]
    train_loss: float = math.nan
    usual_loss: float | None = None  # a running mean
    skipped: list[int] = field(default_factory=list)  # steps whose batch was
    seconds: float = 0.0
    tokens_per_second: float = 0.0

    def steady(self, loss: float, norm: float, spike: float) -> bool:
        """Whether a step's loss and gradient are those of a run that goes well."""
        known = self.usual_loss if self.usual_loss is not None else loss
        if not (math.isfinite(loss) and math.isfinite(norm)) or (
            spike and self.step > 20 and loss > known + spike
        ):
            return False
        self.usual_loss = 0.95 * known + 0.05 * loss
        return True


def train(
    settings: Settings,
    arm: Arm,
    seed: int,
    corpus: Examples,
    watch: Watch,
    folder: Path | None = None,
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
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    fabric = launch_fabric(engine, loggers(engine.loggers, folder or Path(), arm.name))
    job = find_task(model_settings)
    bare = build_model(settings, arm.connection, corpus.classes, seed)
    total, extra = count_parameters(bare)
    model = setup_model(fabric, bare, engine)
    found = fabric.setup_optimizers(*build_optimizers(bare, optimization))
    opts = list(found) if isinstance(found, tuple) else [found]

    identity = {
        **settings.identity(),
        "connection": arm.connection,
        "seed": seed,
        "data sha256": corpus.digest,
    }
    checkpoints = Checkpoints(fabric, folder, identity, engine.keep) if folder else None
    plain = [optimizer.optimizer for optimizer in opts]  # without Fabric around it
    facts = Facts(**((checkpoints and checkpoints.load(bare, plain)) or {}))
    journal = Journal(fabric, folder, facts.step)
    judged = {
        name: evenly_spaced(len(part), data.batch * data.held_out)
        for name, part in corpus.valid.items()
    }
    marks = {round(optimization.steps * i / engine.evals) for i in range(1, engine.evals + 1)}
    memory, flops = measure_forward(model, job, examples(fabric, corpus, settings, seed, 0))
    batches = examples(fabric, corpus, settings, seed, facts.step)
    durations: list[float] = []
    model.train()

    with Signals() as signals:
        for step in range(facts.step + 1, optimization.steps + 1):
            start = time.perf_counter()
            torch.manual_seed(
                hash((seed, step, fabric.global_rank)) % 2**63
            )  # of dropout; no hash of a text
            set_learning_rates(opts, step - 1, optimization)
            loss, batch = backward(fabric, model, job, batches, engine.accumulate)
            for optimizer in opts if step <= optimization.delay else ():
                zero_connection_updates(optimizer)
            norm = clipped(bare, optimization.clip)
            value, stopping = agreed(fabric, loss, signals)
            if facts.steady(value, norm, engine.spike):
                for optimizer in opts:
                    optimizer.step()
            elif engine.unstable == "stop":
                raise Diverged(fabric, arm.name, step, value, norm, newest(checkpoints))
            else:
                facts.skipped.append(step)
            for optimizer in opts:
                optimizer.zero_grad()

            durations.append(time.perf_counter() - start)
            # the first steps warm caches up
            usual = statistics.median(durations[min(3, len(durations) - 1) :][-200:])
            facts.step, facts.train_loss, facts.seconds = step, value, facts.seconds + durations[-1]
            facts.tokens_per_second = (
                job.size(batch) * fabric.world_size * engine.accumulate / usual
            )
            now = Progress(
                step, value, facts.tokens_per_second, model_flops_utilization(flops * engine.accumulate, usual), peak_memory(),
                usual * (optimization.steps - step),
            )  # fmt: skip
            if step % engine.log_every == 0:
                journal.log(
                    step, {**now._asdict(), "lr": opts[-1].param_groups[0]["lr"], "grad_norm": norm}
                )
            if engine.watch_every and step % engine.watch_every == 0:
                journal.log(step, connection_diagnostics(bare, partial(job.loss, model, batch)))
            if step in marks:
                valid = {
                    n: evaluate_examples(fabric, model, job, part, judged[n], data.batch)
                    for n, part in corpus.valid.items()
                }
                facts.curve.append([step, valid])
                journal.log(
                    step,
                    {
                        f"{name} {key}": v
                        for name, values in valid.items()
                        for key, v in values.items()
                    },
                )
            watch(now)
            due = engine.save_every and step % engine.save_every == 0
            if checkpoints and (due or stopping or step == optimization.steps):
                checkpoints.save(step, bare, plain, vars(facts))
            if stopping:
                raise Stopped(step, newest(checkpoints))

    last = facts.curve[-1][1]
    lead = next(iter(last))
    row = {
        "arm": arm.name,
        "connection": arm.connection,
        "seed": seed,
        "parameters": total,
        "extra_parameters": extra,
        "valid_loss": last[lead]["loss"],
        "valid": last,
        "metrics": metrics(corpus, last),
        "tokens_per_second": facts.tokens_per_second,
        "activation_bytes": memory,
        "train_loss": facts.train_loss,
        "curve": [[step, valid[lead]["loss"]] for step, valid in facts.curve],
        "skipped": facts.skipped,
        "seconds": facts.seconds,
    }
    return row, bare, fabric


def newest(checkpoints: Checkpoints | None) -> Path | None:
    return checkpoints.newest() if checkpoints else None


def backward(
    fabric: Fabric, model: nn.Module, job: Task, batches: Iterator[Any], accumulate: int
) -> tuple[Tensor, Any]:
    """Gradients of one step: this rank's mean loss, and its last micro-batch."""
    loss = torch.zeros((), device=fabric.device)
    for part in range(accumulate):
        batch = next(batches)
        with fabric.no_backward_sync(model, enabled=part < accumulate - 1):
            share = job.loss(model, batch) / accumulate
            fabric.backward(share)
        loss += share.detach()
    return loss, batch


def clipped(model: nn.Module, most: float) -> float:
    """The gradients' norm over all ranks, before they are clipped to `most`."""
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), most or math.inf)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def agreed(fabric: Fabric, loss: Tensor, signals: Signals) -> tuple[float, bool]:
    """The mean loss of all ranks, and whether any of them was asked to stop."""
    asked = torch.tensor(float(signals.asked is not None), device=loss.device)
    both: Any = fabric.all_reduce(torch.stack([loss, asked]))
    value, share = both.tolist()
    return value, share > 0


def examples(
    fabric: Fabric, corpus: Examples, settings: Settings, seed: int, step: int
) -> Iterator[Any]:
    """This rank's micro-batches, endless, from those of the step after `step`."""
    batch, ways = settings.data.batch, fabric.world_size * settings.engine.accumulate
    if batch % ways:
        raise ValueError(f"batch must be a multiple of ranks × accumulate, got {batch} for {ways}")
    order = corpus.order(
        len(corpus.train), seed, batch, fabric.global_rank, fabric.world_size, step
    )
    loader = DataLoader(
        corpus.train, batch // ways, sampler=order, num_workers=settings.data.workers
    )
    return (fabric.to_device(micro) for micro in loader)
