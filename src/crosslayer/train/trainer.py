"""The training loop: one model, on one process or on many, from the start or from a checkpoint.

    fabric = launch_fabric(settings.engine)
    model = build_model(settings, "mudd", examples.num_classes, seed=0)
    trainer = Trainer(fabric, model, examples, settings, Arm.from_row("mudd"), seed=0)
    trainer.fit([LogMetrics(folder), LogDiagnostics(folder, every=100)])
    trainer.result().valid_loss

Saving, logging, diagnostics and progress bars are callbacks (callbacks.py). A step depends on its
number and on the seed alone: its examples, its learning rates and, on each rank, its dropout. A
resumed run is therefore bitwise identical to one that was never interrupted.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ..cost.estimate import count_parameters
from ..data.sampler import evenly_spaced, evenly_spaced_steps
from ..optim import zero_connection_updates
from ..spec import make
from .comparison_results import describe_environment
from .evaluation import EvaluationStopped, evaluate_examples, summarise_metrics
from .identity import run_identity
from .method_code import code_digest
from .optimizers import build_optimizers, lr_schedule, set_learning_rates
from .parallel import let_ddp_skip_parameters, prepare_model
from .profiling import measure_forward, model_flops_utilization, peak_memory, reset_peak_memory
from .recipe import Arm
from .run_state import RECENT_STEPS, RunResult, RunState, StepResult
from .settings import EXECUTION_OPTIONS, Settings
from .signals import StopSignals
from .step_timer import StepTimer
from .task import LANGUAGE_TASK, Batch, Examples, TrainingTask
from .weight_averages import averaged_weights


class RunDiverged(Exception):
    """A loss is non-finite, or the training loss rises too far or has a non-finite gradient.

    Args:
        arm: its name.
        step: at which it happened.
        loss: that of training or of a validation set.
        problem: what is wrong, in words.
        checkpoint: the last one.
    """

    def __init__(self, arm: str, step: int, loss: float, problem: str, checkpoint: Path | None):
        saved = f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        super().__init__(f"{arm}: {problem} at step {step}; {saved}")
        self.step = step
        self.loss = loss
        self.problem = problem


class RunStopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended the run after a complete step."""

    def __init__(self, step: int, checkpoint: Path | None):
        saved = f"; saved as {checkpoint}" if checkpoint else ""
        super().__init__(f"Stopped after step {step}{saved}")


class Callback:
    """What happens between steps. Its methods are called on every rank."""

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Called once, before the first step."""

    def on_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Called after every step, and after its evaluation if it had one."""

    def on_interruption(self, trainer: "Trainer") -> None:
        """Called instead of `on_step` where the run stops before the end of an evaluation."""


class Trainer:
    """Trains one model.

    Args:
        fabric: launched; see `launch_fabric`.
        model: connected, and not yet set up by Fabric.
        examples: training and validation sets.
        settings: all options of the run.
        arm: its name and connection, for messages and results.
        seed: of the order of the examples and of dropout.
        task: loss and evaluation.

    Raises:
        ValueError: the ranks and micro-batches cannot share the batch equally, or the options of
            the optimizer do not fit the model.

    Attributes:
        model: the module that owns the parameters.
        module: the same, compiled, sharded and wrapped by Fabric: the one to call.
        optimizers: torch's own, without Fabric's wrapper.
        state: `RunState`.
        stop_requested: whether a rank was asked to stop (Ctrl-C, SIGTERM).
        last_batch: this rank's last micro-batch.
        latest_checkpoint: set by `SaveCheckpoints`, for messages.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module,
        examples: Examples,
        settings: Settings,
        arm: Arm,
        seed: int = 0,
        task: TrainingTask = LANGUAGE_TASK,
    ):
        self.fabric = fabric
        self.examples = examples
        self.settings = settings
        self.arm = arm
        self.seed = seed
        self.task = task
        self.state = RunState()
        self.stop_requested = False
        self.latest_checkpoint: Path | None = None
        self.activation_bytes = self.forward_flops = 0  # of a micro-batch; `fit` measures them

        data = settings.data
        optimization = settings.optimization
        engine = settings.engine
        self._eval_steps = evenly_spaced_steps(optimization.steps, engine.evals)
        self._eval_indices = {
            name: evenly_spaced(len(dataset), data.batch * data.eval_batches)
            for name, dataset in examples.valid.items()
        }
        self._batches: Iterator[Batch] | None = None
        self.last_batch: Batch = None
        self._signals = StopSignals()
        self.optimizers: list[torch.optim.Optimizer] = []
        self._micro_batch = settings.micro_batch(fabric.world_size)
        self.set_model(model)

    def set_model(self, model: nn.Module) -> None:
        """Train `model` from here on.

        Parameters that it shares with the model before keep their optimizer states.
        """
        self.model = model
        self.parameters, self.extra_parameters = count_parameters(model)
        prepared = prepare_model(model, self.settings.engine)
        if isinstance(self.fabric.strategy, DDPStrategy):
            with torch.compiler.set_stance("force_eager"), self.fabric.autocast():
                batch = next(self.training_batches(0))
                loss = self.task.loss(self.fabric.to_device(prepared), batch)
            let_ddp_skip_parameters(self.fabric, model, loss)
        self.module = self.fabric.setup_module(prepared)
        compiles = self.settings.engine.compile != "none"
        self._timer = StepTimer(compiles)
        self._next_evaluation_compiles = compiles
        previous = self.optimizers
        self.optimizers = build_optimizers(model, self.settings.optimization)
        states = {p: state for optimizer in previous for p, state in optimizer.state.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                optimizer.state.update({p: states[p] for p in group["params"] if p in states})
        wrapped = self.fabric.setup_optimizers(*self.optimizers)
        self._fabric_optimizers = list(wrapped) if isinstance(wrapped, tuple) else [wrapped]

    def fit(self, callbacks: Iterable[Callback] = ()) -> None:
        """Train until the last step.

        Args:
            callbacks: called in this order at the start and after every step.

        Raises:
            RunDiverged: as in `step` and `evaluate`.
            RunStopped: Ctrl-C or SIGTERM, or the death of torchrun's agent.
        """
        reset_peak_memory()
        callbacks = list(callbacks)
        for callback in callbacks:
            callback.on_fit_start(self)
        self._compare_method_code()
        self.module.train()  # first: a loaded model is in evaluation mode, where less is kept
        self.measure_costs()
        if self.settings.model.pretrained is not None and not self.state.curve:
            self.state.curve.append([self.state.step, self.evaluate()])  # before training

        with self._signals:
            while self.state.unevaluated or self.state.step < self.settings.optimization.steps:
                result = self._take_unevaluated() or self.step()

                if result.step in self._eval_steps:
                    try:
                        result.evaluation = self.evaluate(self._is_asked_to_stop)
                    except EvaluationStopped:
                        # The step is complete, but its evaluation is not: it is made on resuming.
                        self.state.unevaluated = asdict(result)
                        for callback in callbacks:
                            callback.on_interruption(self)
                        raise RunStopped(result.step, self.latest_checkpoint) from None
                    self.state.curve.append([result.step, result.evaluation])

                for callback in callbacks:
                    callback.on_step(self, result)

                # The step is complete and, if a callback saves checkpoints, saved.
                if self.stop_requested:
                    raise RunStopped(result.step, self.latest_checkpoint)

    def _take_unevaluated(self) -> StepResult | None:
        """The result of the last step before the run was stopped, if its evaluation is missing."""
        if self.state.unevaluated is None:
            return None
        result = StepResult(**self.state.unevaluated)
        self.state.unevaluated = None
        # What a callback may look at is as after that step.
        self._batches = self.training_batches(result.step - 1)
        for _ in range(self.settings.engine.accumulate):
            self.last_batch = next(self._batches)
        return result

    def measure_costs(self) -> None:
        """Measure the activations and the FLOPs of the model's forward pass."""
        self.activation_bytes, self.forward_flops = measure_forward(
            self.module, self.task, self.training_batches(0)
        )

    def _compare_method_code(self) -> None:
        """Warn if the code of the connection has changed since the run began."""
        today = code_digest(make(self.arm.connection).method)
        if self.state.method_code not in ("", today) and self.fabric.is_global_zero:
            warnings.warn(
                f"{self.arm.name}: the code of {self.arm.connection} has changed since this run "
                "began; another output folder starts it again",
                stacklevel=3,
            )
        if self.state.step == 0:
            self.state.method_code = today

    def step(self) -> StepResult:
        """Take one step on the next batch.

        Raises:
            RunDiverged: the loss or its gradient is non-finite, or the loss rose too far; and
                `unstable` is "stop", or most of the recent steps were skipped.
        """
        optimization = self.settings.optimization
        engine = self.settings.engine
        start = time.perf_counter()
        step = self.state.step + 1

        if self._batches is None:
            self._batches = self.training_batches(self.state.step)

        # Nothing but the step's number, the seed and the rank decides what follows.
        entropy = np.random.SeedSequence([self.seed, step, self.fabric.global_rank])
        torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))  # of dropout
        set_learning_rates(self.optimizers, step - 1, optimization)

        # Gradients of this rank's share of the batch.
        rank_loss = self._backward(self._batches)
        if step <= optimization.delay:
            for optimizer in self.optimizers:
                zero_connection_updates(optimizer)
        grad_norm = _clip_grad_norm(self.model, optimization.clip)

        # Update. Every rank has the same mean loss here, so all of them update, skip or stop.
        loss, self.stop_requested = self._all_reduce_loss_and_stop(rank_loss)
        if self.state.accept_loss(loss, grad_norm, engine.max_loss_rise):
            for optimizer in self._fabric_optimizers:
                optimizer.step()
        else:
            self._skip_or_raise(step, loss, grad_norm)
        for optimizer in self._fabric_optimizers:
            optimizer.zero_grad()

        self.state.seconds += self._timer.record(time.perf_counter() - start)
        step_seconds = self._timer.median()
        # A resumed run has the speed of its checkpoint until the process is warm.
        if self._timer.is_warm or self.state.step < self._timer.steps:
            micro_batches = self.fabric.world_size * engine.accumulate
            units = self.task.count_units(self.last_batch) * micro_batches
            self.state.tokens_per_second = units / step_seconds
        self.state.step = step
        self.state.train_loss = loss
        return StepResult(
            step=step,
            loss=loss,
            lr=optimization.lr * lr_schedule(step - 1, optimization),
            grad_norm=grad_norm,
            tokens_per_second=self.state.tokens_per_second,
            mfu=model_flops_utilization(self.forward_flops * engine.accumulate, step_seconds),
            memory=peak_memory(),
            seconds=self.state.seconds,
            seconds_left=self._timer.mean() * (optimization.steps - step),
            epoch=self.examples.epochs(step, self.settings.data.batch),
        )

    def _skip_or_raise(self, step: int, loss: float, grad_norm: float) -> None:
        """Skip the batch of an unstable step.

        Raises:
            RunDiverged: `unstable` is "stop", or most of the recent steps were skipped.
        """
        limit = self.settings.engine.max_loss_rise
        problem = f"the loss is {loss:.4g}"
        if math.isfinite(loss) and not math.isfinite(grad_norm):
            problem += f" and the norm of its gradient {grad_norm:.4g}"
        elif math.isfinite(loss) and self.state.running_loss is not None:
            rise = loss - self.state.running_loss
            problem += f", {rise:.4g} above its running mean (max_loss_rise={limit:g}),"
        if self.settings.engine.unstable == "stop":
            raise RunDiverged(self.arm.name, step, loss, problem, self.latest_checkpoint)

        self.state.skipped.append(step)
        window = min(RECENT_STEPS, self.settings.optimization.steps)
        count = sum(skipped > step - window for skipped in self.state.skipped[-window:])
        if 2 * count > window:
            problem = f"{count} of {window} steps were skipped and {problem}"
            raise RunDiverged(self.arm.name, step, loss, problem, self.latest_checkpoint)

    def evaluate(
        self, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, dict[str, float]]:
        """Metrics of each validation set: means over examples, whatever the number of ranks.

        With `ema` they are those of the averaged weights.

        Args:
            should_stop: asked before each batch; the same answer on every rank.

        Raises:
            RunDiverged: the loss of a validation set is non-finite.
            EvaluationStopped: `should_stop` said so.
        """
        evaluation = {}
        with averaged_weights(self.model, self.optimizers):
            start = time.perf_counter()
            for name, dataset in self.examples.valid.items():
                evaluation[name] = evaluate_examples(
                    self.fabric,
                    self.module,
                    self.task,
                    dataset,
                    self._eval_indices[name],
                    self._micro_batch,  # as many at once as a training step has in memory
                    should_stop,
                )
            speed = sum(map(len, self._eval_indices.values())) / (time.perf_counter() - start)
            # Keep the fastest, as other work may delay the others.
            if not self._next_evaluation_compiles:
                self.state.inference_speed = max(self.state.inference_speed, speed)
            self._next_evaluation_compiles = False
        for name, metrics in evaluation.items():
            loss = metrics["loss"]
            if not math.isfinite(loss):
                problem = f"the loss on the validation set {name} is {loss:.4g}"
                step = self.state.step
                raise RunDiverged(self.arm.name, step, loss, problem, self.latest_checkpoint)
        return evaluation

    def result(self) -> RunResult:
        """Sizes, losses and speed of the run, with the last evaluation's metrics."""
        if not self.state.curve:
            self.state.curve.append([self.state.step, self.evaluate()])
        last = self.state.curve[-1][1]
        # A run that has ended may be given its sets in another order.
        evaluation = {name: last[name] for name in self.examples.valid}
        first = next(iter(evaluation))
        metrics = summarise_metrics(self.examples, evaluation)
        environment = describe_environment()
        first_step, before = self.state.curve[0]
        if first_step == 0:
            metrics["loss before training"] = before[first]["loss"]
        if self.state.recent_losses:  # a checkpoint of version 0.1.0 has none
            metrics["training loss"] = statistics.fmean(self.state.recent_losses)
        return RunResult(
            arm=self.arm.name,
            connection=self.arm.connection,
            seed=self.seed,
            parameters=self.parameters,
            extra_parameters=self.extra_parameters,
            valid_loss=evaluation[first]["loss"],
            valid=evaluation,
            metrics=metrics,
            tokens_per_second=self.state.tokens_per_second,
            activation_bytes=self.activation_bytes,
            train_loss=self.state.train_loss,
            curve=[[step, valid[first]["loss"]] for step, valid in self.state.curve],
            skipped=self.state.skipped,
            seconds=self.state.seconds,
            inference_speed=self.state.inference_speed or None,
            method_code=self.state.method_code,
            execution={
                **{name: getattr(self.settings.engine, name) for name in EXECUTION_OPTIONS},
                "processes": self.fabric.world_size,
                "device": environment["device"],
                "operations": environment["operations"],
            },
        )

    def identity(self) -> dict[str, Any]:
        """What decides the run's losses: with any other value it would be another run."""
        return run_identity(self.settings, self.arm.connection, self.seed, self.examples.digest)

    def training_batches(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches, endless, from the first one after step `step`."""
        data = self.settings.data
        ranks = self.fabric.world_size
        sampler = self.examples.sampler(
            len(self.examples.train), self.seed, data.batch, self.fabric.global_rank, ranks, step
        )
        loader = DataLoader(
            self.examples.train, self._micro_batch, sampler=sampler, num_workers=data.workers
        )
        return (self.fabric.to_device(batch) for batch in loader)

    def _backward(self, batches: Iterator[Batch]) -> Tensor:
        """Accumulate the gradients of a step; this rank's mean loss []."""
        accumulate = self.settings.engine.accumulate
        loss = torch.zeros((), device=self.fabric.device)
        for number in range(1, accumulate + 1):
            self.last_batch = next(batches)
            # ranks exchange gradients once, in the last backward pass
            with self.fabric.no_backward_sync(self.module, enabled=number < accumulate):
                micro_loss = self.task.loss(self.module, self.last_batch) / accumulate
                self.fabric.backward(micro_loss)
            loss += micro_loss.detach()
        return loss

    def _is_asked_to_stop(self) -> bool:
        """Whether any rank was asked to stop."""
        _, is_asked = self._all_reduce_loss_and_stop(torch.zeros((), device=self.fabric.device))
        return is_asked

    def _all_reduce_loss_and_stop(self, loss: Tensor) -> tuple[float, bool]:
        """The mean loss of all ranks, and whether any of them was asked to stop."""
        stop = torch.tensor(float(self._signals.ask_to_stop), device=loss.device)
        means: Any = self.fabric.all_reduce(torch.stack([loss, stop]))
        mean_loss, stop_share = means.tolist()
        return mean_loss, stop_share > 0


def _clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Clip the gradient to `max_norm` (0: no clipping); its norm over all ranks before that."""
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm.item()
