"""`crosslayer COMMAND`: the command line. Only the file of the given command is imported."""

import importlib
import pkgutil
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any

from .. import __version__, cli
from ..validation import did_you_mean

HELPERS = ("main", "console")
COMMANDS = sorted(m.name for m in pkgutil.iter_modules(cli.__path__) if m.name not in HELPERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    An error of the user's is one line on stderr, without a traceback.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        return _run_command(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "crosslayer").partition(".")[0]
        if package == "crosslayer":
            raise
        extra = "eval" if "eval" in arguments[:1] else "train"
        if package == "triton":
            extra = "kernels"
        message = (
            f"{package} is not installed; in the clone of crosslayer: pip install -e '.[{extra}]'"
        )
    except KeyboardInterrupt:
        print("crosslayer: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ArgumentError) as error:
        message = " ".join(str(error).split())
    print(f"crosslayer: {message}", file=sys.stderr)
    return 1


def _run_command(arguments: Sequence[str]) -> int:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="crosslayer",
        description="Residual connections for Transformers: connect, train, compare, convert.",
        exit_on_error=False,
        allow_abbrev=False,
        version=__version__,
    )
    subcommands = parser.add_subcommands(required=True, dest="command")
    command = next((word for word in arguments if word in COMMANDS), None)
    names = [command] if command else COMMANDS
    modules: dict[str, Any] = {}
    command_parsers: list[Any] = []  # of the command and of its subcommands
    for name in names:
        modules[name] = importlib.import_module(f"{cli.__name__}.{name}")
        command_parser = modules[name].parser()
        summary = command_parser.description.partition(". ")[0].rstrip(".")
        # jsonargparse wants a command's own subcommands to be added last
        subcommands.add_subcommand(name, command_parser, help=summary)
        command_parsers.append(command_parser)
        if hasattr(modules[name], "actions"):
            command_parsers += modules[name].actions(command_parser)
    defaults = getattr(modules.get(command or ""), "DEFAULTS", True)
    try:
        options = parser.parse_args(arguments, defaults=defaults)
    except ArgumentError as error:
        unknown = re.search(r"unrecognized arguments: (--[^ =]+)", str(error))
        if unknown is None or command is None:
            raise ValueError(_plain_message(str(error))) from None
        raise ValueError(_unknown_option(unknown[1], command, command_parsers)) from None
    return modules[options.command].run(options[options.command])


def _plain_message(message: str) -> str:
    """jsonargparse's message in the words of the command line, where it is of a known kind."""
    message = " ".join(message.split())
    if match := re.search(r"argument command: invalid choice: '(.*?)' \(choose", message):
        hint = did_you_mean(match[1], COMMANDS)
        return f"unknown command {match[1]!r}{hint}; the commands: {', '.join(COMMANDS)}"
    wrong_type = r'Parser key "(\w+)": Expected a <class \'(int|float)\'>\. Got value: (.*)'
    if match := re.fullmatch(wrong_type, message):
        option = "--" + match[1].replace("_", "-")
        kind = "a whole number" if match[2] == "int" else "a number"
        return f"{option} must be {kind}, got {match[3]!r}"
    wrong_word = r'Parser key "(\w+)": Expected a typing\.Literal\[(.*)\]\. Got value: (.*)'
    if match := re.fullmatch(wrong_word, message):
        option = "--" + match[1].replace("_", "-")
        words = re.findall(r"'([^']*)'", match[2])
        hint = did_you_mean(match[3], words)
        return f"{option} must be one of {', '.join(words)}, got {match[3]!r}{hint}"
    return message


def _unknown_option(option: str, command: str, parsers: list[Any]) -> str:
    """The message for an option that a command does not have."""
    if command in ("train", "compare"):
        from ..train.settings import YAML_ONLY

        key = option.removeprefix("--").replace("-", "_")
        if key in YAML_ONLY:
            return f"{key} has no option on the command line; set it in a recipe file"
    known = []
    for parser in parsers:
        for action in parser._actions:
            known += action.option_strings
    return f"unknown option {option}{did_you_mean(option, known)}; see crosslayer {command} --help"


if __name__ == "__main__":
    sys.exit(main())
