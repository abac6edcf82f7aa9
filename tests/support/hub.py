"""A stand-in for the Hugging Face Hub: caches as a download leaves them, and a server.

Names resolve without a network. The code under test takes the path that it takes for anyone: same
names, same libraries.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

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


@contextmanager
def serve_hub(root: Path) -> Iterator[str]:
    """Serve root/OWNER/NAME as the Hub's repositories of datasets; yields its address.

    It has what `datasets` and `huggingface_hub` ask of the Hub: the files of a repository, their
    sizes and their bytes.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:  # the paths-info of a repository
            question = self.rfile.read(int(self.headers["Content-Length"]))
            paths = json.loads(question)["paths"]
            repository = root.joinpath(*self.path.split("/")[3:5])
            found = [repository / path for path in paths if (repository / path).exists()]
            self._send(200, json.dumps([_describe(path, repository) for path in found]).encode())

        def _answer(self, body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            is_api = parts[0] == "api"
            repository = root.joinpath(*parts[2:4] if is_api else parts[1:3])
            if not repository.is_dir():
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
                return
            if not is_api:  # datasets/OWNER/NAME/resolve/REVISION/PATH
                self._send_file(repository.joinpath(*parts[5:]), body)
                return
            if "tree" in parts:
                folder = repository.joinpath(*parts[6:])
                is_deep = "recursive=true" in self.path.lower()
                paths = sorted(folder.rglob("*") if is_deep else folder.glob("*"))
                content: Any = [_describe(path, repository) for path in paths]
            else:
                files = sorted(path for path in repository.rglob("*") if path.is_file())
                names = [path.relative_to(repository).as_posix() for path in files]
                content = {
                    "id": "/".join(parts[2:4]),
                    "sha": REVISION,
                    "siblings": [{"rfilename": name} for name in names],
                }
            self._send(200, json.dumps(content).encode())

        def _send_file(self, path: Path, body: bool) -> None:
            if not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
                return
            content = path.read_bytes()
            headers = {"X-Repo-Commit": REVISION, "ETag": f'"{len(content)}"'}
            status = 200
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
                content, status = content[start : end + 1], 206
            self._send(status, content, headers, body)

        def _send(
            self,
            status: int,
            content: bytes,
            headers: dict[str, str] | None = None,
            body: bool = True,
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _describe(path: Path, repository: Path) -> dict[str, Any]:
    """A file or folder, as the Hub lists it."""
    name = path.relative_to(repository).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}
