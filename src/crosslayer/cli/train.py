"""`crosslayer train`: one arm, at any size, on one process or on all that torchrun started."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..validation import did_you_mean
from .console import (
    add_settings,
    first_rank,
    make_console,
    make_parser,
    progress_bars,
    recipe_of,
    silence_libraries,
)

DEFAULTS = False  # between an option's default and what is given there is a recipe


def parser() -> Any:
    command = make_parser(
        "Train one arm of a recipe, or one connection. On several GPUs: torchrun --nproc-per-node 8 -m crosslayer "
        "train RECIPE; on several nodes, on each: torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29400 -m crosslayer train RECIPE. The same command goes on from its last checkpoint."
    )
    command.add_argument(
        "recipe", nargs="?", type=str | None, default=None, help="a .yaml file of arms and options"
    )
    command.add_argument(
        "--arm", type=str | None, default=None, help="a name in the recipe, or a connection"
    )
    command.add_argument(
        "--scale",
        type=str,
        default="full",
        help="tiny: a recipe's structure, small enough for a CPU",
    )
    command.add_argument(
        "--seed", type=int, default=0, help="of the body's weights and of the order of the data"
    )
    command.add_argument(
        "--out", type=str | None, default=None, help="folder of checkpoints, metrics and the model"
    )
    add_settings(command)
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..files import write_text_atomic
    from ..train.compare import describe_environment
    from ..train.export import save_model
    from ..train.parallel import shutdown_distributed
    from ..train.task import find_task
    from ..train.trainer import Diverged, Stopped, train

    console = make_console()
    recipe, seed = recipe_of(options, [options.get("arm") or "prenorm"]), options.get("seed", 0)
    arm = chosen(recipe, options)
    settings = recipe.settings(arm)
    identity = json.dumps([settings.identity(), arm.connection, seed], sort_keys=True)
    folder = Path(
        options.get("out") or f"train-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    )
    free(folder)
    try:
        with progress_bars(console) as watcher:
            watch = watcher(arm.name, settings)
            examples = find_task(settings.model).examples(settings)
            row, model, fabric = train(settings, arm, seed, examples, watch, folder)
    except Stopped as stop:
        if first_rank():
            console.print(f"{stop}. The same command goes on from there.", soft_wrap=True)
        return 130
    except Diverged as end:
        raise ValueError(str(end)) from None
    save_model(fabric, model, folder / "model", examples.tokenizer)
    if fabric.is_global_zero:
        result = {
            "environment": describe_environment(),
            "settings": settings.flat(),
            "paper": arm.paper,
            **row,
        }
        write_text_atomic(folder / "result.json", json.dumps(result, indent=1))
        losses = ", ".join(
            f"{name} {key} {v:.4f}"
            for name, found in row["valid"].items()
            for key, v in found.items()
        )
        if row["skipped"]:
            console.print(f"The batches of {len(row['skipped'])} unstable steps were skipped.")
        console.print(f"{arm.name}: {losses}. Model: {folder / 'model'}", soft_wrap=True)
    shutdown_distributed()
    return 0


def free(folder: Path) -> None:
    """Refuse a folder in which something else would be replaced: a comparison, or a model of another origin."""
    from ..train.compare import RESULTS
    from ..train.metrics_log import FILE

    if (folder / RESULTS).exists() or (
        (folder / "model").exists() and not (folder / FILE).exists()
    ):
        raise ValueError(
            f"{folder}: holds a comparison, or a model that no run wrote there; choose another --out"
        )


def chosen(recipe: Any, options: Any) -> Any:
    """The arm that was asked for; of a recipe with one, that one."""
    from ..train.recipe import Arm

    name, names = options.get("arm"), [arm.name for arm in recipe.arms]
    if name in names:
        return recipe.arms[names.index(name)]
    if name is not None:
        try:
            return Arm.of(name)
        except ValueError as error:
            raise ValueError(
                f"{error}; the recipe's arms are {', '.join(names)}{did_you_mean(name, names)}"
            ) from None
    if len(names) > 1:
        raise ValueError(f"choose one of the recipe's arms with --arm: {', '.join(names)}")
    return recipe.arms[0]
