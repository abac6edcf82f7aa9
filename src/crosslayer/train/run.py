"""One arm, trained: the body, its optimizer, the loop, and what was measured on the way."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..costs import activation_bytes, loss_of, parameters, sized
from ..hf import connect
from ..optim import param_groups
from .data import Corpus, Order, held_out


@dataclass
class Settings:
    """What every arm of a comparison shares.

    Args:
        data: "stdlib", the running interpreter's own library; a text, .jsonl (also .gz) or .parquet file or a folder of
            them; datasets:NAME; or a folder that `crosslayer data prepare` made.
        steps: optimizer steps.
        batch: sequences a step.
        context: bytes a sequence.
        lr: peak learning rate; it warms up over the first tenth and falls on a cosine to a tenth.
        weight_decay: of matrices; connections declare which of their parameters take it.
        family: the body, of transformers: llama, gpt_neox or another that `connect` knows.
        layers: of the body.
        dim: width of the stream.
        heads: of the attention.
        precision: Fabric's, like 32-true or bf16-mixed.
    """

    data: str = "stdlib"
    steps: int = 160
    batch: int = 8
    context: int = 256
    lr: float = 3e-3
    weight_decay: float = 0.1
    family: str = "llama"
    layers: int = 6
    dim: int = 128
    heads: int = 4
    precision: str = "32-true"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "layers", "dim", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Progress(NamedTuple):
    step: int
    loss: float
    tokens_per_second: float


class Diverged(Exception):
    """The loss is no longer a number."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"the loss is {loss} at step {step}")
        self.step, self.loss = step, loss


Watch = Callable[[Progress], None]


def build(settings: Settings, arm: str, seed: int) -> PreTrainedModel:
    """The body with its connections; the body's weights depend on the seed alone."""
    torch.manual_seed(seed)
    config = sized(settings.family, settings.layers, settings.dim, settings.heads, vocab=256)
    config.max_position_embeddings = settings.context
    return connect(AutoModelForCausalLM.from_config(config), arm)


def optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW on the model's parameter groups."""
    groups = param_groups(model, settings.lr, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def schedule(step: int, steps: int) -> float:
    """Warm up over the first tenth, then a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Tensor]) -> float:
    """Mean loss a token, in nats."""
    model.eval()
    total = sum(loss_of(model, batch).item() * len(batch) for batch in batches)
    model.train()
    return total / sum(len(batch) for batch in batches)


def training_batches(data: Corpus, seed: int, batch: int) -> Iterator[Tensor]:
    """Endless [batch, context + 1] windows; the same for one seed, whoever asks."""
    return iter(DataLoader(data.train, batch, sampler=Order(len(data.train), seed, batch)))


def judges(data: Corpus, batch: int) -> list[Tensor]:
    """Up to twelve batches of windows spread evenly over the first validation set."""
    return list(DataLoader(held_out(next(iter(data.valid.values())), 12 * batch), batch))


def train(settings: Settings, arm: str, seed: int, data: Corpus, watch: Watch) -> dict[str, Any]:
    """Train one arm from one seed and return its row: sizes, curve, losses, speed and memory."""
    fabric = Fabric(accelerator="auto", devices=1, precision=settings.precision)
    model = build(settings, arm, seed)
    total, extra = parameters(model)
    model, adamw = fabric.setup(model, optimizer(model, settings))
    scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: schedule(step, settings.steps))
    judged = [fabric.to_device(batch) for batch in judges(data, settings.batch)]
    batches = training_batches(data, seed, settings.batch)
    memory = activation_bytes(model, fabric.to_device(next(training_batches(data, seed, settings.batch))))

    tokens, seconds, curve = settings.batch * settings.context, [], []
    marks = {round(settings.steps * i / 6) for i in range(1, 7)}
    model.train()
    for step in range(1, settings.steps + 1):
        start = time.perf_counter()
        loss = loss_of(model, fabric.to_device(next(batches)))
        adamw.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, adamw, max_norm=1.0, error_if_nonfinite=False)
        adamw.step()
        scheduler.step()
        value = loss.item()  # waits for the device, so that the step is timed whole
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(value):
            raise Diverged(step, value)
        # the first steps warm caches up
        speed = tokens / statistics.median(seconds[min(3, len(seconds) - 1) :])
        if step in marks:
            curve.append([step, evaluate(model, judged)])
        watch(Progress(step, value, speed))
    return {
        "arm": arm,
        "seed": seed,
        "parameters": total,
        "extra_parameters": extra,
        "valid_loss": curve[-1][1],
        "bits_per_byte": curve[-1][1] / math.log(2),
        "tokens_per_second": speed,
        "activation_bytes": memory,
        "train_loss": value,
        "curve": curve,
        "seconds": sum(seconds),
    }
