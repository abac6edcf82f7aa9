"""Two tasks for crosslayer's Trainer: classification with ViT, denoising with DiT."""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from crosslayer.files import expand_place
from crosslayer.hf.config import host_refusals, make_config
from crosslayer.losses import cross_entropy
from crosslayer.train.settings import DataSettings, ModelSettings
from crosslayer.train.task import Examples, TrainingTask
from crosslayer.validation import check_option_type, check_positive, did_you_mean
from examples.vision.data import load_images, load_latents
from examples.vision.models import make_dit, make_vit

# Share of the signal's variance that is left after t steps of DDPM's linear schedule.
SIGNAL_VARIANCE = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)


@dataclass
class VitOptions:
    """A recipe's `task_options` for ViT.

    Args:
        augmentation: of the training images.
        randaugment_level: strength of RandAugment, 0 to 20; None for none.
        mixup_alpha: of Mixup; None for none.
        positions: "learned"; or "sincos", fixed.
        pooling: what the head reads: the "class token", or the "mean" of the patches.
    """

    augmentation: Literal["none", "flip", "random resized crop"] = "none"
    randaugment_level: float | None = None
    mixup_alpha: float | None = None
    positions: Literal["learned", "sincos"] = "learned"
    pooling: Literal["class token", "mean"] = "class token"


@dataclass
class DitOptions:
    """A recipe's `task_options` for DiT.

    Args:
        augmentation: of the training latents.
        qk_norm: whether each head's q and k pass a LayerNorm.
    """

    augmentation: Literal["none", "flip"] = "none"
    qk_norm: bool = False


Options = TypeVar("Options", VitOptions, DitOptions)


def read_task_options(kind: type[Options], data: DataSettings) -> Options:
    """The task's options of a recipe.

    Raises:
        ValueError: an option is unknown or has another type, or the recipe has a `valid`.
    """
    annotations = get_type_hints(kind)
    for name, value in data.task_options.items():
        if name not in annotations:
            hint = did_you_mean(name, annotations)
            raise ValueError(f"unknown task option {name!r}{hint}; known: {', '.join(annotations)}")
        check_option_type(f"task option {name}", value, annotations[name])
    if data.valid:
        raise ValueError("the validation images belong to --data; a recipe has no `valid` here")
    return kind(**data.task_options)


def load_vit_examples(data: DataSettings, model_config: dict[str, Any]) -> Examples:
    """Images of the model's size, from a folder or an .npz."""
    options = read_task_options(VitOptions, data)
    return load_images(
        expand_place(data.data),
        size=model_config.get("image_size", 224),
        channels=model_config.get("num_channels", 3),
        augmentation=options.augmentation,
        randaugment_level=options.randaugment_level,
        mixup_alpha=options.mixup_alpha,
    )


def load_dit_examples(data: DataSettings, model_config: dict[str, Any]) -> Examples:
    """Latents of the model's size, from an .npz."""
    options = read_task_options(DitOptions, data)
    size = model_config.get("sample_size", 32)
    channels = model_config.get("in_channels", 4)
    return load_latents(expand_place(data.data), size, channels, options.augmentation)


def build_vit(
    model: ModelSettings, data: DataSettings, num_classes: int, dtype: torch.dtype
) -> nn.Module:
    """transformers' ViT with random weights and a head of `num_classes` classes."""
    options = read_task_options(VitOptions, data)
    check_patches(model.model_config, "image_size", 224, 16)
    config = make_config(
        model.family, model.layers, model.dim, model.heads, num_classes, model.model_config
    )
    config.num_labels = num_classes
    with host_refusals(f"{model.family} refuses model_config {model.model_config}"):
        return make_vit(config, options.positions, options.pooling, dtype)


def build_dit(
    model: ModelSettings, data: DataSettings, num_classes: int, dtype: torch.dtype
) -> nn.Module:
    """diffusers' DiT with random weights, conditioned on `num_classes` classes."""
    options = read_task_options(DitOptions, data)
    check_patches(model.model_config, "sample_size", 32, 2)
    with host_refusals(f"{model.family} refuses model_config {model.model_config}"):
        return make_dit(
            options.qk_norm,
            dtype,
            num_layers=model.layers,
            num_attention_heads=model.heads,
            attention_head_dim=model.dim // model.heads,
            num_embeds_ada_norm=num_classes,
            **model.model_config,
        )


def check_patches(model_config: dict[str, Any], key: str, size: int, patch_size: int) -> None:
    """Raise a ValueError where images of the config's size have no whole number of patches.

    Args:
        model_config: of the recipe.
        key: of the height and width of an image or a latent.
        size: its default.
        patch_size: the default.
    """
    size = model_config.get(key, size)
    patch_size = model_config.get("patch_size", patch_size)
    check_positive(**{key: size, "patch_size": patch_size})
    if size % patch_size:
        raise ValueError(f"{key} must be a multiple of patch_size, got {size} and {patch_size}")


def classification_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy; of images that `mix_up` has mixed, with the shares of their two classes."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    losses = cross_entropy(logits, batch["labels"])
    if "share" in batch:
        other_losses = cross_entropy(logits, batch["other_labels"])
        losses = batch["share"] * losses + (1 - batch["share"]) * other_losses
    return losses.mean()


def evaluate_classifier(
    model: nn.Module, batch: dict[str, Tensor], indices: list[int]
) -> dict[str, Tensor]:
    """Cross-entropy and top-1 accuracy of each image."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    labels = batch["labels"]
    return {
        "loss": cross_entropy(logits, labels),
        "accuracy": (logits.argmax(-1) == labels).float(),
    }


def denoising_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["pixel_values"]
    t = torch.randint(len(SIGNAL_VARIANCE), (len(x),), device=x.device)
    return noise_errors(model, batch, t, torch.randn_like(x)).mean()


def evaluate_denoiser(
    model: nn.Module, batch: dict[str, Tensor], indices: list[int]
) -> dict[str, Tensor]:
    """The error of each latent. Its t and noise depend on its index alone, not on its batch."""
    x = batch["pixel_values"]
    steps, noises = [], []
    for index in indices:
        generator = torch.Generator().manual_seed(index)
        steps.append(torch.randint(len(SIGNAL_VARIANCE), (1,), generator=generator))
        noises.append(torch.randn(x.shape[1:], generator=generator))
    t = torch.cat(steps).to(x.device)
    return {"loss": noise_errors(model, batch, t, torch.stack(noises).to(x))}


def noise_errors(model: nn.Module, batch: dict[str, Tensor], t: Tensor, noise: Tensor) -> Tensor:
    """L_simple of DDPM (arXiv 2006.11239, Eq. 14): the mean squared error of the predicted noise.

    DiT's other output channels, a learned variance, serve sampling and are not trained here.

    Args:
        model: a DiT.
        batch: latents [B C H W] and labels [B].
        t: steps of the noise schedule, [B].
        noise: [B C H W].

    Returns:
        The error of each latent, [B].
    """
    x = batch["pixel_values"]
    variance = SIGNAL_VARIANCE.to(x.device)[t][:, None, None, None]
    noisy = variance.sqrt() * x + (1 - variance).sqrt() * noise
    predicted = model(noisy, timestep=t, class_labels=batch["labels"]).sample[:, : x.shape[1]]
    return (predicted.float() - noise).square().mean((1, 2, 3))


def count_images(batch: dict[str, Tensor]) -> int:
    return len(batch["labels"])


CLASSIFICATION = TrainingTask(
    load_examples=load_vit_examples,
    build_backbone=build_vit,
    loss=classification_loss,
    evaluate=evaluate_classifier,
    count_units=count_images,
    unit="images",
    loss_unit=lambda data: "nats per image",
    tiny_options={},
    tiny_model_config={},
)
DENOISING = CLASSIFICATION._replace(
    load_examples=load_dit_examples,
    build_backbone=build_dit,
    loss=denoising_loss,
    evaluate=evaluate_denoiser,
    loss_unit=lambda data: "squared error of the noise",
)
# by the recipe's `family`
TASKS: dict[str, Any] = {"vit": CLASSIFICATION, "DiTTransformer2DModel": DENOISING}
