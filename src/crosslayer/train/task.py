"""What a model is trained to do: its body, its examples, its loss, and how it is judged; one row a task."""

import math
from collections.abc import Callable
from os.path import expandvars
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.sampler import BatchSampler
from ..data.sources import HELD_OUT
from ..hf import connect
from ..hf.config import make_config
from ..spec import make
from .settings import Model, Settings


class Examples(NamedTuple):
    """What is trained on and judged by: map-style datasets of single examples."""

    train: Any
    valid: dict[str, Any]  # validation sets by name; the first is the one that counts
    classes: int  # tokens of the vocabulary, or classes of the images
    digest: str  # of all of it
    sizes: dict[str, int]  # in words: {"bytes to train on": …}
    bytes_per_token: dict[str, float]  # of the text of each validation set
    entropy: float | None = None  # order-0, of the first validation set's text, in bits a byte
    order: type[BatchSampler] = BatchSampler  # in which they are trained on
    tokenizer: Any = None


class Task(NamedTuple):
    examples: Callable[[Settings], Examples]
    bare: Callable[[Settings, int], nn.Module]  # the body, given the number of tokens or classes
    loss: Callable[[nn.Module, Any], Tensor]  # what is minimised
    judge: Callable[
        [nn.Module, Any, list[int]], dict[str, Tensor]
    ]  # of examples of these numbers, [B] each: "loss" …
    size: Callable[[Any], int]  # of a batch ...
    unit: str  # ... in tokens or images


def build_model(settings: Settings, arm: str, classes: int, seed: int) -> nn.Module:
    """The body with its connections; the body's weights depend on the seed alone.

    Args:
        settings: the body's among them.
        arm: its connection.
        classes: size of the tokenizer's vocabulary, or number of the images' classes.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    model = find_task(settings.model).bare(settings, settings.model.vocab or classes)
    return connect(model, str(make(arm)), reallocate=settings.model.reallocate)


def find_task(model: Model) -> Task:
    return TASKS.get(model.family, LANGUAGE)


def metrics(examples: Examples, judged: dict[str, dict[str, float]]) -> dict[str, float]:
    """What is known beside the first validation set's loss: perplexity, bits a byte, accuracy, and the other sets'."""
    found = {}
    for number, (name, values) in enumerate(judged.items()):
        label = f"{name} " if number else ""
        found.update(
            {label + key: value for key, value in values.items() if number or key != "loss"}
        )
        if (
            examples.tokenizer is not None and examples.tokenizer.definition
        ):  # of bytes nobody says it
            # of a run that went wrong it may be beyond any float
            found[f"{label}perplexity"] = (
                math.exp(values["loss"]) if values["loss"] < 700 else math.inf
            )
        if name in examples.bytes_per_token:
            found[f"{label}bits/byte"] = (
                values["loss"] / math.log(2) / examples.bytes_per_token[name]
            )
    return found


def text(settings: Settings) -> Examples:
    from ..data.corpus import load_corpus

    data = settings.data
    valid = {name: expandvars(source) for name, source in data.valid.items()}
    found = load_corpus(expandvars(data.data), data.context, expandvars(data.tokenizer), valid)
    first = next(iter(found.valid))
    sizes = {
        "bytes to train on": found.train.tokens.text_bytes,
        f"{'held out' if first == 'held-out' else f'of {first}'}": found.valid[
            first
        ].tokens.text_bytes,
    }
    rest = (found.vocab, found.digest, sizes, found.bytes_per_token, found.entropy[first])
    return Examples(found.train, found.valid, *rest, tokenizer=found.tokenizer)


def pictures(settings: Settings) -> Examples:
    from .images import MODES, Draws, images
    from .latents import latents

    data, body = settings.data, settings.model.body
    source = expandvars(data.data)
    size, channels = (
        next((body[key] for key in keys if key in body), default) for keys, default in SHAPES
    )
    if channels in MODES:
        valid = next(map(expandvars, data.valid.values()), None)
        found = images(source, size, channels, valid, data.augment)
    else:
        found = latents(source, size, channels, data.augment)
    sizes = {"images to train on": len(found.train), "held out": len(found.valid[HELD_OUT])}
    return Examples(
        found.train, found.valid, len(found.classes), found.digest, sizes, {}, order=Draws
    )


# what the families call an image's size and channels, and what they are where nothing is said
SHAPES = ((("image_size", "sample_size"), 224), (("num_channels", "in_channels"), 3))


def language_model(settings: Settings, vocab: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = config_of(settings.model, vocab)
    config.max_position_embeddings = settings.data.context
    return AutoModelForCausalLM.from_config(config, dtype=dtype_of(settings))


def classifier(settings: Settings, classes: int) -> nn.Module:
    from transformers import AutoModelForImageClassification

    config = config_of(settings.model, classes)
    config.num_labels = classes
    return AutoModelForImageClassification.from_config(config, dtype=dtype_of(settings))


def denoiser(settings: Settings, classes: int) -> nn.Module:
    import diffusers

    model = settings.model
    heads = {"num_attention_heads": model.heads, "attention_head_dim": model.dim // model.heads}
    make = getattr(diffusers, model.family)
    body = make(num_layers=model.layers, num_embeds_ada_norm=classes, **heads, **model.body)
    dtype = dtype_of(settings)
    return body if body.dtype == dtype else body.to(dtype)


def dtype_of(settings: Settings) -> torch.dtype:
    """Of the body's parameters; its connections' own are float32."""
    return torch.bfloat16 if settings.engine.precision == "bf16-true" else torch.float32


def config_of(model: Model, vocab: int) -> Any:
    return make_config(model.family, model.layers, model.dim, model.heads, vocab, model.body)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next token, with a router's auxiliary loss where the body has one. tokens: [B, T + 1]."""
    out = model(input_ids=tokens[:, :-1], use_cache=False)
    loss = cross_entropy(out.logits, tokens[:, 1:]).mean()
    if getattr(out, "aux_loss", None) is not None:
        config: Any = model.config
        loss = loss + config.router_aux_loss_coef * out.aux_loss
    return loss


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """[B … classes] and [B …] -> [B …], in nats."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none").view(
        targets.shape
    )


def judged_text(model: nn.Module, tokens: Tensor, numbers: list[int]) -> dict[str, Tensor]:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return {"loss": cross_entropy(logits, tokens[:, 1:]).mean(1)}


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"]).mean()


def judged_images(
    model: nn.Module, batch: dict[str, Tensor], numbers: list[int]
) -> dict[str, Tensor]:
    logits, labels = model(pixel_values=batch["pixel_values"]).logits, batch["labels"]
    return {
        "loss": cross_entropy(logits, labels),
        "accuracy": (logits.argmax(-1) == labels).float(),
    }


def noise_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["pixel_values"]
    return noise_errors(
        model, batch, torch.randint(len(ALPHAS), (len(x),), device=x.device), torch.randn_like(x)
    ).mean()


def noise_errors(model: nn.Module, batch: dict[str, Tensor], t: Tensor, noise: Tensor) -> Tensor:
    """L_simple of DDPM (arXiv 2006.11239, Eq. 14): the squared error of the noise that a model finds in each image.

    DiT's second half of channels, a learnt variance, is left as it is: it serves sampling alone.
    """
    x, labels = batch["pixel_values"], batch["labels"]
    kept = ALPHAS.to(x.device)[t][:, None, None, None]
    noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
    found = model(noisy, timestep=t, class_labels=labels).sample
    return (found[:, : x.shape[1]].float() - noise).square().mean((1, 2, 3))


def judged_noise(
    model: nn.Module, batch: dict[str, Tensor], numbers: list[int]
) -> dict[str, Tensor]:
    """An example's step and noise are its own, whenever and with whichever others it is judged."""
    x, draws = batch["pixel_values"], [torch.Generator().manual_seed(number) for number in numbers]
    t = torch.cat([torch.randint(len(ALPHAS), (1,), generator=draw) for draw in draws])
    noise = torch.stack([torch.randn(x.shape[1:], generator=draw) for draw in draws])
    return {"loss": noise_errors(model, batch, t.to(x.device), noise.to(x))}


# share of the signal's variance left after t steps of DDPM's linear schedule
ALPHAS = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)


def tokens_of(batch: Tensor) -> int:
    return batch[:, 1:].numel()


def images_of(batch: dict[str, Tensor]) -> int:
    return len(batch["labels"])


LANGUAGE = Task(text, language_model, next_token, judged_text, tokens_of, "tokens")
IMAGES = Task(pictures, classifier, class_loss, judged_images, images_of, "images")
DIFFUSION = Task(pictures, denoiser, noise_loss, judged_noise, images_of, "images")
TASKS = {"vit": IMAGES, "DiTTransformer2DModel": DIFFUSION}
