"""The options of the commands: their parsers, and what the given values mean."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import torch

from ..methods import available
from ..validation import did_you_mean, parse_dtype

if TYPE_CHECKING:
    from ..train.recipe import Arm, Recipe

# Belongs to the default learning rate, which is several times the papers': most connections do
# better with a tenth of it for their own parameters (docs/training.md).
_WITH_DEFAULT_RATE = {"connection_lr_scale": 0.1}
DEFAULT_ARMS = ["prenorm", "denseformer", "mudd", "hyper", "attnres", "mgr"]


class OneLineParser(argparse.ArgumentParser):
    """argparse's parser for benchmarks and examples: it raises its errors, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def make_parser(description: str) -> Any:
    """A parser of jsonargparse that raises its errors. Options cannot be abbreviated."""
    from jsonargparse import ArgumentParser

    return ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)


def add_specs(parser: Any, what: str = "connections") -> None:
    """The option --arms, of one or several connections. what: the help's words for them."""
    parser.add_argument(
        "--arms",
        nargs="+",
        default=DEFAULT_ARMS,
        type=str,
        help=f'{what}, separated by spaces or commas, like prenorm "mudd(dilation=2)"; known: '
        + ", ".join(available()),
    )


def parse_specs(words: Sequence[str]) -> list[str]:
    """The connections among the words of --arms.

    Raises:
        ValueError: there is none.
    """
    from ..spec import split_specs

    specs = split_specs(" ".join(words))
    if not specs:
        raise ValueError(f"--arms names no connection; known: {', '.join(available())}")
    return specs


def add_recipe(parser: Any) -> None:
    """The argument RECIPE and the option --scale."""
    parser.add_argument(
        "recipe",
        nargs="?",
        type=str,
        default=None,
        help="a .yaml file of arms and options. The options replace the defaults below",
    )
    parser.add_argument(
        "--scale",
        type=str,
        default="full",
        help="full, or tiny: a model of the recipe's structure, small enough for a CPU",
    )


def add_settings(parser: Any) -> None:
    """The options of `Settings` in their groups, but those of `YAML_ONLY`.

    `save_every` is --save-every.
    """
    import docstring_parser

    from ..train.settings import DEFAULT_OPTIONS, SETTINGS_GROUPS, YAML_ONLY

    for settings_group in SETTINGS_GROUPS:
        doc = docstring_parser.parse(settings_group.__doc__)
        help_texts = {param.arg_name: param.description for param in doc.params}
        types = get_type_hints(settings_group)
        title = (doc.short_description or "").partition(".")[0]
        group = parser.add_argument_group(title)
        for option in fields(settings_group):
            if option.name in YAML_ONLY:
                continue
            group.add_argument(
                "--" + option.name.replace("_", "-"),
                type=types[option.name],
                default=DEFAULT_OPTIONS[option.name],
                help=help_texts[option.name],
            )


def recipe_from_options(options: Any, arms: Sequence[str]) -> "Recipe":
    """The recipe of the command line: that of a file, or one of these arms.

    Args:
        options: the given ones alone, without defaults. Options of `Settings` override the file's.
        arms: if neither a file nor --arms is given.

    Raises:
        ValueError: an option has a value that it cannot have, or needs a file.
    """
    from ..train.recipe import Arm, Recipe, load_recipe
    from ..train.settings import GROUP_OF_OPTION

    overrides = {name: options[name] for name in GROUP_OF_OPTION if name in options}
    if options.get("recipe") is None:
        if "scale" in options:
            raise ValueError(
                "--scale needs a recipe; without one, use options like --layers and --dim"
            )
        specs = parse_specs(options.get("arms", arms))
        shared = {} if "lr" in overrides else dict(_WITH_DEFAULT_RATE)
        return Recipe(_unique_arms(map(Arm.from_row, specs)), shared, overrides=overrides)

    recipe = load_recipe(options.recipe, options.get("scale", "full"), **overrides)
    if "arms" in options:
        names = {arm.name for arm in recipe.arms}
        chosen = []
        for word in options.arms:
            # the name of an arm may have spaces and commas
            specs = [word] if word in names else parse_specs([word])
            chosen += [find_arm(recipe, spec, word) for spec in specs]
        recipe.arms = _unique_arms(chosen)
    return recipe


def find_arm(recipe: "Recipe", name: str, word: str = "") -> "Arm":
    """The recipe's arm of this name, or an arm of this connection.

    Args:
        recipe: that the arm is searched in.
        name: of an arm or of a connection.
        word: what was typed, of which the name may be a part.

    Raises:
        ValueError: there is no such arm and no such connection. The message names the arms.
    """
    from ..train.recipe import Arm

    arms = {arm.name: arm for arm in recipe.arms}
    if name in arms:
        return arms[name]
    try:
        return Arm.from_row(name)
    except ValueError as error:
        hint = did_you_mean(name, arms) or did_you_mean(word, arms)
        raise ValueError(f"{error}; the recipe's arms are {', '.join(arms)}{hint}") from None


def _unique_arms(arms: Iterable["Arm"]) -> list["Arm"]:
    return list({arm.name: arm for arm in arms}.values())


def add_model(command: Any) -> None:
    """Add the positional argument of the commands that open one model."""
    command.add_argument(
        "model",
        type=str,
        help="a folder (connected model, transformers model or published checkpoint) or a Hub name",
    )


def add_model_options(command: Any) -> None:
    """Add how a model is opened: --tokenizer, --device and --dtype."""
    command.add_argument(
        "--tokenizer",
        type=str,
        default=None,
        help="folder, tokenizer.json, Hub name or bytes; default: the model's own",
    )
    command.add_argument(
        "--device", type=str, default=None, help="cuda or cpu; default: a GPU if available"
    )
    command.add_argument(
        "--dtype", type=str, default="auto", help="dtype of the weights; default: as saved"
    )


def parse_model_dtype(name: str) -> torch.dtype | str:
    """The dtype called `name`, or "auto" for that of the saved weights."""
    return name if name == "auto" else parse_dtype(name)


def choose_device(name: str | None) -> torch.device:
    """The device called `name`, or a GPU where there is one and no name is given.

    Raises:
        ValueError: torch cannot use the device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).tolist()  # the meta device has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # torch built without the device asserts, and another backend's message fills a page
        reason = re.split(r"[.:] ", str(error).splitlines()[0])[0]
        raise ValueError(f"cannot use the device {name!r} ({reason})") from error
    return device
