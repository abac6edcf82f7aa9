"""What torch.compile does by default, and connections need otherwise."""

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
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, graphs)


def run_backward_without_autocast() -> None:
    """Let compiled backward passes compute as eager ones do.

    By default torch traces them under the autocast of their forward pass. The gradients of
    coefficients, which are float32, would be computed in half precision.
    """
    import torch._functorch.config as functorch  # `import torch` leaves it out

    functorch.backward_pass_autocast = "off"
