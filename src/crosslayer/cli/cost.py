"""`crosslayer cost`: what connections cost on a body before it is trained."""

from typing import Any

from ..spec import split_specs
from ..validation import did_you_mean
from .console import add_arms, make_console, make_parser, make_table, print_table, silence_libraries


def parser() -> Any:
    from ..cost.estimate import GPUS
    from ..hf.config import make_config

    command = make_parser(
        "What connections cost on a body before it is trained: parameters, FLOPs, memory, and the least "
        "time their traffic takes."
    )
    command.add_function_arguments(make_config, None)
    command.add_argument("--batch", type=int, default=8, help="sequences a step on one GPU")
    command.add_argument("--context", type=int, default=2048, help="tokens a sequence")
    command.add_argument(
        "--gpu", type=str, default="H100", help="whose memory sets the floor: " + ", ".join(GPUS)
    )
    add_arms(command)
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..cost import estimate

    if options.gpu not in estimate.GPUS:
        raise ValueError(
            f"unknown GPU {options.gpu!r}{did_you_mean(options.gpu, estimate.GPUS)}; known: {', '.join(estimate.GPUS)}"
        )
    sizes = {name: options[name] for name in ("family", "layers", "dim", "heads", "vocab", "body")}
    arms = split_specs(" ".join(options.arms))
    rows = estimate.estimate_costs(
        arms, estimate.make_config(**sizes), options.batch, options.context
    )
    gpu = estimate.GPUS[options.gpu]
    console, table = make_console(), make_table("crosslayer cost", estimate.HEAD)
    for row in rows:
        table.add_row(*estimate.cells(row, gpu))
    print_table(table, console)
    console.print(estimate.legend(rows[0], gpu), soft_wrap=True)
    return 0
