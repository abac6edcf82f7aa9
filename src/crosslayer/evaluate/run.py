"""Jobs one by one -> results.json: a task at some number of examples, a text, or a file of spans.

results.json is written whole after every job, so an evaluation that is stopped has lost at most the job in hand, and
the same call goes on with the rest.
"""

import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..data.sources import read_documents
from ..files import write_text_atomic
from ..validation import did_you_mean
from . import harness, text
from .records import digest, find, folder
from .tasks import NINE, TASKS

RESULTS = "results.json"


class Job(NamedTuple):
    """Something to measure: what tells it from another, and how."""

    key: dict[str, Any]
    measure: Callable[[Any], dict[str, Any]]  # of the harness's model

    def __str__(self) -> str:
        shots = self.key.get("shots")
        return f"{self.key['task']}{f', {shots}-shot' if shots is not None else ''}"


Watch = Callable[[Job, int, int], None]  # a job begins: which it is of how many


def evaluate(
    model: Any,
    tasks: str | Sequence[str] | None = None,
    fewshot: int | Sequence[int] = 0,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    data: str | Path | None = None,
    *,
    dtype: str = "auto",
    tokenizer: Any = None,
    text: str | Path | Sequence[str | Path] = (),
    spans: str | Path | Sequence[str | Path] = (),
    context: int | None = None,
    stride: int | None = None,
    seed: int = 1234,
    out: str | Path | None = None,
    watch: Watch = lambda job, index, count: None,
) -> dict[str, Any]:
    """Measure a model on tasks, texts and target spans, and return what results.json holds.

    Args:
        model: a saved model's folder, or a transformers model with its tokenizer; connected or not.
        tasks: names in `TASKS`; None is the nine of the papers, or none where a text or spans are given.
        fewshot: examples before each document; several numbers run every task with each.
        limit: the first documents of each task and of each file of spans; None is all of them.
        batch_size: sequences at once; the results do not depend on it.
        device: where the model runs; None is a GPU where there is one, and where it is for a model that is given.
        data: the folder of the tasks' files; None is `eval` in the folder that $CROSSLAYER_DATA names.
        dtype: of a saved model, like "bfloat16"; "auto" is the dtype it was saved in.
        tokenizer: a transformers tokenizer, or its folder or tokenizer.json; None is the one beside the model.
        text: texts, .jsonl or .gz files of them, or folders: their perplexity.
        spans: .jsonl files with a context and a target a line: the perplexity of the targets.
        context: tokens the model sees at once; None is what its config says.
        stride: by how much the windows over a text move; None is the whole context.
        seed: which few-shot examples are drawn.
        out: the folder of results.json, where a finished job is not done again; None keeps nothing.
        watch: called before each job.

    Raises:
        ValueError: something that was given is not as it should be. Nothing has been measured or written.
    """
    shots = several(fewshot)
    for name, value, least in (
        ("limit", limit, 1),
        ("batch_size", batch_size, 1),
        *(("fewshot", n, 0) for n in shots),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if tasks is None:
        tasks = () if text or spans else NINE
    jobs = plan(several(tasks), shots, limit, seed, data, several(text), stride, several(spans))
    lm = harness.open_model(model, tokenizer, device, dtype, context, batch_size)
    if stride is not None and not 1 <= stride <= lm.max_length:
        raise ValueError(f"stride must be from 1 to the context of {lm.max_length}, got {stride}")
    settings = {**harness.identity(lm), "limit": limit, "seed": seed, "lm_eval": version("lm_eval")}
    path = Path(out) / RESULTS if out is not None else None
    rows = held(path, settings) if path else []
    results = {
        "environment": environment(lm),
        "model": str(lm.model.name_or_path),
        "settings": settings,
    }
    for index, job in enumerate(jobs):
        if not done(job, rows):
            watch(job, index, len(jobs))
            start = time.perf_counter()
            row = job.key | job.measure(lm)
            rows.append(row | {"seconds": round(time.perf_counter() - start, 2)})
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text_atomic(path, json.dumps(results | {"results": rows}, indent=1))
    return results | {"results": [row for job in jobs for row in done(job, rows)]}


def several(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, Path, int)) else list(given)


def done(job: Job, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.items() >= job.key.items()]


def plan(
    tasks: Sequence[str],
    shots: Sequence[int],
    limit: int | None,
    seed: int,
    data: str | Path | None,
    texts: Sequence[str | Path],
    stride: int | None,
    spans: Sequence[str | Path],
) -> list[Job]:
    """Everything there is to do, its files found and read, so that what is missing is said before a model is loaded."""
    for name in tasks:
        if name not in TASKS:
            raise ValueError(
                f"unknown task {name!r}{did_you_mean(name, TASKS)}; known: {', '.join(TASKS)}"
            )
    jobs = []
    for name in dict.fromkeys(tasks):
        file = find(folder(data), TASKS[name].file, TASKS[name].fields)
        for n in dict.fromkeys(shots):
            key = {"task": name, "shots": n, "data": digest(file.read_bytes())}
            jobs.append(
                Job(
                    key, partial(harness.run, name=name, file=file, shots=n, limit=limit, seed=seed)
                )
            )
    for source in map(Path, texts):
        contents = [document.text for document in read_documents(str(source))]
        key = {
            "task": f"text {source.name}",
            "stride": stride,
            "data": digest(*(t.encode() + b"\0" for t in contents)),
        }
        jobs.append(Job(key, partial(text.perplexity, texts=contents, stride=stride)))
    for source in map(Path, spans):
        pairs = text.examples(source)[:limit]
        key = {"task": f"spans {source.name}", "data": digest(source.read_bytes())}
        jobs.append(Job(key, partial(text.spans, pairs=pairs)))
    return jobs


def environment(lm: Any) -> dict[str, str]:
    device = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else str(lm.device)
    libraries = {name: version(name) for name in ("lm_eval", "transformers", "torch")}
    return {
        "crosslayer": __version__,
        **libraries,
        "python": platform.python_version(),
        "device": device,
    }


def held(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows a folder already holds, if they are this model's under these settings."""
    where = path.parent
    if where.exists() and not where.is_dir():
        raise ValueError(f"{where}: a file is in the way of the output folder")
    if not path.exists():
        if where.exists() and any(where.iterdir()):
            raise ValueError(
                f"{where}: not empty and without {RESULTS}, so not an evaluation's; choose another folder"
            )
        return []
    try:
        found = json.loads(path.read_text("utf8"))
        rows = list[dict[str, Any]](found["results"])
        for key, value in settings.items():
            if found["settings"][key] != value:
                raise ValueError(
                    f"{where}: belongs to another evaluation, with {key} {found['settings'][key]!r} where this one has "
                    f"{value!r}; choose another folder"
                )
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(
            f"{path}: not an evaluation's results (damaged?); move it away or choose another folder"
        ) from None
    return rows
