"""A stand-in for the Hugging Face Hub: caches as a download leaves them.

Names resolve without a network. The code under test takes the path that it takes for anyone whose
files are cached: same names, same libraries.
"""

import json
from pathlib import Path
from typing import Any

REVISION = "0" * 40


def snapshot_folder(hub_cache: Path, name: str) -> Path:
    """An empty folder for the files of a model, in the layout of the cache of huggingface_hub."""
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    return snapshot


def save_dataset(
    datasets_cache: Path, name: str, config: str, splits: dict[str, list[dict[str, Any]]]
) -> None:
    """Rows of each split as a data set with one configuration, as `datasets` caches it."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter
    from datasets.naming import camelcase_to_snakecase

    owner, _, short_name = name.partition("/")
    file_prefix = camelcase_to_snakecase(short_name)
    folder = datasets_cache / f"{owner}___{file_prefix}" / config / "0.0.0" / REVISION
    folder.mkdir(parents=True)
    split_infos = {}
    for split, rows in splits.items():
        table = Dataset.from_list(rows)
        path = str(folder / f"{file_prefix}-{split}.arrow")
        with ArrowWriter(features=table.features, path=path) as writer:
            writer.write_table(table.data.table)
            count, size = writer.finalize()
        split_infos[split] = {
            "name": split,
            "num_bytes": size,
            "num_examples": count,
            "dataset_name": file_prefix,
        }
    info = {
        "config_name": config,
        "dataset_name": file_prefix,
        "features": table.features.to_dict(),
        "splits": split_infos,
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
