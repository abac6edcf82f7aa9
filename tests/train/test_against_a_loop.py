"""The trainer against a training loop that shares nothing with it but the model and the data."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from crosslayer.train.recipe import Arm
from crosslayer.train.run import train_arm
from crosslayer.train.settings import Settings
from crosslayer.train.task import LANGUAGE_TASK, build_model
from tests.data.test_sampler import endless_order

STEPS, BATCH, PARTS, SEED = 9, 4, 2, 5
LR, MUON_LR, FLOOR, WARMUP, DECAY, CLIP = 0.02, 0.01, 0.2, 3, 0.3, 1.0
BETAS, EPS, MOMENTUM = (0.8, 0.9), 1e-3, 0.6
CONNECTION_SCALE, EMBEDDING_SCALE = 0.3, 3.0
OPTIONS = {
    "family": "llama", "layers": 2, "dim": 24, "heads": 2, "vocab": 256, "context": 31,
    "steps": STEPS, "batch": BATCH, "accumulate": PARTS, "lr": LR, "muon_lr": MUON_LR,
    "connection_lr_scale": CONNECTION_SCALE, "embedding_lr_scale": EMBEDDING_SCALE,
    "weight_decay": DECAY, "betas": BETAS, "eps": EPS, "momentum": MOMENTUM, "clip": CLIP,
    "warmup": WARMUP, "decay": "linear", "floor": FLOOR, "evals": 1, "log_every": 1,
}  # fmt: skip


def share_of_peak(step):
    """Of the learning rate in a step, from 1."""
    if step <= WARMUP:
        return step / WARMUP
    return 1 - (1 - FLOOR) * (step - 1 - WARMUP) / (STEPS - WARMUP)


def rate_and_decay(name):
    """Of AdamW, by the name of a parameter of a Llama with hyper-connections."""
    if "connections." in name:
        is_matrix = name.endswith(("dynamic_alpha_fn", "dynamic_beta_fn"))
        return LR * CONNECTION_SCALE, DECAY if is_matrix else 0.0
    if "embed_tokens" in name:
        return LR * EMBEDDING_SCALE, DECAY / EMBEDDING_SCALE
    return LR, 0.0 if "norm" in name else DECAY


def batches(windows):
    order = endless_order(len(windows), SEED, STEPS * BATCH)
    for start in range(0, len(order), BATCH):
        yield torch.stack([windows[place] for place in order[start : start + BATCH]])


def train_in_a_loop(model, windows, uses_muon):
    parameters = dict(model.named_parameters())
    by_muon = [n for n, p in parameters.items() if "_proj" in n and uses_muon]
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in parameters.items()}
    muon = torch.optim.Muon(
        [parameters[n] for n in by_muon] or [torch.nn.Parameter(torch.zeros(1, 1))],
        weight_decay=DECAY,
        momentum=MOMENTUM,
    )
    rows = []
    model.train()
    for step, batch in enumerate(batches(windows), 1):
        mean_loss = 0.0
        gradients = [torch.zeros_like(p) for p in parameters.values()]
        for part in batch.chunk(PARTS):
            logits = model(part[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / PARTS
            mean_loss += loss.item()
            for total, g in zip(
                gradients, torch.autograd.grad(loss, list(parameters.values())), strict=True
            ):
                total += g
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        rows.append((mean_loss, norm, LR * share_of_peak(step)))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                g = g * min(1.0, CLIP / (norm + 1e-6))
                if name in by_muon:
                    p.grad = g
                    continue
                rate, decay = rate_and_decay(name)
                rate *= share_of_peak(step)
                first, second = moments[name]
                first.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
                second.mul_(BETAS[1]).add_(g.square(), alpha=1 - BETAS[1])
                mean = first / (1 - BETAS[0] ** step)
                size = (second / (1 - BETAS[1] ** step)).sqrt()
                p.mul_(1 - rate * decay).sub_(rate * mean / (size + EPS))
            muon.param_groups[0]["lr"] = MUON_LR * share_of_peak(step)
            muon.step()
    return rows


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_is_what_a_plain_loop_computes(text, tmp_path, monkeypatch, optimizer):
    # torch's Muon orthogonalises in bfloat16, where the last bit of a gradient decides a rounding.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    settings = Settings.from_options(data=text, optimizer=optimizer, **OPTIONS)
    examples = LANGUAGE_TASK.load_examples(settings.data, settings.model.model_config)
    arm = Arm.from_row("hyper")
    trained = train_arm(settings, arm, SEED, examples, folder=tmp_path / "run").model
    model = build_model(settings, "hyper", examples.num_classes, SEED)
    rows = train_in_a_loop(model, examples.train, optimizer == "muon")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    steps = [line for line in logged if "lr" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["epoch"] for line in steps] == pytest.approx(
        [step * BATCH / len(examples.train) for step in range(1, STEPS + 1)], rel=1e-3
    )
    found = torch.tensor([[line[k] for k in ("loss", "grad_norm", "lr")] for line in steps])
    norms = [norm for _, norm, _ in rows]
    assert min(norms) < CLIP < max(norms), "some steps are clipped"
    torch.testing.assert_close(found, torch.tensor(rows), rtol=1e-3, atol=1e-6)
    state = trained.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=2e-5)
