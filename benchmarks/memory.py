"""Peak activation memory of a training step: stored, or recomputed in the backward pass.

On a GPU, torch's allocator measures it. Elsewhere the step runs on the meta device with the
references, and live storages are counted. That takes no memory, so a CPU can simulate a GPU's
sizes.
"""

import gc
from collections.abc import Iterator

import torch

from benchmarks.model import make_llama_config
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.step import build_calls
from benchmarks.timing import describe_error, ratio_or_none
from crosslayer.cost import build_on_meta, measure_peak_memory
from crosslayer.train.parallel import prepare_model
from crosslayer.train.settings import EngineSettings

COLUMNS = (
    *("connection", "layers", "tokens", "D", "dtype"),
    *("recompute", "MiB", "of PreNorm", "how"),
)


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark."""
    on_gpu = settings.device == "cuda"
    peak_bytes = allocated_peak if on_gpu else simulated_peak
    for D in settings.dims:
        prenorm_mib: float | None = None
        for spec in dict.fromkeys(("prenorm", *settings.specs)):
            for recompute in ("none", "reads", "streams"):
                mib = None
                note = ""
                try:
                    mib = peak_bytes(spec, D, settings, recompute) / 2**20
                except Exception as error:
                    note = describe_error(error)
                if spec == "prenorm" and recompute == "none":
                    prenorm_mib = mib
                yield {
                    "connection": spec,
                    "layers": settings.layers,
                    "tokens": f"{settings.batch} x {settings.context}",
                    "D": D,
                    "dtype": settings.dtype,
                    "recompute": recompute,
                    "MiB": mib,
                    "of PreNorm": ratio_or_none(mib, prenorm_mib),
                    "how": "allocated" if on_gpu else "tracked",
                    "note": note,
                }


def allocated_peak(spec: str, D: int, settings: BenchmarkSettings, recompute: str) -> int:
    """Bytes by the GPU's allocator, without parameters and optimizer states.

    At the peak, where the backward pass begins, there are no gradients: a step frees them.
    """
    gc.collect()
    torch.cuda.empty_cache()
    step = build_calls(spec, D, settings, "eager", recompute)["step"]
    step()
    between_steps = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - between_steps


def simulated_peak(spec: str, D: int, settings: BenchmarkSettings, recompute: str) -> int:
    """Bytes of live storages on the meta device, without parameters and gradients."""
    config = make_llama_config(D, settings)
    model = build_on_meta(spec, config, settings.context, settings.torch_dtype).train()
    tokens = torch.zeros(settings.batch, settings.context + 1, dtype=torch.long, device="meta")
    engine = EngineSettings(recompute=recompute)  # type: ignore[arg-type]
    return measure_peak_memory(prepare_model(model, engine), tokens).peak_bytes
