"""An experiment as one YAML file: options of `Settings`, and the arms that are compared under them.

    # Paper: Title (Authors, year), arXiv 0000.00000, Table 1. Hardware, time, command.
    family: llama
    layers: 12
    lr: 4.0e-4
    arms:
    - prenorm
    - {name: MUDD, connection: mudd, parameters: 126e6, paper: {loss: 2.91}, lr: 1.0e-3}

An arm is a connection, or a mapping: its name, its connection, the parameters and results that the
paper states, and the options in which it differs from the other arms.
"""

import math
import reprlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from ..errors import error_in_one_line
from ..spec import make
from ..validation import check_choice, check_plain, did_you_mean
from .settings import GROUP_OF_OPTION, NEW_BACKBONE_OPTIONS, Settings, parse_options
from .task import LANGUAGE_TASK, TrainingTask

Scale = Literal["full", "tiny"]
_TINY_DIM = 64
_TINY_STEPS = 160


@dataclass
class Arm:
    """One row of an experiment.

    Args:
        name: in tables; by default the connection.
        connection: the spec, like "mudd(dilation=2)".
        parameters: of the whole model, as the paper counts them.
        reason: why our count differs by more than 1 %, if it does.
        paper: results that the paper states, by name.
        options: options of `Settings` in which the arm differs.
    """

    name: str
    connection: str
    parameters: float | None = None
    reason: str = ""
    paper: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_row(cls, row: str | dict[str, Any]) -> "Arm":
        """The arm of a connection's spec, or of a mapping in a recipe.

        Raises:
            ValueError: an unknown key or connection, or a value of another type.
        """
        if isinstance(row, str):
            row = {"connection": row}
        if not isinstance(row, dict):
            raise ValueError(f"an arm is a connection or a mapping, got {reprlib.repr(row)}")
        own_keys = {f.name for f in fields(cls)} - {"options"}
        for key in row.keys() - own_keys - GROUP_OF_OPTION.keys():
            hint = did_you_mean(str(key), [*own_keys, *GROUP_OF_OPTION])
            raise ValueError(f"unknown key {key!r} of an arm{hint}")
        if "connection" not in row:
            raise ValueError(f"an arm needs a connection, got {reprlib.repr(row)}")

        connection = str(make(row["connection"]))
        name = row.get("name", connection)
        reason = row.get("reason", "")
        paper = row.get("paper", {})
        # YAML reads `no` as False and 2 as a number
        for key, text in (("name", name), ("reason", reason)):
            if not isinstance(text, str) or not text.isprintable():
                raise ValueError(f"{key} of an arm must be a line of text, got {text!r}")
        if not name.strip():
            raise ValueError(f"name of an arm must not be empty, got {name!r}")
        if not isinstance(paper, dict):
            raise ValueError(f"paper of an arm must be a mapping, got {paper!r}")
        parameters = row.get("parameters")
        if parameters is not None:
            parameters = _parse_number("parameters", parameters)
        return cls(
            name=name,
            connection=connection,
            parameters=parameters,
            reason=reason,
            paper={key: _parse_number(f"paper's {key}", value) for key, value in paper.items()},
            options={key: value for key, value in row.items() if key not in own_keys},
        )


def _parse_number(name: str, value: Any) -> float:
    try:
        number = float(value)  # YAML reads 405e6 as text
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} of an arm must be a number, got {reprlib.repr(value)}")
    return number


@dataclass
class Recipe:
    """Arms, and the options that they share.

    Args:
        arms: what is compared.
        options: shared options, which an arm's own override.
        scale: "tiny" for a model small enough for a CPU, of the same structure.
        overrides: options that override all others, for every arm: those of the command line.
        task: what the models are trained to do.
    """

    arms: list[Arm]
    options: dict[str, Any] = field(default_factory=dict)
    scale: Scale = "full"
    overrides: dict[str, Any] = field(default_factory=dict)
    task: TrainingTask = LANGUAGE_TASK

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two arms are called {name!r}; give each another name")
        check_choice("scale", self.scale, dict.fromkeys(get_args(Scale)))

    def settings(self, arm: Arm | None = None) -> Settings:
        """The settings of an arm, or those that all arms share.

        Raises:
            ValueError: an option is unknown, has a value that it cannot have, or is a pretrained
                model where the scale is tiny.
        """
        options = _join_options(self.options, arm.options if arm else {})
        if self.scale == "tiny":
            pretrained = _join_options(options, self.overrides).get("pretrained")
            if pretrained is not None:
                raise ValueError(
                    "--scale tiny builds a small model with random weights, which excludes the "
                    f"pretrained model {pretrained}"
                )
            stated = Settings.from_options(**options).to_options()
            options |= _tiny_options(stated, self.task)
        return Settings.from_options(**_join_options(options, self.overrides))


def _join_options(options: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Merged options: the later ones override the others.

    A pretrained model among these replaces the backbone and the tokenizer of the others.
    """
    if later.get("pretrained") is not None:
        replaced = {*NEW_BACKBONE_OPTIONS, "tokenizer"}
        options = {name: value for name, value in options.items() if name not in replaced}
    return {**options, **later}


def load_recipe(
    path: str | Path, scale: Scale = "full", task: TrainingTask = LANGUAGE_TASK, **overrides: Any
) -> Recipe:
    """Read a recipe.

    Args:
        path: of the .yaml file.
        scale: "tiny" for a small model of the same structure.
        task: what the models are trained to do.
        overrides: options that hold for every arm, whatever the file says.

    Raises:
        ValueError: the file cannot be read, or it has an unknown key or a value that is not
            allowed.
    """
    path = Path(path)
    if not path.exists():
        siblings = [file.name for file in path.parent.glob("*.yaml")]
        hint = "" if path.suffix else "; connections are named by --arm, or --arms of compare"
        raise ValueError(f"{path}: no such file{did_you_mean(path.name, siblings)}{hint}")
    options = _read_yaml(path)
    rows = options.pop("arms", ["prenorm"])
    try:
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"arms must be a list of at least one, got {reprlib.repr(rows)}")
        arms = [Arm.from_row(row) for row in rows]
        options = parse_options(options)
        for arm in arms:
            arm.options = parse_options(arm.options)
            Settings.from_options(**_join_options(options, arm.options))
        recipe = Recipe(arms, options, scale, overrides, task)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None

    if scale == "tiny":
        for arm in arms:
            layers = Settings.from_options(**_join_options(options, arm.options)).model.layers
            tiny_layers = recipe.settings(arm).model.layers
            arm.connection = _shorten_connection(arm.connection, layers, tiny_layers)
    return recipe


class _RecipeLoader(yaml.SafeLoader):
    """Refuses keys that YAML reads as something else than text, like `yes`, and repeated ones."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            place = f"the key {reprlib.repr(key.value)} in line {key.start_mark.line + 1}"
            if not key.tag.endswith(":str"):
                raise ValueError(f"{place} is not text")
            if key.value in seen:
                raise ValueError(f"{place} is repeated")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a recipe's file, of text, numbers, lists and mappings alone."""
    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        options = yaml.load(path.read_text("utf8"), _RecipeLoader)
        check_plain("the file", options)
    except RecursionError:
        raise ValueError(f"{path}: cannot be read as a recipe (nested too deep)") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error_in_one_line(error)
        raise ValueError(f"{path}: cannot be read as a recipe ({reason})") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path}: not a recipe, which is a mapping of options and `arms`")
    return options


def _tiny_options(stated: dict[str, Any], task: TrainingTask) -> dict[str, Any]:
    """A sixth of the layers, but at least 6; width 64 and all widths in proportion; the same
    structure otherwise.

    Args:
        stated: every option at full scale.
        task: for the options without which it would not run on any machine.
    """
    width_ratio = _TINY_DIM / stated["dim"]
    heads = next(count for count in (4, 2, 1) if count <= stated["heads"])  # divide the width
    heads_ratio = heads / stated["heads"]
    model_config = {
        key: _scale_config_value(key, value, width_ratio, heads_ratio)
        for key, value in stated["model_config"].items()
        if key != "head_dim"
    }
    delay = round(stated["delay"] / stated["steps"] * _TINY_STEPS)  # as late in the run
    # in so few steps a longer average would still be the first weights
    ema = None if stated["ema"] is None else 0.9
    return {
        "layers": max(min(6, stated["layers"]), stated["layers"] // 6),
        "dim": _TINY_DIM,
        "heads": heads,
        "vocab": None,
        "model_config": model_config | task.tiny_model_config,
        "context": min(stated["context"], 128),
        "batch": 8,
        "accumulate": 1,
        "steps": _TINY_STEPS,
        "warmup": 0.1,
        "delay": delay,
        "ema": ema,
        "precision": "32-true",
        "strategy": "ddp",
        "compile": "none",
        "workers": 0,
        "save_every": 0,
        "loggers": [],
        **task.tiny_options,
    }


def _scale_config_value(key: str, value: Any, width_ratio: float, heads_ratio: float) -> Any:
    """Scale a width or a number of heads in `model_config`; return any other value unchanged."""
    if not isinstance(value, int | float):
        return value
    if key.endswith(("intermediate_size", "n_inner")) and value:
        return max(16, round(value * width_ratio / 16) * 16)
    if key == "num_key_value_heads":
        return max(1, round(value * heads_ratio))
    return value


def _shorten_connection(connection: str, layers: int, tiny_layers: int) -> str:
    """A connection for fewer layers: the same number of blocks, and steps along depth that fit at
    least twice.
    """
    spec = make(connection)
    for name, length in spec.options.items():
        if name == "block_size":
            spec.options[name] = max(1, round(length * tiny_layers / layers))
        elif name in ("dilation", "period", "window", "last_k") and isinstance(length, int):
            spec.options[name] = min(length, max(1, tiny_layers // 2))
    dilation = spec.options.get("dilation", 1)
    for name in ("window", "last_k"):
        length = spec.options.get(name)
        if dilation > 1 and isinstance(length, int):
            spec.options[name] = max(length, dilation + 1)  # else one block is left to average
    return str(spec)
