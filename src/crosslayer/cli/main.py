"""`crosslayer COMMAND`: the library from the command line. Every command is a thin layer over a function.

The files in `commands/` are the commands; one that is not asked for is not imported.
"""

import importlib
import pkgutil
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from itertools import chain
from typing import Any

from .. import __version__, cli
from ..validation import did_you_mean

NAMES = sorted(m.name for m in pkgutil.iter_modules(cli.__path__) if m.name != "shared")
EXTRAS = dict.fromkeys(
    (
        "jsonargparse", "rich", "lightning", "matplotlib", "transformers", "tokenizers", "safetensors", "datasets",
        "pyarrow", "PIL", "numpy",
    ),
    "train",
)  # fmt: skip
EXTRAS |= dict.fromkeys(("tensorboard", "wandb"), "loggers")
EXTRAS |= dict.fromkeys(("triton", "hyper_connections"), "bench")
EXTRAS |= dict.fromkeys(("lm_eval", "accelerate"), "eval")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code. What is wrong with the input is one line on stderr, never a traceback."""
    try:
        return command(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        message = f"{error.name} is not installed; pip install 'crosslayer[{EXTRAS[error.name]}]'"
    except KeyboardInterrupt:
        print("crosslayer: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ArgumentError) as error:
        message = " ".join(str(error).split())
    print(f"crosslayer: {message}", file=sys.stderr)
    return 1


def command(arguments: Sequence[str]) -> int:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="crosslayer",
        description="What connects the layers of a Transformer, as one library.",
        exit_on_error=False,
        allow_abbrev=False,
        version=__version__,
    )
    asked = next((a for a in arguments if a in NAMES), None)
    modules: dict[str, Any] = {
        name: importlib.import_module(f"{cli.__name__}.{name}")
        for name in ([asked] if asked else NAMES)
    }
    parsers = {name: module.parser() for name, module in modules.items()}
    subcommands = parser.add_subcommands(required=True, dest="command")
    several: dict[str, list[Any]] = {}
    for name, sub in parsers.items():
        subcommands.add_subcommand(name, sub)
        if hasattr(
            modules[name], "actions"
        ):  # its own subcommands, which the parser library takes in this order only
            several[name] = modules[name].actions(sub)
    try:
        # a command may want what was given alone, without the options' defaults
        given = parser.parse_args(
            arguments, defaults=getattr(modules.get(asked or ""), "DEFAULTS", True)
        )
    except ArgumentError as error:
        unknown = re.search(r"unrecognized arguments: (--[^ =]+)", str(error))
        if not unknown or asked is None:
            raise
        own = [parsers[asked], *several.get(asked, [])]
        known = [
            f"--{option}"
            for option in ("config", *chain.from_iterable(p.get_defaults().keys() for p in own))
        ]
        raise ValueError(
            f"unknown option {unknown[1]}{did_you_mean(unknown[1], known)}; see crosslayer {asked} --help"
        ) from None
    return modules[given.command].run(given[given.command])


if __name__ == "__main__":
    sys.exit(main())
