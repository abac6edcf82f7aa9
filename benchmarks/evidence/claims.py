"""Claims of the papers (claims.yaml), and what the studies say to each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import yaml

from benchmarks.evidence.studies import FIRST_STUDY, Measure
from crosslayer.intervals import MeanEstimate, estimate_mean

CLAIMS = Path(__file__).parent / "claims.yaml"
CLAIM_VERDICTS = {-1: "agrees", 1: "does not agree", 0: "cannot tell"}
Losses = Mapping[int, float]  # by seed


class SeedLosses(Protocol):
    """Losses by name and seed, like those of a study's arms."""

    def losses(self, name: str, /, at: Measure = "end") -> dict[int, float]:
        """Those of each seed."""

    def is_paired(self, name: str, /) -> bool:
        """Whether they are taken together with others' of the same seed."""


@dataclass
class Claim:
    """One claim: a weighted sum of losses is below zero.

    Attributes:
        claim: in words.
        source: paper, section or table.
        paper: its numbers.
        sum: weights of the arms.
        at: when the losses are taken.
        needs: what would test it, where no sum of losses can.
    """

    claim: str
    source: str
    paper: str
    sum: dict[str, float] = field(default_factory=dict)
    at: Measure = "end"
    needs: str = ""

    @property
    def arms(self) -> list[tuple[str, str]]:
        """The study and the name of each arm whose loss it sums."""
        return [_split_key(key) for key in self.sum]


def read_claims() -> list[Claim]:
    """The claims of claims.yaml."""
    return [Claim(**row) for row in yaml.safe_load(CLAIMS.read_text("utf8"))]


def sum_losses(
    studies: Mapping[str, SeedLosses], weights: Mapping[str, float], at: Measure = "end"
) -> MeanEstimate | None:
    """Σ weight × loss of arms, with its error; None where an arm has no losses.

    Args:
        studies: by name.
        weights: of ARM in the first study, or of STUDY/ARM.
        at: when the losses are taken.
    """
    paired: list[Losses] = []
    unpaired: list[Losses] = []
    for key, weight in weights.items():
        study_name, arm = _split_key(key)
        study = studies.get(study_name)
        losses = {} if study is None else study.losses(arm, at)
        terms = paired if study is None or study.is_paired(arm) else unpaired
        terms.append({seed: weight * loss for seed, loss in losses.items()})
    return add_losses(paired, unpaired)


def add_losses(paired: Sequence[Losses], unpaired: Sequence[Losses]) -> MeanEstimate | None:
    """The sum of losses, with its error; None where some have no seed.

    Args:
        paired: added for each seed that all of these have.
        unpaired: independent of these, and added for each seed that all of them have.
    """
    values = _add_by_seed(paired)
    others = _add_by_seed(unpaired)
    if not unpaired:
        return estimate_mean(values) if values else None
    if not values or not others:
        return None
    return unpaired_difference(values, [-loss for loss in others])


def unpaired_difference(values: Sequence[float], baseline: Sequence[float]) -> MeanEstimate:
    """The mean of values minus that of others, with Welch's error: nothing pairs them.

    Args:
        values: at least one.
        baseline: at least one, independent of `values`. The error is NaN where either is a single
            one.
    """
    parts = [estimate_mean(row) for row in (values, baseline)]
    mean = parts[0].mean - parts[1].mean
    variance = sum(part.error**2 for part in parts)
    if not variance > 0:  # equal values, or a single one
        return MeanEstimate(mean, variance, 0)
    freedom = variance**2 / sum(part.error**4 / part.freedom for part in parts)
    return MeanEstimate(mean, math.sqrt(variance), freedom)


def _add_by_seed(terms: Sequence[Losses]) -> list[float]:
    if not terms:
        return []
    seeds = set.intersection(*(set(term) for term in terms))
    return [sum(term[seed] for term in terms) for seed in sorted(seeds)]


def _split_key(key: str) -> tuple[str, str]:
    """The study and the arm of ARM or STUDY/ARM."""
    study, _, arm = key.rpartition("/")
    return study or FIRST_STUDY, arm


def judge_claim(claim: Claim, studies: Mapping[str, SeedLosses]) -> tuple[MeanEstimate | None, str]:
    """Our number for a claim, and whether it agrees; None and "not run yet" without results."""
    estimate = sum_losses(studies, claim.sum, claim.at)
    if estimate is None:
        return None, "not run yet"
    return estimate, CLAIM_VERDICTS[estimate.interval.sign]
