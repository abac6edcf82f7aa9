"""The moving average of the weights: what it is, that it is resumed, that training ignores it."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from crosslayer.fsdp import sharded_modules
from crosslayer.train.parallel import launch_fabric
from crosslayer.train.recipe import Arm
from crosslayer.train.settings import Settings
from crosslayer.train.task import LANGUAGE_TASK, build_model
from crosslayer.train.trainer import Trainer
from crosslayer.train.weight_averages import AVERAGE_KEY, averaged_weights, track_averages
from tests.support.one_rank import one_rank_mesh
from tests.train.runs import SMALL, run
from tests.train.test_ranks import two_ranks

DECAY = 0.7


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_average_equals_a_float64_loop_and_is_evaluated(text, optimizer):
    options = {**SMALL, "data": text, "ema": DECAY, "optimizer": optimizer}
    settings = Settings.from_options(**options)
    examples = LANGUAGE_TASK.load_examples(settings.data, {})
    model = build_model(settings, "mudd", examples.num_classes, 0)
    fabric = launch_fabric(settings.engine)
    trainer = Trainer(fabric, model, examples, settings, Arm.from_row("mudd"))
    expected = {}
    for _ in range(4):
        trainer.step()
        for name, weight in model.named_parameters():
            value = weight.detach().double()
            before = expected.get(name, value)
            expected[name] = DECAY * before + (1 - DECAY) * value

    trained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss_of_weights = LANGUAGE_TASK.loss(model, trainer.last_batch)
    with averaged_weights(model, trainer.optimizers):
        loss_of_averages = LANGUAGE_TASK.loss(model, trainer.last_batch)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight.double(), expected[name], rtol=1e-6, atol=1e-7)
        evaluation = trainer.evaluate()
    assert trainer.evaluate() == evaluation
    assert loss_of_averages > loss_of_weights, "the average lags behind"
    with pytest.raises(KeyboardInterrupt), averaged_weights(model, trainer.optimizers):
        raise KeyboardInterrupt  # by a signal within an evaluation
    states = {p: state for owner in trainer.optimizers for p, state in owner.state.items()}
    for name, weight in model.named_parameters():
        assert torch.equal(weight, trained[name])
        assert AVERAGE_KEY in states[weight]


@pytest.mark.slow
def test_average_is_resumed_bitwise_and_does_not_change_training(text, tmp_path):
    settings = {"data": text, "steps": 6, "save_every": 2, "evals": 3, "ema": DECAY}
    whole = run(settings, "mudd", tmp_path / "whole")
    run(settings, "mudd", tmp_path / "parts", stop=5)
    rest = run(settings, "mudd", tmp_path / "parts")
    assert rest["result"]["curve"] == whole["result"]["curve"]
    plain = run({**settings, "ema": None}, "mudd")
    assert (plain["losses"], plain["weights"]) == (whole["losses"], whole["weights"])
    assert plain["result"]["curve"] != whole["result"]["curve"]


def test_average_that_cannot_be_is_refused(text):
    with pytest.raises(ValueError, match=r"ema must be between 0 and 1, like 0\.9999, got 1\.0"):
        Settings.from_options(ema=1.0)
    with pytest.raises(ValueError, match=r"ema needs float32 weights, got torch\.bfloat16"):
        run({"data": text, "ema": DECAY, "precision": "bf16-true"}, "prenorm")


def test_sharded_averages_are_evaluated_after_a_forward_pass_alone():
    """After which FSDP holds the root's gathered weights, as when a resumed run is measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    with one_rank_mesh() as mesh:
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        track_averages(optimizer, 0.9)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()

        @torch.no_grad()
        def loss():
            return model(x).square().mean().item()

        def evaluate():
            with averaged_weights(model, [optimizer]):
                return loss()

        trained = loss()
        for module in sharded_modules(model):
            module.reshard()
        averaged = evaluate()
        assert loss() == trained != averaged, "what is gathered is no average"
        assert evaluate() == averaged


@pytest.mark.slow
def test_sharded_average_equals_one_process(text, tmp_path):
    settings = {"data": text, "strategy": "fsdp", "evals": 4}
    jobs = [{"settings": {**settings, "ema": ema}, "arm": "mudd"} for ema in (DECAY, None)]
    averaged, plain = two_ranks(jobs, tmp_path)
    assert averaged["weights"] == plain["weights"]
    one = run(jobs[0]["settings"], "mudd")
    assert averaged["result"]["valid_loss"] == pytest.approx(one["result"]["valid_loss"], abs=2e-5)
