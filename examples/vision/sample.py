"""Draw latents from a DiT that `examples.vision.train --arm` has trained.

python -m examples.vision.sample OUT/model --classes 207 360 --out samples.npz

With `ema` the saved weights, and so the samples, are those of the moving average. A latent divided
by 0.18215 is what Stable Diffusion's autoencoder decodes.
"""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosslayer.cli.options import OneLineParser
from crosslayer.errors import error_in_one_line
from crosslayer.files import read_json
from crosslayer.hf import connect
from examples.vision.models import make_dit
from examples.vision.tasks import SIGNAL_VARIANCE


def load_dit(folder: Path) -> Any:
    """The DiT of a folder, with its connection and its norms of q and k.

    Raises:
        ValueError: the folder has no such model.
    """
    from diffusers import DiTTransformer2DModel
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_json(folder / "config.json")
    try:
        weights = load_file(folder / "diffusion_pytorch_model.safetensors")
        names = inspect.signature(DiTTransformer2DModel).parameters
        has_qk_norm = any("norm_q" in name for name in weights)
        model = make_dit(
            has_qk_norm, torch.float32, **{name: config[name] for name in names if name in config}
        )
        connect(model, config["crosslayer"]).load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder}: not a model of examples.vision.train ({error})") from None
    return model.eval()


@torch.no_grad()
def sample_latents(
    model: Any, classes: list[int], steps: int = 250, guidance: float = 1.5, seed: int = 0
) -> Tensor:
    """Latents of the given classes, by DDPM (arXiv 2006.11239) with classifier-free guidance.

    Args:
        model: of `load_dit`.
        classes: class of each latent.
        steps: of the 1000 that the model was trained with, evenly spaced.
        guidance: the noise is that without a class plus `guidance` times the difference that the
            class makes.
        seed: of the noise.

    Returns:
        [len(classes) C H W].
    """
    from diffusers import DDPMScheduler

    config = model.config
    num_classes = config.num_embeds_ada_norm
    for label in classes:
        if not 0 <= label < num_classes:
            raise ValueError(f"a class must be from 0 to {num_classes - 1}, got {label}")
    if not 1 <= steps <= len(SIGNAL_VARIANCE):
        raise ValueError(f"steps must be from 1 to {len(SIGNAL_VARIANCE)}, got {steps}")

    # the variance is fixed: the model's own, in its other output channels, was not trained
    scheduler = DDPMScheduler(beta_start=1e-4, beta_end=0.02, clip_sample=False)
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(seed)
    channels, size = config.in_channels, config.sample_size
    x = torch.randn(len(classes), channels, size, size, generator=generator)
    labels = torch.tensor([*classes, *[num_classes] * len(classes)])  # the last is "no class"
    for t in scheduler.timesteps:
        doubled = torch.cat([x, x])
        noise = model(doubled, timestep=t.expand(len(doubled)), class_labels=labels).sample
        with_class, without_class = noise[:, :channels].chunk(2)
        noise = without_class + guidance * (with_class - without_class)
        x = scheduler.step(noise, t, x, generator=generator).prev_sample
    return x


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m examples.vision.sample", description=__doc__)
    parser.add_argument("model", type=Path, help="OUT/model of examples.vision.train --arm")
    parser.add_argument("--classes", type=int, nargs="+", default=[0], help="one a latent")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--guidance", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("samples.npz"))
    try:
        options = parser.parse_args(arguments)
        if options.out.suffix != ".npz" or options.out.exists() or not options.out.parent.is_dir():
            raise ValueError(f"--out must be a new .npz file in a folder, got {options.out}")
        x = sample_latents(
            load_dit(options.model), options.classes, options.steps, options.guidance, options.seed
        )
        np.savez(options.out, x=x.numpy(), y=np.array(options.classes))
    except (ValueError, OSError) as error:
        print(f"vision: {error_in_one_line(error)}", file=sys.stderr)
        return 1
    print(f"{len(x)} latents: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
