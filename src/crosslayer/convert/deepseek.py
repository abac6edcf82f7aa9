"""DeepSeek-V4's and V4.1's mHC tensors, `fn`, `base` and `scale` of every sub-layer, float32 and laid out as ours.

    released        layers.{l}.hc_attn_fn, layers.{l}.hc_ffn_fn, …; V4 also has the readout's hc_head_fn, …
    transformers    layers.{l}.attn_hc.fn, layers.{l}.ffn_hc.fn, …; hc_head.hc_fn, …

V4 is "mhc". V4.1 (single-pass mHC) has the same tensors but no head: "mhc(single_pass=True)". Models that took mHC over
under transformers' names are their own arms: GLM-5's "mhc(readout='mean', norm_eps=1e-5)" has no head either, so what
the tensors are for is said by the arm and never guessed.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..spec import default_options, make
from ..validation import check_choice
from .rows import Connections, Row, check_names, convert, expand, joined, placed, split, turned


class Names(NamedTuple):
    attn: str
    ffn: str
    head: str


NAMES = {
    "released": Names("layers.{l}.hc_attn_{p}", "layers.{l}.hc_ffn_{p}", "hc_head_{p}"),
    "transformers": Names("layers.{l}.attn_hc.{p}", "layers.{l}.ffn_hc.{p}", "hc_head.hc_{p}"),
}
CONFIG = {
    "hc_mult": "streams",
    "hc_sinkhorn_iters": "iterations",
    "hc_eps": "eps",
    "rms_norm_eps": "norm_eps",
}


def arm_of(config: Mapping[str, Any], **given: Any) -> str:
    """The arm that a config.json's `hc_*` and `rms_norm_eps` stand for, like `arm_of(config, single_pass=True)`."""
    found = {ours: config[theirs] for theirs, ours in CONFIG.items() if theirs in config} | given
    factory = make(f"mhc({', '.join(f'{name}={value!r}' for name, value in found.items())})")
    default = default_options(factory.method)
    return str(
        factory.__class__("mhc", {n: v for n, v in factory.options.items() if v != default[n]})
    )


def load(tensors: Mapping[str, Tensor], arm: str = "mhc") -> Connections:
    """The hyper-connections of a checkpoint as ours.

    Args:
        tensors: a state dict, whole or its `hc` tensors alone, under either names, with any prefix before `layers`;
            other tensors are passed over.
        arm: what they are for, an mhc.

    Raises:
        ValueError: there are none, one is missing, or the arm has another head, number of streams or residual.
    """
    head, n, sizes = shape_of(arm)
    names, prefix = found_names(tensors)
    layers = 1 + max(
        int(m[1])
        for name in tensors
        if (m := re.match(re.escape(prefix) + r"layers\.(\d+)\..*hc", name))
    )
    if not head and any(name.startswith(prefix + names.head.format(p="")) for name in tensors):
        raise ValueError(f"these tensors have a head and {arm!r} has none; DeepSeek-V4's is 'mhc'")
    expected = rows(names, layers, head, prefix)
    wanted = {row.theirs for row in expected}
    given = {name: t for name, t in tensors.items() if name in wanted}
    if head and not given.keys() & {row.theirs for row in expected[-3:]}:
        raise ValueError(
            f"these tensors have no head, which {arm!r} needs; DeepSeek-V4.1's arm is 'mhc(single_pass=True)'"
        )
    check_names(wanted, given)
    for row in expected[: 6 * layers : 3]:
        fn = given[row.theirs]
        if fn.ndim != 2 or len(fn) != sizes or fn.shape[1] % n:
            raise ValueError(
                f"{row.theirs!r} has the shape {tuple(fn.shape)}, expected ({sizes}, {n}·D) for {arm!r}"
            )
    return Connections(arm, split(convert(expected, given), 2 * layers + 1), {})


def save(connections: Connections, names: str = "released", prefix: str = "") -> dict[str, Tensor]:
    """The way back, to the last bit, under "released" or "transformers" names.

    Raises:
        ValueError: the arm is no mhc, or the names are neither.
    """
    head, *_ = shape_of(connections.arm)
    layers = (len(connections.states) - 1) // 2
    table = rows(check_choice("names", names, NAMES), layers, head, prefix)
    return convert(turned(table), joined(connections.states))


def rows(names: Names, layers: int, head: bool, prefix: str) -> list[Row]:
    sites = [
        (name, l, 2 * l + i)
        for l in range(layers)
        for i, name in enumerate((names.attn, names.ffn))
    ]
    sites += [(names.head, layers, 2 * layers)] if head else []
    return [
        row
        for name, l, site in sites
        for p in ("fn", "base", "scale")
        for row in placed(expand([Row(name, p)], l=l, p=p), prefix, f"{site}.")
    ]


def shape_of(arm: str) -> tuple[bool, int, int]:
    """Whether an mhc has a head, its streams n, and the rows of its fn."""
    factory = make(arm)
    if factory.name != "mhc":
        raise ValueError(f"these tensors are an mhc's, got the arm {arm!r}")
    given = default_options(factory.method) | factory.options
    n = given["streams"]
    head = given["readout"] == "head" and not given["single_pass"]
    return head, n, 2 * n + (n * n if given["residual"] == "sinkhorn" else 0)


def found_names(tensors: Mapping[str, Tensor]) -> tuple[Names, str]:
    """Under which names the tensors are, and what stands before `layers`."""
    for names in NAMES.values():
        first = names.attn.format(l=0, p="fn")
        for name in tensors:
            if name == first or name.endswith("." + first):
                return names, name.removesuffix(first)
    raise ValueError(
        f"no mHC tensors; expected {' or '.join(repr(n.attn.format(l=0, p='fn')) for n in NAMES.values())}"
    )
