"""An experiment as one YAML file: options of `Settings`, and the arms that are compared under them.

    # Paper: Title (Authors, year), arXiv 0000.00000, Table 1. Hardware, time, command.
    family: llama
    layers: 12
    arms:
    - prenorm
    - {name: MUDD, connection: mudd, parameters: 126e6, paper: {loss: 2.91}, lr: 1.0e-3}

An arm is a connection, or a mapping: its name, its connection, the parameters and results that the
paper states, and the options in which it differs from the other arms.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ..spec import make
from ..validation import check_choice, did_you_mean
from .settings import GROUP_OF_OPTION, Settings, parse_options
from .task import LANGUAGE, Task

Scale = Literal["full", "tiny"]
TINY_DIM, TINY_STEPS = 64, 160


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

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_row(cls, row: str | dict[str, Any]) -> "Arm":
        """The arm of a connection's spec, or of a mapping in a recipe.

        Raises:
            ValueError: an unknown key or connection, or a value of another type.
        """
        if isinstance(row, str):
            row = {"connection": row}
        if not isinstance(row, dict):
            raise ValueError(f"an arm is a connection or a mapping, got {row!r}")
        own_keys = {f.name for f in fields(cls)} - {"options"}
        for key in row.keys() - own_keys - GROUP_OF_OPTION.keys():
            hint = did_you_mean(str(key), [*own_keys, *GROUP_OF_OPTION])
            raise ValueError(f"unknown key {key!r} of an arm{hint}")
        if "connection" not in row:
            raise ValueError(f"an arm needs a connection, got {row}")

        connection = str(make(row["connection"]))
        name, reason, paper = (
            row.get("name", connection),
            row.get("reason", ""),
            row.get("paper", {}),
        )
        # YAML reads `no` as False and 2 as a number
        for key, text in (("name", name), ("reason", reason)):
            if not isinstance(text, str):
                raise ValueError(f"{key} of an arm must be text, got {text!r}")
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
        return float(value)  # YAML reads 405e6 as text
    except (TypeError, ValueError):
        raise ValueError(f"{name} of an arm must be a number, got {value!r}") from None


@dataclass
class Recipe:
    """Arms, and the options that they share.

    Args:
        arms: what is compared.
        options: shared options; an arm's own come before them.
        scale: "tiny" for a model small enough for a CPU, of the same structure.
        overrides: options that come before all others, for every arm: those of the command line.
        task: what the models are trained to do.
    """

    arms: list[Arm]
    options: dict[str, Any] = field(default_factory=dict)
    scale: Scale = "full"
    overrides: dict[str, Any] = field(default_factory=dict)
    task: Task = LANGUAGE

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two arms are called {name!r}; give each a name of its own")
        check_choice("scale", self.scale, dict.fromkeys(get_args(Scale)))

    def settings(self, arm: Arm | None = None) -> Settings:
        """The settings of an arm, or those that all arms share."""
        options = {**self.options, **(arm.options if arm else {})}
        if self.scale == "tiny":
            stated = Settings.from_options(**options).to_options()
            options |= _tiny_options(stated, self.task)
        return Settings.from_options(**{**options, **self.overrides})


def load_recipe(
    path: str | Path, scale: Scale = "full", task: Task = LANGUAGE, **overrides: Any
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
    import yaml

    path = Path(path)
    if not path.exists():
        siblings = [file.name for file in path.parent.glob("*.yaml")]
        raise ValueError(f"{path}: no such file{did_you_mean(path.name, siblings)}")
    try:
        options = yaml.safe_load(path.read_text("utf8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a recipe ({reason})") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path}: not a recipe, which is a mapping of options and `arms`")
    rows = options.pop("arms", ["prenorm"])
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: arms must be a list of at least one, got {rows!r}")

    arms = [Arm.from_row(row) for row in rows]
    try:
        options = parse_options(options)
        for arm in arms:
            arm.options = parse_options(arm.options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    recipe = Recipe(arms, options, scale, overrides, task)

    if scale == "tiny":
        for arm in arms:
            layers = Settings.from_options(**{**options, **arm.options}).model.layers
            tiny_layers = recipe.settings(arm).model.layers
            arm.connection = _shorten_connection(arm.connection, layers, tiny_layers)
    return recipe


def _tiny_options(stated: dict[str, Any], task: Task) -> dict[str, Any]:
    """A sixth of the layers, but at least 6; width 64 and all widths in proportion; the same
    structure otherwise.

    Args:
        stated: every option at full scale.
        task: for the options without which it would not run on any machine.
    """
    width_ratio = TINY_DIM / stated["dim"]
    heads = max(1, min(stated["heads"], 4))
    heads_ratio = heads / stated["heads"]
    model_config = {
        key: _scale_config_value(key, value, width_ratio, heads_ratio)
        for key, value in stated["model_config"].items()
        if key != "head_dim"
    }
    delay = round(stated["delay"] / stated["steps"] * TINY_STEPS)  # as late in the run
    ema = (
        None if stated["ema"] is None else 0.9
    )  # a longer average would still be the first weights
    return {
        "layers": max(min(6, stated["layers"]), stated["layers"] // 6),
        "dim": TINY_DIM,
        "heads": heads,
        "vocab": None,
        "model_config": model_config | task.tiny_model_config,
        "context": min(stated["context"], 128),
        "batch": 8,
        "accumulate": 1,
        "steps": TINY_STEPS,
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
    """A value of `model_config` for a narrower model."""
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
    return str(spec)
