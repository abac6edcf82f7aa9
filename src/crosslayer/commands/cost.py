"""`crosslayer cost`: what connections cost on a body before it is trained."""

from typing import Any

from ..registry import nearest, separate
from .shared import add_arms, console_of, grid, quiet, show
from .shared import parser as empty


def parser() -> Any:
    from ..costs import GPUS, sized

    command = empty(
        "What connections cost on a body before it is trained: parameters, FLOPs, memory, and the least "
        "time their traffic takes."
    )
    command.add_function_arguments(sized, None)
    command.add_argument("--batch", type=int, default=8, help="sequences a step on one GPU")
    command.add_argument("--context", type=int, default=2048, help="tokens a sequence")
    command.add_argument("--gpu", type=str, default="H100", help="whose memory sets the floor: " + ", ".join(GPUS))
    add_arms(command)
    return command


def run(options: Any) -> int:
    quiet()
    from .. import costs

    if options.gpu not in costs.GPUS:
        raise ValueError(
            f"unknown GPU {options.gpu!r}{nearest(options.gpu, costs.GPUS)}; known: {', '.join(costs.GPUS)}"
        )
    sizes = {name: options[name] for name in ("family", "layers", "dim", "heads", "vocab", "body")}
    arms = separate(" ".join(options.arms))
    rows = costs.estimates(arms, costs.sized(**sizes), options.batch, options.context)
    gpu = costs.GPUS[options.gpu]
    console, table = console_of(), grid("crosslayer cost", costs.HEAD)
    for row in rows:
        table.add_row(*costs.cells(row, gpu))
    show(table, console)
    console.print(costs.legend(rows[0], gpu), soft_wrap=True)
    return 0
