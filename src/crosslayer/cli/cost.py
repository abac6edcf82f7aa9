"""`crosslayer cost`: what connections cost in a model, before training."""

from typing import Any

from ..validation import check_choice
from .console import make_console, make_table, print_table, silence_libraries
from .options import add_specs, make_parser, parse_specs

_COLUMNS = (
    "connection",
    "parameters",
    "extra parameters",
    "forward GFLOPs",
    "extra FLOPs",
    "activations",
    "traffic",
    "bound, ms",
    "beyond pre-norm",
)


def parser() -> Any:
    from ..cost import GPUS

    command = make_parser(
        "Estimate what connections cost before training: parameters, FLOPs, activation memory, and "
        "the least time that their memory traffic takes."
    )
    command.add_argument(
        "--family",
        type=str,
        default="llama",
        help="a model type whose layers `connect` recognises, like llama, qwen3 or gpt_neox",
    )
    command.add_argument("--layers", type=int, default=24, help="number of layers")
    command.add_argument("--dim", type=int, default=2048, help="width of the stream")
    command.add_argument("--heads", type=int, default=16, help="number of attention heads")
    command.add_argument(
        "--vocab",
        type=int,
        default=32000,
        help="size of the vocabulary; embedding and head are not tied",
    )
    command.add_argument(
        "--model-config",
        type=dict[str, Any],
        default={},
        help='other keys of the model\'s config, like {"tie_word_embeddings": true}',
    )
    command.add_argument("--batch", type=int, default=8, help="sequences a step on one GPU")
    command.add_argument("--context", type=int, default=2048, help="tokens a sequence")
    command.add_argument(
        "--gpu",
        type=str,
        default="H100",
        help="the GPU whose memory bandwidth is used: " + ", ".join(GPUS),
    )
    add_specs(command)
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..cost import GPUS, estimate_costs
    from ..hf.config import make_config

    gpu = check_choice("gpu", options.gpu, GPUS)
    specs = parse_specs(options.arms)
    config = make_config(
        options.family,
        options.layers,
        options.dim,
        options.heads,
        options.vocab,
        options.model_config,
    )
    costs = estimate_costs(specs, config, options.batch, options.context)
    console = make_console()
    table = make_table("crosslayer cost", _COLUMNS)
    for cost in costs:
        table.add_row(*_table_row(cost, gpu))
    print_table(table, console)
    batches = f"{options.batch} sequences of {options.context} tokens"
    console.print(_legend(costs[0], gpu, batches))
    return 0


def _table_row(cost: Any, gpu: Any) -> list[str]:
    """The cells of `_COLUMNS`."""
    bound = cost.bandwidth_bound_seconds(gpu)
    extra = _format_rounded(1e3 * cost.extra_seconds(gpu), "+.2f")
    return [
        cost.spec,
        f"{cost.model.parameters:,}",
        f"{cost.extra_parameters:.3%}",
        _format_rounded(cost.model.forward_flops / 1e9, ",.0f"),
        f"{cost.extra_flops:.2%}",
        f"{cost.activation_ratio:.2f}×",
        f"{sum(cost.model.site_traffic):g}",
        _format_rounded(1e3 * bound, ".2f"),
        f"{extra} ms, {cost.relative_slowdown(gpu):+.1%}",
    ]


def _format_rounded(value: float, form: str) -> str:
    """A number in this form, or with two significant digits where less would be left of it."""
    if 0 < abs(value) < 1:
        return f"{value:{'+' if '+' in form else ''}.2g}"
    return f"{value:{form}}"


def _legend(cost: Any, gpu: Any, batches: str) -> str:
    flops_ms = 3e3 * cost.baseline.forward_flops / gpu.flops
    activations = cost.baseline.activation_bytes
    size = f"{activations / 2**20:,.1f} MiB"
    if activations >= 2**30:
        size = f"{activations / 2**30:,.1f} GiB"
    return (
        f"One training step of {batches} on one {gpu.name}: {gpu.bandwidth / 1e9:,.0f} GB/s, "
        f"{gpu.flops / 1e12:,.0f} bf16 TFLOP/s. At that peak the FLOPs of pre-norm take "
        f"{_format_rounded(flops_ms, ',.1f')} ms; the share beyond pre-norm is of that time. "
        "Activations: saved for the backward pass of a bfloat16 model, with the PyTorch "
        f"operations; pre-norm saves {size}. Traffic: multiples of D elements per token, "
        "forward, summed over depth. Bound: the least time of that traffic and of the backward "
        "pass's, if every site is one kernel in each pass."
    )
