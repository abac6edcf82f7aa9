"""The harness's own model class around a connected model, and its own evaluation of one task."""

import contextlib
import copy
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..validation import DTYPES, check_choice
from .records import digest
from .tasks import TASKS

BOOTSTRAPS = 1000  # for the standard error of a perplexity
END = "<|endoftext|>"


def open_model(
    model: Any,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str = "auto",
    context: int | None = None,
    batch_size: int = 8,
) -> Any:
    """The harness's `HFLM` of a model (a transformers model or a saved one's folder) and its tokenizer.

    Raises:
        ValueError: there is no such model or tokenizer, or they do not fit each other.
    """
    from lm_eval.models.huggingface import HFLM

    saved_as = check_choice("dtype", dtype, {"auto": "auto", **DTYPES})
    if isinstance(model, (str, Path)):
        source = str(model)
        model, device = (
            read_model(source, saved_as),
            device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )
    else:
        source = model.name_or_path
    try:
        model = model.to(device) if device else model
    except (RuntimeError, AssertionError) as error:  # torch built without the device asserts
        raise ValueError(
            f"cannot use the device {device!r} ({str(error).splitlines()[0]})"
        ) from None
    words = tokenizer if callable(tokenizer) else read_tokenizer(tokenizer or source)
    rows = model.get_input_embeddings().num_embeddings
    if len(words) > rows:
        raise ValueError(
            f"the tokenizer has {len(words)} tokens and the model's embedding {rows} rows: not a pair"
        )
    sees = getattr(model.config, "max_position_embeddings", None)
    if context is not None and not 2 <= context <= (sees or context):
        raise ValueError(f"context must be from 2 to the model's {sees}, got {context}")
    bare = words.bos_token_id is None and words.eos_token_id is None
    return HFLM(
        pretrained=model,
        backend="causal",
        tokenizer=copy.deepcopy(words),  # the harness gives it a padding token
        max_length=context,
        batch_size=batch_size,
        softmax_dtype="float32",
        # the harness asks for one even where nothing is conditioned on it; a text then begins with its own first token
        prefix_token_id=0 if bare else None,
    )


def read_model(source: str, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from ..convert import open_model

    if Path(source).is_dir():
        return open_model(source, dtype)
    try:
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except OSError:
        raise ValueError(
            f"{source}: no such folder, and no such model in the Hugging Face cache"
        ) from None


def read_tokenizer(source: str | Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if Path(source).is_file():
        try:
            words = PreTrainedTokenizerFast(tokenizer_file=str(source))
        except Exception as error:  # tokenizers raises no narrower one
            raise ValueError(f"{source}: not a tokenizer.json ({error})") from None
        if (
            END in words.get_vocab()
        ):  # a bare tokenizer.json does not say which of its tokens ends a text
            words.eos_token = END
        return words
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(
            f"{source or 'the model'}: no tokenizer there; name its folder or file with --tokenizer"
        ) from None


def prefix(lm: Any) -> int | None:
    """The token before a text: BOS, or EOS, or none."""
    words = lm.tokenizer
    return words.eos_token_id if words.bos_token_id is None else words.bos_token_id


def identity(lm: Any) -> dict[str, Any]:
    """What a result is of: the model by its weights, the tokenizer by its vocabulary."""
    parts = []
    for name, tensor in lm.model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        some = flat[
            :: max(1, len(flat) // 1024)
        ]  # training moves every weight, so some of each will do
        parts += [f"{name} {tuple(tensor.shape)}".encode(), some.double().cpu().numpy().tobytes()]
    vocabulary = json.dumps(sorted(lm.tokenizer.get_vocab().items()))
    return {
        "arm": getattr(lm.model.config, "crosslayer", None),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "weights": digest(*parts),
        "tokenizer": digest(vocabulary.encode()),
        "context": lm.max_length,
    }


def run(lm: Any, name: str, file: Path, shots: int, limit: int | None, seed: int) -> dict[str, Any]:
    """One task's metrics with their standard errors, by `lm_eval.evaluate`."""
    from lm_eval import evaluate
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as cache, truncations() as cut, quietly():
        where = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": cache},
        }
        loaded = TaskManager(include_defaults=False).load(
            [{"task": name, **TASKS[name].config, **where}]
        )
        task = loaded["tasks"][name]
        if len(task.eval_docs) <= shots:
            raise ValueError(
                f"{file}: {len(task.eval_docs)} documents are too few for {shots} examples and one more"
            )
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(seed)
        try:
            found = evaluate(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False)
        except AssertionError as error:  # the harness's own check
            raise ValueError(
                f"{name}: an answer does not fit the window of {lm.max_length} tokens"
            ) from error
    values, metrics = found["results"][name], {}
    for metric in TASKS[name].metrics:
        spread = values[f"{metric}_stderr,none"]
        metrics[metric] = {
            "value": values[f"{metric},none"],
            "stderr": None if spread == "N/A" else spread,
        }
    return {"n": values["sample_len"], "truncated": len(cut), "metrics": metrics}


@contextlib.contextmanager
def truncations() -> Iterator[list[str]]:
    """Collect, instead of printing each, the harness's warnings that a request was cut to the model's window."""
    logger, cut = logging.getLogger("lm_eval.models.huggingface"), list[str]()
    before, shown = logger.level, logger.getEffectiveLevel()

    def keep(record: logging.LogRecord) -> bool:
        if "exceeds model's maximum length" not in record.getMessage():
            return record.levelno >= shown
        cut.append(record.getMessage())
        return False

    logger.addFilter(keep)
    logger.setLevel(min(shown, logging.WARNING))
    try:
        yield cut
    finally:
        logger.setLevel(before)
        logger.removeFilter(keep)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """The bootstrap in this process (a forked one would inherit the model), and nothing of it on stdout."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
