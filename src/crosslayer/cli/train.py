"""`crosslayer train`: one arm, at any size, on one process or on all that torchrun started."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import check_no_file, write_json
from ..run_folders import (
    RUN_RESULT_FILE,
    TRAINED_MODEL_FOLDER,
    default_folder,
    is_comparison_folder,
    is_model_folder,
    is_run_folder,
)
from ..validation import check_seed
from .console import ProgressBars, hold_folder, is_rank_zero, make_console, silence_libraries
from .options import add_recipe, add_settings, find_arm, make_parser, recipe_from_options

if TYPE_CHECKING:
    from ..train.recipe import Arm, Recipe
    from ..train.run_state import RunResult
    from ..train.settings import Settings
    from ..train.task import Examples

DEFAULTS = False  # a recipe comes between an option's default and its given value


def parser() -> Any:
    command = make_parser(
        "Train one connection, or one arm of a recipe. "
        "On several GPUs: torchrun --nproc-per-node 8 -m crosslayer train RECIPE. On several "
        "nodes, on each: torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29400 -m crosslayer train RECIPE. The same command resumes from "
        "its last checkpoint."
    )
    add_recipe(command)
    command.add_argument(
        "--arm",
        type=str,
        default=None,
        help="an arm of the recipe, or a connection; default: the recipe's only arm, or prenorm",
    )
    command.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the initial weights and of the order of the data",
    )
    command.add_argument(
        "--out",
        type=str,
        default=None,
        help="folder of checkpoints, metrics and the model; default: train- and a hash of the "
        "settings",
    )
    add_settings(command)
    return command


def run(options: Any) -> int:
    silence_libraries()
    recipe = recipe_from_options(options, [options.get("arm") or "prenorm"])
    arm = choose_arm(recipe, options.get("arm"))
    seed = options.get("seed", 0)
    check_seed(seed)
    return train_and_export(recipe, arm, seed, options.get("out"))


def train_and_export(recipe: "Recipe", arm: "Arm", seed: int, out: str | None) -> int:
    """Train an arm with a progress bar, save model and result, print losses; the exit code."""
    from ..train.task import check_outside_data, load_examples

    settings = recipe.settings(arm)
    if out is None:
        folder = default_folder("train", [settings.fixed_options(), arm.connection, seed])
    else:
        folder = Path(out)
    _check_out_folder(folder)
    check_outside_data(folder, settings.data, recipe.task)
    examples = load_examples(settings, recipe.task)

    with hold_folder(folder):
        return _train_in_folder(recipe, arm, seed, examples, folder)


def _train_in_folder(
    recipe: "Recipe", arm: "Arm", seed: int, examples: "Examples", folder: Path
) -> int:
    from ..train.export import export_trained
    from ..train.parallel import shutdown_distributed
    from ..train.run import train_arm
    from ..train.trainer import RunDiverged, RunStopped

    console = make_console()
    settings = recipe.settings(arm)
    try:
        with ProgressBars(console, recipe.task.unit) as bars:
            show_step = partial(bars.show_step, arm.name, settings.optimization.steps)
            trainer = train_arm(settings, arm, seed, examples, recipe.task, folder, show_step)
        result = trainer.result()
    except RunStopped as stop:
        if is_rank_zero():
            console.print(f"{stop}. The same command resumes.")
        return 130
    except RunDiverged as error:
        raise ValueError(str(error)) from None

    is_new = bars.have_shown
    if is_new or not is_model_folder(folder / TRAINED_MODEL_FOLDER):
        export_trained(trainer, folder / TRAINED_MODEL_FOLDER)
    if trainer.fabric.is_global_zero:
        if is_new or not (folder / RUN_RESULT_FILE).exists():
            _write_result(folder, settings, arm, result)
        if not is_new:
            note = f"{folder}: the run had ended already; nothing was trained."
            console.print(note)
        passes = examples.epochs(settings.optimization.steps, settings.data.batch)
        notes = _result_notes(result, passes)
        notes.append(f"{arm.name}: {_losses_text(result)}. Model: {folder / TRAINED_MODEL_FOLDER}")
        for note in notes:
            console.print(note)
    shutdown_distributed()
    return 0


def _write_result(folder: Path, settings: "Settings", arm: "Arm", result: "RunResult") -> None:
    from ..train.comparison_results import describe_environment

    content = {
        "environment": describe_environment(),
        "settings": settings.to_options(),
        "paper": arm.paper,
        **asdict(result),
    }
    write_json(folder / RUN_RESULT_FILE, content)


def _result_notes(result: "RunResult", passes: float) -> list[str]:
    """What a reader of the losses must know.

    Args:
        result: of the run.
        passes: how often it saw its training data.
    """
    notes = []
    if result.skipped:
        notes.append(f"The batches of {len(result.skipped)} unstable steps were skipped.")
    if passes > 1:
        notes.append(f"The run saw its training data {passes:.1f} times.")
    return notes


def _losses_text(result: "RunResult") -> str:
    """Like "wiki loss 3.2101, wiki perplexity 24.7813"."""
    losses = []
    for name, values in result.valid.items():
        losses += [f"{name} {key} {value:.4f}" for key, value in values.items()]
    return ", ".join(losses)


def _check_out_folder(folder: Path) -> None:
    """Refuse a folder where a comparison, or a model of another origin, would be overwritten."""
    check_no_file(folder)
    has_other_model = (folder / TRAINED_MODEL_FOLDER).exists() and not is_run_folder(folder)
    if is_model_folder(folder):
        raise ValueError(f"{folder}: is a model's folder; choose another --out")
    if is_comparison_folder(folder) or has_other_model:
        raise ValueError(
            f"{folder}: holds a comparison, or a model that no run wrote there; "
            "choose another --out"
        )


def choose_arm(recipe: "Recipe", name: str | None) -> "Arm":
    """The recipe's arm of this name, or an arm of this connection; without a name, the only arm.

    Raises:
        ValueError: there is no such arm and no such connection, or no name for one of several arms.
    """
    if name is not None:
        return find_arm(recipe, name)
    if len(recipe.arms) > 1:
        listed = ", ".join(arm.name for arm in recipe.arms)
        raise ValueError(f"choose one of the recipe's arms with --arm: {listed}")
    return recipe.arms[0]
