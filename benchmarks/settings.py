"""What a benchmark is told, and what it takes where it is not: the targets' sizes on a GPU, small ones on a CPU."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.cases import OPS
from benchmarks.clock import NotMeasured
from crosslayer.spec import make, split_specs
from crosslayer.validation import DTYPES, check_choice, check_positive, did_you_mean

STREAMS = ["hyper", "mhc", "mgr"]
SITES = [
    "prenorm",
    "hyper",
    "mhc",
    "denseformer",
    "mudd",
    "mgr",
    "attnres",
    "attnres(block_size=4)",
]
STEPS = ["prenorm", *STREAMS, "mudd", "attnres(block_size=4)", "denseformer(dilation=4, period=5)"]
KEPT = ["prenorm", *STREAMS, "mudd"]
LARGE: dict[str, Any] = {
    "layers": 24,
    "batch": 8,
    "context": 2048,
    "dims": [2048],
    "dtype": "bfloat16",
}
SMALL: dict[str, Any] = {
    "layers": 6,
    "batch": 4,
    "context": 256,
    "dims": [256],
    "vocab": 256,
    "dtype": "float32",
}
# kind of device -> benchmark -> what is not given
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "ops": {**LARGE, "dims": [1024, 2048, 4096]},
        "chain": {**LARGE, "arms": SITES, "compile": "model"},
        "step": {**LARGE, "arms": STEPS, "variants": ["compiled"]},
        "decode": {**LARGE, "arms": STEPS, "compile": "model", "variants": ["compiled"]},
        "memory": {**LARGE, "arms": KEPT},
    },
    "cpu": {
        "ops": {**SMALL, "dims": [512]},
        "chain": {**SMALL, "arms": SITES, "layers": 12, "dims": [512], "compile": "model"},
        "step": {**SMALL, "arms": STEPS, "variants": ["eager"]},
        "decode": {**SMALL, "arms": STEPS, "variants": ["eager"]},
        "memory": {**LARGE, "arms": KEPT},
    },
}
SIZES["none"] = SIZES["cuda"]
VARIANTS = ("kernel", "eager", "compiled", "peers")


@dataclass
class Settings:
    """How a benchmark is run. Arms, sizes, dtype, device, variants and compile that are not given are in `SIZES`: they
    depend on the benchmark and on whether there is a GPU.

    Args:
        arms: connections, separated by spaces or commas; of all benchmarks but ops.
        ops: of ops: which of them, all where none is named.
        variants: what is measured: kernel, eager, compiled, peers.
        dims: widths, one after the other.
        streams: of ops: numbers of streams, or of sources.
        layers: of the body, or of a row of connections, two sub-layers each.
        batch: sequences at once; when decoding there is one.
        context: tokens a sequence; when decoding, what the cache has room for.
        vocab: size of the body's vocabulary.
        dtype: float32, bfloat16 or float16.
        device: cuda or cpu, a GPU where there is one; or none, to have a GPU's rows with what is known on paper.
        threads: of the CPU; torch's choice where 0.
        compile: how what is compiled is: by layers (in a row, by reads), or the model whole.
        rounds: at most so many of all variants by turns, of which the median is taken.
        seconds: a group of variants is measured at most so long, after its compilation.
        limit: what has not begun after so many seconds is noted and left out.
        note: said in every row.
    """

    arms: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    variants: list[str] = field(default_factory=lambda: list(VARIANTS))
    dims: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=lambda: [2, 4, 8])
    layers: int = 0
    batch: int = 0
    context: int = 0
    vocab: int = 32000
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0
    compile: str = "layers"
    rounds: int = 20
    seconds: float = 10.0
    limit: float = 3600.0
    note: str = ""

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name) for name in ("layers", "batch", "context", "vocab", "rounds")
        }
        for given in (
            sizes,
            *({"dims": D} for D in self.dims),
            *({"streams": n} for n in self.streams),
        ):
            check_positive(**given)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("compile", self.compile, dict.fromkeys(("layers", "model")))
        for variant in self.variants:
            check_choice("variants", variant, dict.fromkeys(VARIANTS))
        for op in self.ops:
            if op not in OPS:
                raise ValueError(
                    f"unknown op {op!r}{did_you_mean(op, OPS)}; known: {', '.join(OPS)}"
                )
        self.arms = split_specs(" ".join(self.arms))
        for arm in self.arms:
            make(arm)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch sees no GPU here")
        self.begun = time.monotonic()

    @classmethod
    def of(cls, what: str, **given: Any) -> "Settings":
        """Of a benchmark, with its own sizes for what is not given."""
        device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(**{**check_choice("device", device, SIZES)[what], **given, "device": device})

    @property
    def on(self) -> torch.device:
        return torch.device("meta" if self.device == "none" else self.device)

    @property
    def type(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def forget(self) -> None:
        """What was compiled before counts against the number of graphs a function may have."""
        if "compiled" in self.variants:
            torch.compiler.reset()
            # a dense method's reads each have a graph of their own
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, 8 * self.layers
            )

    def hurry(self) -> None:
        """Raise `NotMeasured` when time is up, or nothing is to be measured."""
        if self.device == "none":
            raise NotMeasured("no GPU at hand")
        if time.monotonic() - self.begun > self.limit:
            raise NotMeasured(f"not begun within {self.limit:g} s")
