"""The numbers of a run: of one step, of all steps so far, and of a finished run."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Self, get_type_hints

from ..validation import check_option_type

_STEPS_OF_ANY_RISE = 20  # the first ones, which have no limit of a loss's rise
_RUNNING_LOSS_DECAY = 0.95  # of the running mean, from one step to the next
RECENT_STEPS = 200  # whose mean training loss is a result, and most of which must be stable


@dataclass
class StepResult:
    """One training step.

    Args:
        step: its number, from 1.
        loss: of the batch, the mean over all ranks.
        lr: AdamW's learning rate.
        grad_norm: norm of the gradient before clipping.
        tokens_per_second: (or images, …) over all ranks, from the median time of the last steps.
        mfu: model FLOPs utilization, the share of the GPU's peak; None where the peak is unknown.
        memory: the run's peak so far on a GPU, else the process's, in bytes.
        seconds: of training so far, without evaluation. Where the model is compiled, each of a
            process's first steps counts as much as the step after them, once that has been made.
        seconds_left: until the last step, by the mean time of the last steps, without evaluation
            and, as soon as a step has been made without it, without compilation.
        epoch: passes over the training data so far.
        evaluation: metrics of each validation set, if the step was followed by an evaluation.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float | None
    memory: int
    seconds: float
    seconds_left: float
    epoch: float
    evaluation: dict[str, dict[str, float]] | None = None


@dataclass
class RunState:
    """What a run knows besides weights and optimizer states. Checkpoints contain it.

    Args:
        step: number of steps taken.
        curve: (step, metrics of each validation set) of every evaluation.
        train_loss: of the last step.
        running_loss: exponential moving average of the training loss.
        recent_losses: of the last `RECENT_STEPS` steps whose batch was not skipped.
        skipped: steps whose batch was skipped.
        seconds: of training, without evaluation and the compilation of a process's first steps.
        tokens_per_second: (or images, …) over all ranks.
        inference_speed: examples per second over all ranks, in the fastest evaluation that did not
            compile; 0 before any.
        unevaluated: the `StepResult` of the last step, where the run was stopped before the end of
            the evaluation that follows it; else None.
        method_code: `code_digest` of the connection when the run began; empty where that was not
            recorded.
    """

    step: int = 0
    curve: list[Any] = field(default_factory=list)
    train_loss: float = math.nan
    running_loss: float | None = None
    recent_losses: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    inference_speed: float = 0.0
    unevaluated: dict[str, Any] | None = None
    method_code: str = ""

    @property
    def reported_step(self) -> int:
        """The last step whose result the callbacks have been given."""
        return self.step if self.unevaluated is None else self.step - 1

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The state in a checkpoint.

        Raises:
            ValueError, KeyError, TypeError: the content has not the fields of this class, or other
                values.
        """
        check_fields(cls, content)
        return cls(**content)

    def accept_loss(self, loss: float, grad_norm: float, max_loss_rise: float) -> bool:
        """Add a step's loss to the running mean and the recent losses, unless it is unstable.

        Args:
            loss: of the step.
            grad_norm: of the step.
            max_loss_rise: how far above the running mean a loss is unstable; 0 for no limit. The
                first 20 steps have no limit.

        Returns:
            False where the loss or the gradient is not finite, or the loss rose too far.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return False
        mean = loss if self.running_loss is None else self.running_loss
        is_limited = max_loss_rise > 0 and self.step >= _STEPS_OF_ANY_RISE
        if is_limited and loss > mean + max_loss_rise:
            return False
        self.running_loss = _RUNNING_LOSS_DECAY * mean + (1 - _RUNNING_LOSS_DECAY) * loss
        self.recent_losses = [*self.recent_losses, loss][-RECENT_STEPS:]
        return True


@dataclass
class RunResult:
    """A finished run: one row of results.json.

    Args:
        arm: name of the arm.
        connection: its spec.
        seed: of the backbone's weights and of the order of the examples.
        parameters: number of parameters.
        extra_parameters: those of the connections.
        valid_loss: loss of the first validation set.
        valid: metrics of each validation set.
        metrics: what follows from them, like "perplexity" and means over sets; "training loss", the
            mean over the last `RECENT_STEPS` steps; and "loss before training", where it was
            evaluated, as of pretrained models.
        tokens_per_second: (or images, …) over all ranks.
        activation_bytes: what one micro-batch's forward pass stores for the backward pass.
        train_loss: of the last step.
        curve: (step, loss of the first validation set) of every evaluation.
        skipped: steps whose batch was skipped.
        seconds: of training, without evaluation and the compilation of a process's first steps.
        inference_speed: examples per second over all ranks, in the fastest evaluation; None in
            older results, and where each evaluation compiled.
        method_code: `code_digest` of the connection when the run began; empty in older results.
        execution: `EXECUTION_OPTIONS` with their values, and the number of "processes", which older
            results lack; empty in still older ones.
    """

    arm: str
    connection: str
    seed: int
    parameters: int
    extra_parameters: int
    valid_loss: float
    valid: dict[str, dict[str, float]]
    metrics: dict[str, float]
    tokens_per_second: float
    activation_bytes: int
    train_loss: float
    curve: list[list[float]]
    skipped: list[int]
    seconds: float
    inference_speed: float | None = None
    method_code: str = ""
    execution: dict[str, Any] = field(default_factory=dict)


def check_sizes(result: dict[str, Any]) -> None:
    """Raise a ValueError for a size or a speed in a result that is not positive."""
    for name in ("parameters", "tokens_per_second"):
        value = result.get(name, 1)  # a run without a result has neither
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


def check_fields(row_class: type, content: dict[str, Any]) -> None:
    """Check that values from a JSON file fit the fields of a class. Numbers need not be finite.

    Raises:
        ValueError: a value does not fit its field.
        KeyError: the class has no such field.
        TypeError: the content is not a mapping.
    """
    kinds = get_type_hints(row_class)
    for name, value in dict(content).items():
        # NaN and Infinity are numbers here, but not to `check_option_type`
        finite = json.loads(json.dumps(value), parse_constant=lambda _: 0.0)
        check_option_type(name, finite, kinds[name])
