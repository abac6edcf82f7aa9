"""Locks on folders, their files and names, and the one place that reads JSON."""

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from crosslayer.files import (
    LOCK_FILE,
    expand_place,
    list_files,
    lock_folder,
    new_folder,
    parse_json,
    read_json,
)
from crosslayer.run_folders import run_folder_name


def _hold(folder, connection):
    with lock_folder(folder):
        connection.send("held")
        connection.recv()


def test_a_folder_is_held_by_one_process_until_it_dies(tmp_path):
    context = multiprocessing.get_context("fork")  # a new interpreter imports torch for seconds
    here, there = context.Pipe()
    holder = context.Process(target=_hold, args=(tmp_path / "run", there))
    holder.start()
    there.close()  # so that the wait ends if the process does
    assert here.recv() == "held"
    message = f"{tmp_path / 'run'}: in use by process {holder.pid} on "
    with pytest.raises(ValueError, match=re.escape(message)), lock_folder(tmp_path / "run"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    for _ in range(2):
        with lock_folder(tmp_path / "run"):
            pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff{}", "not text in UTF-8"),
        (b"[]", "expected an object of JSON, got list"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"", "not JSON"),
    ],
)
def test_bad_json_is_one_line(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_json_of_the_expected_kind(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": [1]}')
    assert read_json(path) == {"a": [1]}
    assert parse_json("[1]", "line 1", object) == [1]
    with pytest.raises(ValueError, match="no such file"):
        read_json(tmp_path / "y.json")
    with pytest.raises(ValueError, match="not a file"):
        read_json(tmp_path)


def test_a_holder_that_has_not_yet_written_its_name(tmp_path):
    message = f"^{re.escape(str(tmp_path))}: in use by another process; wait"
    with FileLock(tmp_path / ".lock"), pytest.raises(ValueError, match=message):
        lock_folder(tmp_path).__enter__()


def test_linked_folders_are_listed_by_one_name_on_every_file_system(tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("x")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b" / "around").symlink_to(tmp_path)
    walk = os.walk
    for is_reversed in (False, True):

        def walk_in_order(*arguments, **options):
            for count, (root, folders, names) in enumerate(walk(*arguments, **options)):
                assert count < 4, "a folder is walked again through the link in it"
                folders.sort(reverse=is_reversed)
                yield root, folders, names

        monkeypatch.setattr(os, "walk", walk_in_order)
        assert list_files(tmp_path) == [tmp_path / "a" / "x.txt"]


def test_places_may_have_a_home_and_variables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("CORPORA", "~/corpora")
    assert expand_place("~/text") == "/home/ada/text"
    assert expand_place("$CORPORA/text") == "/home/ada/corpora/text"


def test_names_of_folders_fit_in_255_bytes():
    name = run_folder_name("𝔸" * 90, 0)
    assert len(name.encode()) <= 255 and name == run_folder_name("𝔸" * 90, 0)


def test_all_files_of_a_folder_are_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    flushed = []

    def flush(path: Path) -> None:
        flushed.append(path.name)
        # which may take long, so another process must not begin now
        message = r"in use by process|not empty"
        with pytest.raises(ValueError, match=message), new_folder(tmp_path / "out"):
            pass

    monkeypatch.setattr("crosslayer.files.fsync_path", flush)
    with new_folder(tmp_path / "out") as work:
        (work / "weights").mkdir()
        (work / "weights" / "a").write_text("a")
        assert not (tmp_path / "out").exists()
    assert sorted(flushed[:3]) == [".lock", "a", "weights"]
    assert flushed[3:] == ["out.part", tmp_path.name]
    assert (tmp_path / "out" / "weights" / "a").read_text() == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights"]


def test_a_new_folder_has_nothing_of_a_process_that_was_killed(tmp_path):
    (tmp_path / "out.part" / "old").mkdir(parents=True)
    (tmp_path / "out.part" / "old.txt").touch()
    refused = pytest.raises(ValueError, match=r"out\.part: is no unfinished folder")
    with refused, new_folder(tmp_path / "out"):
        pytest.fail("a user's folder would be emptied")
    assert (tmp_path / "out.part" / "old.txt").exists()
    (tmp_path / "out.part" / LOCK_FILE).touch()
    with new_folder(tmp_path / "out") as work:
        (work / "a").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_new_folder_is_removed_where_its_making_is_interrupted(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_that_another_process_has_just_made(tmp_path, monkeypatch):
    @contextmanager
    def lock_late(folder: Path) -> Iterator[None]:
        with lock_folder(folder):
            (tmp_path / "out" / "a").mkdir(parents=True)
            yield

    monkeypatch.setattr("crosslayer.files.lock_folder", lock_late)
    with pytest.raises(ValueError, match="out: not empty"), new_folder(tmp_path / "out"):
        pytest.fail("the work is done before it is refused")


def test_a_new_folder_behind_a_link_and_a_mounted_disk(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with new_folder(tmp_path / "link") as work:
        (work / "a").write_text("a")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "a").is_file()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    message = "mounted: a disk is mounted there, so name a new folder in it"
    with pytest.raises(ValueError, match=message), new_folder(tmp_path / "mounted"):
        pytest.fail("the work is done before it is refused")
