"""An experiment as one YAML file: options of `Settings`, and the arms that are compared under them.

    # Paper: Title (Authors, year), arXiv 0000.00000, Table 1. Hardware, time, command.
    family: llama
    layers: 12
    arms:
    - prenorm
    - {name: MUDD, connection: mudd, parameters: 126e6, paper: {loss: 2.91}, lr: 1.0e-3}

An arm is a connection, or a row: its name, its connection, the parameters and results the paper gives for it, and any
option in which it differs from the rest.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..spec import make
from ..validation import did_you_mean
from .settings import OPTIONS, PARTS, Settings
from .task import LANGUAGE, find_task


@dataclass
class Arm:
    """One row of an experiment.

    Args:
        name: in tables; the connection where there is none.
        connection: like "mudd(dilation=2)".
        parameters: of the whole model, as the paper counts them.
        reason: why ours are more than 1 % away from that, where they are.
        paper: results the paper gives, by name.
        options: those of `Settings` in which the arm differs.
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
    def of(cls, row: str | dict[str, Any]) -> "Arm":
        """Of a connection, or of a row of a recipe.

        Raises:
            ValueError: an unknown key or connection.
        """
        if not isinstance(row, str | dict):
            raise ValueError(f"an arm is a connection or a mapping, got {row!r}")
        row = {"connection": row} if isinstance(row, str) else dict(row)
        known = {f.name for f in fields(cls)} - {"options"}
        for key in row.keys() - known - OPTIONS.keys():
            raise ValueError(
                f"unknown key {key!r} of an arm{did_you_mean(str(key), [*known, *OPTIONS])}"
            )
        for key, kind in (
            ("name", str),
            ("reason", str),
            ("paper", dict),
        ):  # YAML takes `no` and 2 for other than words
            if not isinstance(row.get(key, kind()), kind):
                raise ValueError(
                    f"{key} of an arm must be {'text' if kind is str else 'a mapping'}, got {row[key]!r}"
                )
        if "connection" not in row:
            raise ValueError(f"an arm needs a connection, got {row}")
        connection = str(make(row.pop("connection")))
        mine = {key: row.pop(key) for key in known & row.keys()}
        if "parameters" in mine:
            mine["parameters"] = number("parameters", mine["parameters"])
        if "paper" in mine:
            mine["paper"] = {
                name: number(f"paper's {name}", value) for name, value in mine["paper"].items()
            }
        return cls(**{"name": connection, **mine}, connection=connection, options=row)


def number(name: str, given: Any) -> float:
    try:
        return float(given)  # YAML takes 405e6 for a word
    except (TypeError, ValueError):
        raise ValueError(f"{name} of an arm must be a number, got {given!r}") from None


@dataclass
class Recipe:
    """Arms and what they share; the options that were given beside the file hold for every arm.

    Args:
        arms: what is compared.
        options: what they share.
        scale: full, or another name in `SCALES`.
        given: options that come before all others.
    """

    arms: list[Arm]
    options: dict[str, Any] = field(default_factory=dict)
    scale: str = "full"
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"two arms are called {twice!r}; a name tells which result is whose")
        if self.scale not in SCALES:
            raise ValueError(
                f"unknown scale {self.scale!r}{did_you_mean(self.scale, SCALES)}; known: {', '.join(SCALES)}"
            )

    def settings(self, arm: Arm | None = None) -> Settings:
        """An arm's settings, or those that all share."""
        options = {**self.options, **(arm.options if arm else {})}
        return Settings.of(
            **{**SCALES[self.scale](Settings.of(**options).flat(), options), **self.given}
        )


def load_recipe(path: str | Path, scale: str = "full", **given: Any) -> Recipe:
    """The recipe of a file.

    Args:
        path: of the .yaml file.
        scale: "tiny" for a small model of the same structure.
        given: options that hold for every arm, whatever the file says.

    Raises:
        ValueError: no such file, not YAML, or what it says is not as it should be.
    """
    import yaml
    from jsonargparse import ArgumentParser

    try:
        found = yaml.safe_load(Path(path).read_text("utf8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path}: cannot be read as a recipe ({' '.join(str(error).split())})"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a recipe, which is a mapping of options and `arms`")
    arms = found.pop("arms", ["prenorm"])
    if not isinstance(arms, list) or not arms:
        raise ValueError(f"{path}: arms must be a list of at least one, got {arms!r}")
    parser = ArgumentParser(exit_on_error=False)
    for part in PARTS:
        parser.add_class_arguments(part, None)

    def typed(options: dict[str, Any]) -> dict[str, Any]:
        for key in options.keys() - OPTIONS.keys():
            raise ValueError(f"{path}: unknown option {key!r}{did_you_mean(str(key), OPTIONS)}")
        try:
            return parser.parse_object(options, defaults=False).as_dict()
        except Exception as error:  # argparse's, whose message has several lines
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None

    rows, shared = [Arm.of(row) for row in arms], typed(found)
    for row in rows:
        row.options = typed(row.options)
    recipe = Recipe(rows, shared, scale, given)
    if scale != "full":
        for row in rows:
            layers = Settings.of(**{**shared, **row.options}).model.layers
            row.connection = shortened(row.connection, layers, recipe.settings(row).model.layers)
    return recipe


def full(options: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    return stated


def tiny(options: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """A sixth of the layers, at least 6; width 64, all widths in proportion; the rest of the structure as it is.

    The tokenizer is of bytes, so the body has no special tokens.
    """
    ratio = 64 / options["dim"]
    heads = max(1, min(options["heads"], 4))
    language = find_task(Settings.of(**options).model) is LANGUAGE
    body = {
        key: scaled(key, value, ratio, heads / options["heads"])
        for key, value in options["body"].items()
        if key != "head_dim"
    }
    if language:
        body |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    small = {
        "layers": max(min(6, options["layers"]), options["layers"] // 6), "dim": 64, "heads": heads, "vocab": None,
        "body": body, "tokenizer": "bytes", "valid": {}, "data": "stdlib", "context": min(options["context"], 128),
        "batch": 8, "accumulate": 1, "steps": 160, "warmup": 0.1, "delay": 0, "precision": "32-true",
        "strategy": "ddp", "compile": "none", "workers": 0, "save_every": 0, "loggers": [],
    }  # fmt: skip
    if options["delay"]:  # as late in the run as it was
        small["delay"] = round(options["delay"] / options["steps"] * small["steps"])
    if not language:  # there are no images that every machine has
        small["data"] = options["data"]
    return {**stated, **small}


def scaled(key: str, value: Any, width: float, heads: float) -> Any:
    """A key of the body's configuration in a narrower one."""
    if key.endswith(("intermediate_size", "n_inner", "expert_intermediate_size")) and value:
        return max(16, round(value * width / 16) * 16)
    if key == "num_key_value_heads":
        return max(1, round(value * heads))
    return value


def shortened(connection: str, before: int, after: int) -> str:
    """A connection in a body of fewer layers: as many blocks of it, and steps along depth that fit twice into it."""
    factory = make(connection)
    for name, length in factory.options.items():
        if name == "block_size":
            factory.options[name] = max(1, round(length * after / before))
        elif name in ("dilation", "period", "window", "last_k") and isinstance(length, int):
            factory.options[name] = min(length, max(1, after // 2))
    return str(factory)


SCALES = {"full": full, "tiny": tiny}
