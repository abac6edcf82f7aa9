"""Models, tokenizers and data by the name that users give: a local folder, or a name on the Hub."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import error_in_one_line
from .run_folders import (
    CHECKPOINT_INDEX,
    CONFIG_FILE,
    KEPT_MODELS_FOLDER,
    RUNS_FOLDER,
    TRAINED_MODEL_FOLDER,
    is_comparison_folder,
    is_model_folder,
    step_of_name,
)

NO_NETWORK = (
    "not in the local cache, and the Hugging Face Hub cannot be reached (no network, or "
    "HF_HUB_OFFLINE is set); give a local file or folder"
)
# One of these is in the cache of every model or tokenizer that was downloaded.
_CACHED_FILES = (CONFIG_FILE, "tokenizer.json", "tokenizer_config.json")


def check_model_source(source: str | Path, expected: str = "folder", **place: Any) -> None:
    """Check what can be found out about a model's place without loading it.

    Args:
        source: a folder, or a name on the Hub.
        expected: what may be at a local path, for the message.
        place: where a name's files are: subfolder, and options of `snapshot_download`.

    Raises:
        ValueError: it is the folder of a training run, a local path where there is nothing, or a
            name that is not in the cache while the Hub cannot be reached.
    """
    path = Path(source)
    if path.name == TRAINED_MODEL_FOLDER and not path.exists():
        _check_no_training_run(path.parent)  # It may write the model later.
    if path.is_dir():
        _check_no_training_run(path)
    elif path.exists():
        return
    elif not can_be_hub_name(str(source)):
        raise ValueError(f"{source}: no such {expected}")
    elif not _is_reachable(str(source), place):
        raise ValueError(f"{source}: no such {expected}; {NO_NETWORK}")


def download_files(
    name: str, patterns: Sequence[str], expected: str = "folder", **options: Any
) -> Path:
    """The folder of a repository's files on the Hub, from the local cache if they are there.

    Args:
        name: of the repository.
        patterns: of the files.
        expected: what may be at a local path instead, for the message.
        options: of `snapshot_download`.

    Raises:
        ValueError: it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), **options))
    except LocalEntryNotFoundError:
        raise ValueError(f"{name}: no such {expected}; {NO_NETWORK}") from None
    except (HFValidationError, HfHubHTTPError) as error:
        raise ValueError(
            f"{name}: no such {expected}, and no such name on the Hub ({type(error).__name__})"
        ) from None
    except Exception as error:  # a broken connection, a full disk
        raise ValueError(f"{name}: cannot be downloaded ({error_in_one_line(error)})") from None


def _check_no_training_run(folder: Path) -> None:
    if is_model_folder(folder) or (folder / "tokenizer.json").exists():
        return
    model = folder / TRAINED_MODEL_FOLDER
    if is_model_folder(model):
        raise ValueError(f"{folder} holds a training run; its model is {model}")
    if is_comparison_folder(folder):
        raise ValueError(
            f"{folder} holds a comparison; if it was run with --keep-models, its models are in "
            f"{folder / RUNS_FOLDER / 'ARM' / KEPT_MODELS_FOLDER}"
        )
    kept = [file.parent for file in folder.glob(f"{KEPT_MODELS_FOLDER}/step-*/{CONFIG_FILE}")]
    if kept:
        last = max(kept, key=lambda path: step_of_name(path.name) or 0)
        raise ValueError(f"{folder} holds a training run; the last model kept is {last}")
    if any(folder.glob(f"step-*/{CHECKPOINT_INDEX}")):
        raise ValueError(f"{folder} holds a training run, which writes {model} when it has ended")


def can_be_hub_name(source: str) -> bool:
    """Whether a path where there is nothing may be a name like openai-community/gpt2."""
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        return False
    return "/" not in source or not Path(source).parent.is_dir()


def _is_reachable(name: str, place: dict[str, Any]) -> bool:
    """Whether the cache has files of this name, or the Hub answers one request."""
    if place.get("local_files_only"):
        return True  # the loader looks into the cache
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    cache = {key: place[key] for key in ("cache_dir", "revision") if key in place}
    try:
        for file in _CACHED_FILES:
            path = Path(place.get("subfolder", ""), file).as_posix()
            if isinstance(try_to_load_from_cache(name, path, **cache), str):
                return True
        get_hf_file_metadata(hf_hub_url(name, _CACHED_FILES[0]))
    except (HfHubHTTPError, HFValidationError):
        return True  # the loader names the problem
    except Exception as error:  # of the HTTP library, which depends on huggingface_hub's version
        return type(error).__name__ == "ReadTimeout"  # a slow Hub: the loader tries again
    return True
