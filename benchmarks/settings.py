"""The options of a benchmark, and their defaults: large models on a GPU, small ones on a CPU."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from crosslayer.spec import make, split_specs
from crosslayer.validation import check_non_negative, check_positive, parse_dtype

VARIANTS = ("kernel", "eager", "compiled", "peers")
STREAM_SPECS = ["hyper", "mhc", "mgr"]
CHAIN_SPECS = [
    *["prenorm", "hyper", "mhc", "denseformer", "mudd", "mgr"],
    *["attnres", "attnres(block_size=4)"],
]
STEP_SPECS = [
    *["prenorm", *STREAM_SPECS, "mudd"],
    *["attnres(block_size=4)", "denseformer(dilation=4, period=5)"],
]
MEMORY_SPECS = ["prenorm", *STREAM_SPECS, "mudd"]

GPU_SIZES: dict[str, Any] = {
    "layers": 24,
    "batch": 8,
    "context": 2048,
    "dims": [2048],
    "dtype": "bfloat16",
}
CPU_SIZES: dict[str, Any] = {
    "layers": 6,
    "batch": 4,
    "context": 256,
    "dims": [256],
    "vocab": 256,
    "dtype": "float32",
}
MACHINE_CODE_SIZES: dict[str, Any] = {**GPU_SIZES, "dims": [2048, 4096]}
COMPILE_TIME_SIZES: dict[str, Any] = {
    "specs": CHAIN_SPECS,
    "layers": 24,
    "batch": 1,
    "context": 2,
    "dims": [2048],
    "dtype": "bfloat16",
}
LAUNCH_SIZES: dict[str, Any] = {
    "layers": 1,
    "batch": 1,
    "context": 1,
    "dims": [2048],
    "dtype": "bfloat16",
    "rounds": 500,
}
# device -> benchmark -> options that are not given
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "ops": {**GPU_SIZES, "dims": [1024, 2048, 4096]},
        "chain": {**GPU_SIZES, "specs": CHAIN_SPECS, "compile": "model"},
        "step": {**GPU_SIZES, "specs": STEP_SPECS, "variants": ["compiled"]},
        "decode": {
            **GPU_SIZES,
            "specs": STEP_SPECS,
            "variants": ["compiled"],
            "compile": "model",
        },
        "memory": {**GPU_SIZES, "specs": MEMORY_SPECS},
        "arms": {**GPU_SIZES, "variants": ["eager"], "compile": "model"},
        "machine_code": MACHINE_CODE_SIZES,
        "compile_time": COMPILE_TIME_SIZES,
        "launches": LAUNCH_SIZES,
    },
    "cpu": {
        "ops": {**CPU_SIZES, "dims": [512]},
        "chain": {
            **CPU_SIZES,
            "specs": CHAIN_SPECS,
            "layers": 12,
            "dims": [512],
            "compile": "model",
        },
        "step": {**CPU_SIZES, "specs": STEP_SPECS, "variants": ["eager"]},
        "decode": {**CPU_SIZES, "specs": STEP_SPECS, "variants": ["eager"]},
        "arms": {**CPU_SIZES, "variants": ["eager"], "compile": "model", "seconds": 7.0},
        "memory": {**GPU_SIZES, "specs": MEMORY_SPECS},  # on the meta device
        "machine_code": MACHINE_CODE_SIZES,
        "compile_time": COMPILE_TIME_SIZES,
        "launches": LAUNCH_SIZES,
    },
}


@dataclass
class BenchmarkSettings:
    """The options that `python -m benchmarks --help` describes.

    `earlier_rows` are those that the .csv file has already.
    """

    layers: int
    batch: int
    context: int
    dims: list[int]
    dtype: str
    device: str
    vocab: int = 32000
    specs: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    variants: list[str] = field(default_factory=lambda: list(VARIANTS))
    streams: list[int] = field(default_factory=list)
    compile: Literal["layers", "model"] = "layers"
    rounds: int = 20
    seconds: float = 10.0
    study: str = "short"
    arms: list[str] = field(default_factory=list)
    earlier_rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("layers", "batch", "context", "vocab", "rounds"):
            check_positive(**{name: getattr(self, name)})
        for dim in self.dims:
            check_positive(dims=dim)
        for streams in self.streams:
            check_positive(streams=streams)
        check_non_negative(seconds=self.seconds)
        self.torch_dtype = parse_dtype(self.dtype)
        self.torch_device = torch.device(self.device)
        self.specs = split_specs(" ".join(self.specs))
        for spec in self.specs:
            make(spec)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch finds no GPU")

    @classmethod
    def for_benchmark(cls, name: str, **options: Any) -> "BenchmarkSettings":
        """The given options, and the defaults of the benchmark on its device for all others."""
        device = options.get("device")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(**{**DEFAULTS[device][name], **options, "device": device})
