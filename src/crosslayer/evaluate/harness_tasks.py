"""Tasks of lm-evaluation-harness (`lm_eval`) on a model that is loaded, connected or not.

Task names, prompts, few-shot examples and metrics are the harness's own. Log-probabilities are
computed in float32 whatever the model's dtype is, as `lm_eval --model_args softmax_dtype=float32`
does.
"""

import contextlib
import copy
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import error_in_one_line, error_with_class
from ..evaluation_mode import evaluation_mode
from ..validation import check_non_negative, check_positive, did_you_mean
from .language_models import check_logits, end_tokens

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MODEL_FILES = "lm_eval/models/*.py"  # the harness's code that runs a model
_BOOTSTRAP_ITERATIONS = 1000  # resamplings for the standard error of a perplexity


def evaluate_tasks(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    tasks: Sequence[str],
    task_manager: "TaskManager | None" = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    context: int | None = None,
) -> dict[str, Any]:
    """Evaluate a model on tasks of lm-evaluation-harness.

    Args:
        model: a language model of transformers.
        tokenizer: its tokenizer.
        tasks: the harness's names of tasks, groups and tags, or patterns like "arc_*".
        task_manager: the harness's index of tasks, from `find_tasks`. None: the tasks that
            the harness ships.
        num_fewshot: examples before each document; None is what the task says.
        limit: evaluate only the first documents of each task.
        batch_size: sequences in a batch.
        context: tokens that the model sees at once; None is what its config says.

    Returns:
        What `lm_eval.simple_evaluate` returns, like "results" by task and metric and "n-shot".

    Raises:
        ValueError: the model sees tokens that it is scored by, a task is unknown, its data cannot
            be loaded, a template or a task's file does not fit them, or an answer is longer than
            the context.
    """
    from lm_eval import simple_evaluate

    check_positive(batch_size=batch_size)
    if limit is not None:
        check_positive(limit=limit)
    if num_fewshot is not None:
        check_non_negative(num_fewshot=num_fewshot)
    if task_manager is None:
        task_manager = find_tasks(tasks)
    check_logits(model)
    with evaluation_mode(model):  # the harness sets it and leaves it
        harness_model = _wrap_model(model, tokenizer, batch_size, context)
        with (
            _errors_in_words(", ".join(tasks), harness_model.max_length),
            contextlib.redirect_stdout(sys.stderr),  # the harness prints remarks
        ):
            return simple_evaluate(
                harness_model,
                tasks=task_manager.match_tasks(list(tasks)),
                task_manager=task_manager,
                num_fewshot=num_fewshot,
                limit=limit,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=False,
            )


def _wrap_model(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    batch_size: int,
    context: int | None,
) -> "HFLM":
    """The harness's wrapper of a model, which it sets to evaluation mode."""
    from lm_eval.models.huggingface import HFLM

    prefix_token = None  # the harness needs one even where no request is without context
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        prefix_token = next(iter(end_tokens(tokenizer, model)), 0)
    with _log_level("lm_eval.models.huggingface", logging.ERROR):
        return HFLM(
            pretrained=model,  # the harness warns that it is not a name
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # the harness gives it a padding token
            max_length=context,
            batch_size=batch_size,
            softmax_dtype="float32",
            prefix_token_id=prefix_token,
        )


@contextlib.contextmanager
def _errors_in_words(tasks: str, context: int) -> Iterator[None]:
    """Raise ValueErrors for what the harness raises where tasks, data or lengths do not fit."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except DatasetGenerationError as error:
        reason = error_with_class(error.__cause__ or error)
        raise ValueError(f"cannot read the data of {tasks} ({reason})") from error
    except OSError as error:  # ConnectionError is one, and so is what datasets does not find
        reason = error_in_one_line(error)
        raise ValueError(
            f"cannot load the data of {tasks} ({reason}); the harness downloads it from "
            "the Hugging Face Hub once, so run this with a network first, or give tasks on local "
            "files by --include-path"
        ) from error
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, AssertionError) and Path(files[-1]).match(_MODEL_FILES):
            # The harness's only check of lengths is an assert.
            raise ValueError(
                f"the harness refused a request of {tasks}: is an answer longer than the context "
                f"of {context} tokens?"
            ) from error
        if type(error).__module__.startswith("jinja2"):  # of a template
            raise ValueError(
                f"a template of {tasks} does not fit its documents ({error})"
            ) from error
        # Before it runs the model, the harness reads task files and documents without any checks.
        in_model = any(Path(file).match(_MODEL_FILES) for file in files)
        if in_model or isinstance(error, ImportError):
            raise
        raise ValueError(
            f"the harness cannot make its requests of {tasks} ({error_with_class(error)}); check "
            "the task's file, its documents, and that there are more of these than --num-fewshot"
        ) from error


def find_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> "TaskManager":
    """The harness's index of tasks, in which every one of `tasks` is known.

    Args:
        tasks: names or patterns.
        include_path: a folder of YAML task files besides the harness's own.

    Raises:
        ValueError: the folder does not exist, a task is unknown, or its file is no YAML.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"{include_path}: no such folder of task files")
        # The harness has 14,000 tasks, which take seconds to index. Local tasks do not need them.
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
        for path in sorted(Path(include_path).rglob("*.yaml")):
            _check_yaml(path)  # The harness leaves out what it cannot read.
    manager = TaskManager(include_path=include_path)
    check_task_names(tasks, manager)
    return manager


def _check_yaml(path: Path) -> None:
    """Raise a ValueError for a file that is no YAML, without a look at what its tags mean."""
    try:
        for _ in yaml.parse(path.read_text(encoding="utf-8"), yaml.SafeLoader):
            pass
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error_in_one_line(error)}") from error


def check_task_names(tasks: Sequence[str], manager: "TaskManager") -> None:
    """Raise a ValueError for a name that the harness does not know."""
    for name in tasks:
        if not manager.match_tasks([name]):
            raise ValueError(
                f"unknown task {name!r}{did_you_mean(name, manager.all_tasks)}; "
                "`lm_eval ls tasks` lists the tasks of lm-evaluation-harness"
            )


@contextlib.contextmanager
def _log_level(name: str, level: int) -> Iterator[None]:
    logger = logging.getLogger(name)
    previous = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(previous)
