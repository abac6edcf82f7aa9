"""What each arm of a study costs beside pre-norm: a training step, a forward pass and decoding.

The models, the batch and the context are the study's. Each arm is measured `MEASUREMENTS` times,
with the other arms between. What the .csv file has is left out, so that a measurement that was
stopped goes on. A row is of the models as they are, or of compiled ones.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.decode import PROMPT_TOKENS, compile_decoding, decoding
from benchmarks.evidence.studies import read_plans
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.step import training_step
from benchmarks.timing import WARMUP_CALLS, Calls, Timer, ratio_or_none, time_interleaved
from crosslayer.train.recipe import Arm, Recipe
from crosslayer.train.task import build_model
from crosslayer.validation import did_you_mean

CALLS = ("step", "forward", "decode")
COLUMNS = (
    *("study", "arm", "connection", "tokens", "dtype", "variant"),
    *(f"{call} ms" for call in CALLS),
    *(f"{call} of PreNorm" for call in CALLS),
    "rounds",
)
TOKENS_PER_CALL = 8  # of decoding
MEASUREMENTS = 3  # of each arm


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark."""
    plans = read_plans()
    if settings.study not in plans:
        raise ValueError(f"unknown study {settings.study!r}{did_you_mean(settings.study, plans)}")
    plan = plans[settings.study]
    by_name = {arm.name: arm for arm in plan.recipe.arms}
    for name in settings.arms:
        if name not in by_name:
            raise ValueError(f"unknown arm {name!r}{did_you_mean(name, by_name)}")
    names = settings.arms or plan.arm_names
    arms = [arm for name, arm in by_name.items() if name in names]
    measured = Counter(
        (row["arm"], row["variant"]) for row in settings.earlier_rows if row["study"] == plan.name
    )
    variants = [variant for variant in ("eager", "compiled") if variant in settings.variants]
    for number in range(MEASUREMENTS):
        for arm in arms:
            for variant in variants:
                if measured[arm.name, variant] <= number:
                    row = _measure_arm(plan.recipe, arm, variant, settings)
                    yield {"study": plan.name} | row


def _measure_arm(recipe: Recipe, arm: Arm, variant: str, settings: BenchmarkSettings) -> Row:
    builds = {
        row.name: functools.partial(build_calls, recipe, row, variant, settings)
        for row in (Arm.from_row("prenorm"), arm)
    }
    timer = Timer(settings.torch_device)
    timings = time_interleaved(builds, timer, settings.rounds, settings.seconds)
    of_arm = timings[arm.name]
    of_prenorm = timings["prenorm"]
    data = recipe.settings(arm).data
    row: Row = {
        "arm": arm.name,
        "connection": arm.connection,
        "tokens": f"{data.batch} x {data.context}",
        "dtype": "float32",
        "variant": variant,
        "rounds": of_arm.rounds,
        "note": of_arm.note,
    }
    for call in CALLS:
        least = of_arm.least_ms(call)
        least_of_prenorm = of_prenorm.least_ms(call)
        row[f"{call} ms"] = least
        row[f"{call} of PreNorm"] = ratio_or_none(least_of_prenorm, least)
    return row


def build_calls(recipe: Recipe, arm: Arm, variant: str, settings: BenchmarkSettings) -> Calls:
    """The calls of one arm, of models with random weights."""
    is_compiled = variant == "compiled"
    device = settings.torch_device
    compiled_part = settings.compile if is_compiled else "none"
    recipe = replace(recipe, overrides={**recipe.overrides, "compile": compiled_part})
    train_settings = recipe.settings(arm)
    data = train_settings.data
    vocab = train_settings.model.vocab
    assert vocab is not None, "each study states its vocabulary"
    trained = build_model(train_settings, arm.connection, vocab, 0, recipe.task).to(device)
    model: Any = (
        build_model(train_settings, arm.connection, vocab, 0, recipe.task).to(device).eval()
    )
    tokens = torch.randint(vocab, (data.batch, data.context), device=device)
    run_model: Any = model
    next_logits: Any = model
    if is_compiled:
        run_model = torch.compile(model, dynamic=False)
        next_logits = compile_decoding(model, settings.device)

    @torch.no_grad()
    def forward() -> None:
        run_model(input_ids=tokens, use_cache=False)

    most_tokens = PROMPT_TOKENS + TOKENS_PER_CALL * (settings.rounds + WARMUP_CALLS + 1)
    return {
        "step": training_step(trained, train_settings, arm, vocab),
        "forward": forward,
        "decode": decoding(model, next_logits, max(data.context, most_tokens), TOKENS_PER_CALL),
    }
