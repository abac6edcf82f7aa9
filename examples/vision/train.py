"""Compare connections in a Vision Transformer or in DiT.

python -m examples.vision.train examples/vision/recipes/mudd_table9.yaml --data imagenet
python -m examples.vision.train RECIPE --data FOLDER_OR_NPZ --scale tiny --steps 20    # on a CPU
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from crosslayer.cli.options import OneLineParser

INSTALL = "pip install -e '.[train]' pillow diffusers"  # the README's


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m examples.vision.train", description=__doc__)
    parser.add_argument("recipe", type=Path, help="a .yaml file of examples/vision/recipes")
    parser.add_argument("--data", help="images: a folder with train/ and val/, or an .npz")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--steps", type=int, help="number of optimizer steps")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each connection")
    parser.add_argument("--arm", help="train this arm alone, and save its model in OUT/model")
    parser.add_argument("--out", help="folder of results.json and the report")
    try:
        return _compare(parser.parse_args(arguments))
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; from the root of a checkout: {INSTALL}"
    except (ValueError, OSError) as error:
        message = str(error)
        if message.startswith("Caught "):  # in a process that loads data, with its traceback
            message = message.splitlines()[-1].partition(": ")[2]
    print(f"vision: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _compare(options: argparse.Namespace) -> int:
    from crosslayer.cli.compare import compare_and_report
    from crosslayer.cli.console import silence_libraries
    from crosslayer.cli.train import choose_arm, train_and_export
    from crosslayer.train.recipe import load_recipe
    from crosslayer.validation import check_choice
    from examples.vision.tasks import TASKS

    if options.arm is not None and options.seeds != 1:
        raise ValueError("--arm trains one run; --seeds is for a comparison")
    silence_libraries()
    overrides = {name: getattr(options, name) for name in ("data", "steps")}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    family = load_recipe(options.recipe).options.get("family", "")
    task = check_choice("family", family, TASKS)
    recipe = load_recipe(options.recipe, options.scale, task, **overrides)
    if options.arm is not None:
        arm = choose_arm(recipe, options.arm)
        return train_and_export(recipe, arm, seed=0, out=options.out)
    return compare_and_report(recipe, options.seeds, options.out)


if __name__ == "__main__":
    sys.exit(main())
