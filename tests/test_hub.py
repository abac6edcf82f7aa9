"""Folders that hold no model, and names that lead nowhere."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError

import crosslayer
from crosslayer.convert import open_model, open_tokenizer
from crosslayer.convert.pretrained import copy_tokenizer
from crosslayer.data.corpus import load_corpus
from crosslayer.hub import check_model_source
from tests.hf.backbones import llama
from tests.support.hub import snapshot_folder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty working folder and an empty cache of the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for folder in ("folder", "finished/model", "unfinished/step-00000003"):
        os.makedirs(folder)
    for file in ("finished/model/config.json", "unfinished/step-00000003/checkpoint.json"):
        (tmp_path / file).write_text("{}")


NO_NETWORK = "; not in the local cache, and the Hugging Face Hub cannot be reached (no network"


@pytest.mark.parametrize("load", [open_model, open_tokenizer, crosslayer.from_pretrained])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("org/name", NO_NETWORK),
        ("name", NO_NETWORK),
        ("a/b/c", ""),
        ("./name", ""),
        ("/name", ""),
        ("folder/name", ""),
    ],
)
def test_a_name_that_leads_nowhere(load, source, message):
    with pytest.raises(ValueError) as error:
        load(source)
    kind = "folder or file" if load is open_tokenizer else "folder"
    text = str(error.value)
    assert text.startswith(f"{source}: no such {kind}{message}")
    assert message or text == f"{source}: no such {kind}"


@pytest.mark.parametrize("load", [open_model, open_tokenizer, crosslayer.from_pretrained])
def test_the_folder_of_a_training_run(load):
    with pytest.raises(ValueError, match=r"^finished holds .*; its model is finished/model$"):
        load("finished")
    for source in ("unfinished", "unfinished/model"):
        with pytest.raises(ValueError, match=r"^unfinished holds a training run"):
            load(source)
    for step in ("step-999999", "step-1000000"):
        kept = Path("unfinished", "models", step)
        kept.mkdir(parents=True)
        (kept / "config.json").touch()
    with pytest.raises(ValueError, match=r"the last model kept is unfinished/models/step-1000000$"):
        load("unfinished")


def test_a_cached_name_is_found(tmp_path):
    llama().save_pretrained(snapshot_folder(tmp_path / "cache", "org/cached"))
    assert open_model("org/cached").config.model_type == "llama"


def test_a_tokenizer_is_copied_with_its_chat_template(tmp_path, monkeypatch):
    """Of a model on the Hub, only the files that are asked for are downloaded."""
    snapshot = snapshot_folder(tmp_path / "cache", "owner/model")
    (snapshot / "tokenizer_config.json").write_text("{}")

    def download(name, allow_patterns):
        if "chat_template.jinja" in allow_patterns:
            (snapshot / "chat_template.jinja").write_text("{{ messages }}")
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "copy").mkdir()
    copy_tokenizer("owner/model", tmp_path / "copy")
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_whether_the_hub_answers(monkeypatch):
    """A refusal is an answer, and a slow Hub is asked again; without a connection it is none."""

    class ReadTimeout(Exception):
        pass

    class ConnectError(Exception):
        pass

    def fail_with(error):
        def fail(url):
            raise error

        return fail

    refusal = HfHubHTTPError("404", response=SimpleNamespace(headers={}, request=None))
    for error in (refusal, ReadTimeout()):
        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail_with(error))
        check_model_source("org/name")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail_with(ConnectError()))
    with pytest.raises(ValueError, match="cannot be reached"):
        check_model_source("org/name")


def test_a_model_without_a_tokenizer():
    llama().save_pretrained("plain")
    with pytest.raises(ValueError, match=r"^plain has no tokenizer; copy that of the"):
        open_tokenizer("plain")


def test_a_missing_source_is_named_before_the_tokenizer():
    with pytest.raises(ValueError, match=r"^nothere: no such file or folder$"):
        load_corpus("nothere", 8, tokenizer="org/name")
