"""The descriptions of runs and comparisons, and what differs between two: whether they are the same
one, and whether one is the other's baseline.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from ..run_folders import DATA_DIGEST
from .settings import DEFAULT_OPTIONS, GROUP_OF_OPTION, RATE_OPTIONS, ModelSettings, Settings

# Options that only locate the data and the tokenizer: `DATA_DIGEST` identifies what they are.
PLACES_OF_DATA = frozenset({"data", "valid", "tokenizer"})


def run_identity(settings: Settings, connection: str, seed: int, digest: str) -> dict[str, Any]:
    """What decides the losses of a run: with any other value it would be another run.

    Args:
        settings: of the run.
        connection: its spec.
        seed: of the run.
        digest: of the data.
    """
    return {
        **settings.fixed_options(),
        "connection": connection,
        "seed": seed,
        DATA_DIGEST: digest,
    }


def first_difference(
    before: dict[str, Any], now: dict[str, Any], ignored: Collection[str] = ()
) -> str:
    """The first key with another value, in words; "" without any.

    A pretrained model comes first, as it decides other options; then keys are in their alphabetical
    order.

    Args:
        before: options that were added later may be missing: they have their defaults.
        now: each may have tuples, which are lists in JSON.
        ignored: keys that may have any value.
    """
    before = json.loads(json.dumps(before))
    now = json.loads(json.dumps(now))
    defaults = json.loads(json.dumps(DEFAULT_OPTIONS))
    keys = (before.keys() | now.keys()) - set(ignored)
    for key in sorted(keys, key=lambda key: (key != "pretrained", key)):
        value_before = before.get(key, defaults.get(key))
        if value_before != now.get(key):
            return f"with {key} = {value_before!r}; here it is {now.get(key)!r}"
    return ""


def distance_to_baseline(
    options: Mapping[str, Any], of_prenorm: Mapping[str, Any]
) -> tuple[bool, bool, int]:
    """How far a pre-norm run is from a run that might be compared with it: the least is the best.

    Learning rates do not count, because a search chooses them, nor places of data. Nor do the run's
    own re-allocated widths, which are a part of MUDD.

    Args:
        options: of the run, by name. An option that is missing has its default.
        of_prenorm: of the pre-norm run.

    Returns:
        Whether their backbones differ, whether their lengths do, and the number of options that do.
    """
    own = {**DEFAULT_OPTIONS, **options, "reallocate": False}
    other = {**DEFAULT_OPTIONS, **of_prenorm}
    names = (own.keys() | other.keys()) - PLACES_OF_DATA - set(RATE_OPTIONS)
    differing = [name for name in names if own.get(name) != other.get(name)]
    differs_in_model = any(GROUP_OF_OPTION.get(name) is ModelSettings for name in differing)
    return differs_in_model, "steps" in differing, len(differing)
