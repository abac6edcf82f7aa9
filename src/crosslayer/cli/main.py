"""`crosslayer COMMAND`: the command line. Only the file of the given command is imported."""

import errno
import importlib
import os
import pkgutil
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any, get_origin

from .. import __version__, cli
from ..errors import error_in_one_line, is_out_of_memory
from ..validation import describe_wrong_value, did_you_mean
from .console import is_rank_zero

_HELPERS = ("main", "console", "options")
_COMMANDS_OF_RANKS = ("train", "compare")  # which torchrun may start
_MESSAGE_LENGTH = 1000
# How to write an option of several values, by its type.
_SYNTAX_HINTS = {dict: "; write {}.NAME=VALUE", list: "; write {}+=VALUE for each"}
COMMANDS = sorted(m.name for m in pkgutil.iter_modules(cli.__path__) if m.name not in _HELPERS)


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
        if place := _place_in_method(error):
            message = f"{package} is not installed{place}"
    except KeyboardInterrupt:
        print("crosslayer: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ArgumentError) as error:
        message = _machine_limit(error) or error_in_one_line(error) + _place_in_method(error)
    except Exception as error:
        limit = _machine_limit(error) or _lost_rank(error)
        if limit is None:
            raise  # an error of ours, which deserves its traceback
        message = limit
    name = "crosslayer" if is_rank_zero() else f"crosslayer, rank {os.environ['RANK']}"
    print(f"{name}: {_shorten(message)}", file=sys.stderr)
    return 1


def _place_in_method(error: BaseException) -> str:
    """Where the code of a connection failed without raising an error itself, like a bug in one that
    a user adds: " (laurel.py, line 31)". Otherwise nothing.
    """
    from ..methods import method_files

    while error.__context__ is not None:  # the first one
        error = error.__context__
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if "importlib" not in frame.filename]  # of an import
    if not frames or frames[-1].filename not in method_files():
        return ""
    is_deliberate = (frames[-1].line or "").startswith("raise ")
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"
    return "" if is_deliberate else place


def _shorten(message: str) -> str:
    """At most `_MESSAGE_LENGTH` characters of one line: a value in it may be of any length."""
    message = " ".join(message.split())
    if len(message) <= _MESSAGE_LENGTH:
        return message
    half = _MESSAGE_LENGTH // 2
    return f"{message[:half]} … {message[-half:]}"


def _machine_limit(error: Exception) -> str | None:
    """What to do where the machine's memory or disk does not suffice; None for any other error.

    The libraries raise errors of many classes where memory or disk is full, with these words.
    """
    text = str(error)
    if is_out_of_memory(error):
        return (
            "out of memory: a smaller model, context or batch needs less, and so does training "
            "with --accumulate or --recompute"
        )
    if isinstance(error, RecursionError):
        return "a value of the input is nested too deep"
    if any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
        return f"the disk is full ({text}); make room, then give the same command again"
    return None


def _lost_rank(error: Exception) -> str | None:
    """What to say where another rank ended while this one waited for it; None for other errors."""
    import torch.distributed

    if isinstance(error, torch.distributed.DistError) or "closed by peer" in str(error):
        return "another rank has ended; see what it printed"
    return None


def _check_processes(command: str) -> None:
    """Raise a ValueError where torchrun started several processes of a command that uses one."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if command not in _COMMANDS_OF_RANKS and processes not in ("", "0", "1"):
        raise ValueError(
            f"{command} runs in one process; start it without torchrun (WORLD_SIZE is {processes})"
        )


def _run_command(arguments: Sequence[str]) -> int:
    if sys.platform == "win32":  # folders cannot be flushed to disk there
        raise ValueError("the command line runs on Linux and macOS; on Windows, use it in WSL")
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="crosslayer",
        description="Residual connections for Transformers: train, compare, inspect, evaluate, "
        "convert.",
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
    actions = [action for command_parser in command_parsers for action in command_parser._actions]
    try:
        options = parser.parse_args(arguments, defaults=defaults)
    except ArgumentError as error:
        message = error_in_one_line(error)
        raise ValueError(_plain_message(message, command, actions)) from None
    except OverflowError:
        raise ValueError("a number among the options is larger than any float") from None
    if any(name.endswith(".out") and value == "" for name, value in options.items()):
        raise ValueError("the output folder has no name; give it one, like ./results")
    _check_processes(options.command)
    return modules[options.command].run(options[options.command])


def _plain_message(message: str, command: str | None, actions: list[Any]) -> str:
    """jsonargparse's message in the words of the command line, where it is of a known kind.

    Args:
        message: in one line.
        command: which was given, if any.
        actions: of the command's parsers.
    """
    if match := re.search(r"argument command: invalid choice: '(.*?)' \(choose", message):
        hint = did_you_mean(match[1], COMMANDS)
        return f"unknown command {match[1]!r}{hint}; the commands: {', '.join(COMMANDS)}"
    if re.match(r'expected "command" to be one of', message):
        return f"a command is missing; the commands: {', '.join(COMMANDS)}"
    if match := re.match(r'expected "(?:\w+\.)?action" to be one of \{(.*?)\}', message):
        return f"crosslayer {command} needs one of: {match[1].replace(',', ', ')}"
    required = r"the following arguments are required: (.*)|Option '(.*)' is required but"
    if match := re.match(required, message):
        names = re.sub(r"[\w.]+\.", "", match[1] or match[2])
        return f"missing: {names}; see crosslayer {command} --help"
    match = re.search(r"unrecognized arguments: (--[^ =]+)", message, re.IGNORECASE)
    if match and command:
        return _unknown_option(match[1], command, actions)
    if match := re.match(r'Parser key "(\w+).*?": .*?(?:Got|Given) value: ?(.*)', message):
        for action in actions:
            if action.dest == match[1]:
                name = action.option_strings[0] if action.option_strings else match[1]
                hint = _SYNTAX_HINTS.get(get_origin(action._typehint), "").format(name)
                return describe_wrong_value(name, match[2], action._typehint) + hint
    return message


def _unknown_option(option: str, command: str, actions: list[Any]) -> str:
    """The message for an option that a command does not have."""
    if command in ("train", "compare"):
        from ..train.settings import YAML_ONLY

        key = option.removeprefix("--").replace("-", "_")
        if key in YAML_ONLY:
            return f"{key} has no option on the command line; set it in a recipe file"
    known = [name for action in actions for name in action.option_strings]
    return f"unknown option {option}{did_you_mean(option, known)}; see crosslayer {command} --help"
