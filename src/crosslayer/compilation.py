"""The limit of torch.compile on the graphs of one function."""

from typing import Any

import torch


def reset_compiler(graphs: int) -> None:
    """Forget what was compiled, which counts towards the limit, and allow a number of graphs.

    Args:
        graphs: of one function, at least.
    """
    torch.compiler.reset()
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, graphs)
