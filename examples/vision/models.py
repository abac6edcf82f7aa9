"""The backbones: transformers' ViT and diffusers' DiT, with what the papers add to them."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, ViTConfig, ViTModel, ViTPreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.models.vit.modeling_vit import ViTPatchEmbeddings

from crosslayer.validation import did_you_mean


class MeanPooledViT(ViTPreTrainedModel):
    """A ViT without a class token: the head reads the mean of the patches' final hidden states."""

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.vit.embeddings = PatchesAlone(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        patches = self.vit(pixel_values).last_hidden_state  # [B N D]
        return ImageClassifierOutput(logits=self.classifier(patches.mean(1)))


class PatchesAlone(nn.Module):
    """The embeddings of a ViT without a class token: patches plus positions."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.patch_embeddings = ViTPatchEmbeddings(config)
        positions = torch.empty(1, self.patch_embeddings.num_patches, config.hidden_size)
        nn.init.trunc_normal_(positions, std=config.initializer_range)
        self.position_embeddings = nn.Parameter(positions)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor, **unused: Any) -> Tensor:
        return self.dropout(self.patch_embeddings(pixel_values) + self.position_embeddings)


def make_vit(config: ViTConfig, positions: str, pooling: str, dtype: torch.dtype) -> Any:
    """A ViT for classification with random weights.

    Args:
        config: its `num_labels` is the number of classes.
        positions: "learned"; or "sincos", fixed.
        pooling: what the head reads: the "class token", or the "mean" of the patches.
        dtype: of the parameters.

    Raises:
        ValueError: the width has no sin-cos positions.
    """
    if pooling == "mean":
        model = MeanPooledViT._from_config(config, dtype=dtype)
    else:
        model = AutoModelForImageClassification.from_config(config, dtype=dtype)
    if positions == "sincos":
        fix_positions(model.vit.embeddings, config.hidden_size)
    return model


def fix_positions(embeddings: Any, dim: int) -> None:
    """Replace the learned positions of a ViT's embeddings by frozen `sincos_positions`.

    A class token gets the position 0, as in Big Vision.
    """
    learned = embeddings.position_embeddings
    patch_embeddings = embeddings.patch_embeddings
    (height, width), (patch_height, patch_width) = (
        patch_embeddings.image_size,
        patch_embeddings.patch_size,
    )
    positions = sincos_positions(height // patch_height, width // patch_width, dim)
    has_class_token = learned.shape[1] > len(positions)
    if has_class_token:
        positions = torch.cat([torch.zeros(1, dim), positions])
    positions = positions[None].to(learned)
    embeddings.position_embeddings = nn.Parameter(positions, requires_grad=False)


def sincos_positions(height: int, width: int, dim: int) -> Tensor:
    """Fixed positions in two dimensions, as in MoCo v3 (arXiv 2104.02057) and Big Vision.

    The patch in row y and column x gets sin(x·ω), cos(x·ω), sin(y·ω) and cos(y·ω), each for the
    dim / 4 frequencies ω from 1 to 1/10000 in a geometric sequence.

    Args:
        height: number of rows of patches.
        width: number of columns.
        dim: width of the stream, a multiple of 4.

    Returns:
        [height · width, dim] float32, row by row.

    Raises:
        ValueError: `dim` is no multiple of 4, or below 8.
    """
    if dim % 4 or dim < 8:
        raise ValueError(f"sin-cos positions need a width of 8, 12, 16, …, got {dim}")
    exponents = torch.arange(dim // 4, dtype=torch.float64) / (dim // 4 - 1)
    frequencies = 10000.0**-exponents
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    x_angles = x.flatten()[:, None] * frequencies
    y_angles = y.flatten()[:, None] * frequencies
    parts = (x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos())
    return torch.cat(parts, 1).float()


def make_dit(qk_norm: bool, dtype: torch.dtype, **config: Any) -> Any:
    """diffusers' DiT with random weights.

    Args:
        qk_norm: whether each head's q and k pass a LayerNorm (arXiv 2309.14322).
        dtype: of the parameters.
        config: arguments of `DiTTransformer2DModel`.
    """
    from diffusers import DiTTransformer2DModel

    known = inspect.signature(DiTTransformer2DModel).parameters
    for key in config:
        if key not in known:
            raise ValueError(f"DiT's config has no key {key!r}{did_you_mean(key, known)}")
    dit = DiTTransformer2DModel(**config)
    if dit.out_channels < dit.config.in_channels:
        raise ValueError(
            f"out_channels must be at least in_channels, {dit.config.in_channels}, "
            f"got {dit.out_channels}"
        )
    if qk_norm:
        for block in dit.transformer_blocks:
            # diffusers' attention applies these two where they are set; its DiT has no option
            block.attn1.norm_q = nn.LayerNorm(dit.config.attention_head_dim)
            block.attn1.norm_k = nn.LayerNorm(dit.config.attention_head_dim)
    return dit if dit.dtype == dtype else dit.to(dtype)
