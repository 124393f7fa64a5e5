"""Models at Hugging Face for tests: a cache made by hand, and a server that answers as the hub's API does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "Acme/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER = "89abcdef0123456789abcdef0123456789abcdef"


def make_cache(home: Path, folder: Path, repo: str = REPO, commit: str = COMMIT) -> Path:
    """Put the files of `folder` into the cache of HF_HOME=`home`, as the library does; returns the snapshot."""
    model = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = model / "snapshots" / commit
    for part in (model / "refs", model / "blobs", snapshot):
        part.mkdir(parents=True, exist_ok=True)
    (model / "refs/main").write_text(commit)
    for file in filter(Path.is_file, folder.iterdir()):
        data = file.read_bytes()
        blob = model / "blobs" / hashlib.sha1(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / file.name).unlink(missing_ok=True)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


class Hub:
    """A hub with the models `repos`: files by repository, commit and path. `branches` has the commit of each branch.

    `requests` lists what was asked for, as METHOD PATH, with the range of bytes. A transfer of a file in `breaks` ends
    after so many bytes, once.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, Mapping[str, bytes]]]):
        self.repos = repos
        self.branches: dict[str, str] = {"main": COMMIT}
        self.gated: set[str] = set()
        self.breaks: dict[str, int] = {}
        self.requests: list[str] = []
        self.endpoint = ""

    def files_asked_for(self) -> set[str]:
        """The paths of all files that were sent."""
        paths = [line.split()[1] for line in self.requests if line.startswith("GET ")]
        return {path.split("/resolve/")[1].partition("/")[2] for path in paths if "/resolve/" in path}

    def find(self, repo: str, revision: str) -> tuple[int, str, str]:
        """The status, the hub's code of an error, and the commit of a revision."""
        if repo not in self.repos:
            return 401, "RepoNotFound", ""
        if repo in self.gated:
            return 403, "GatedRepo", ""
        commit = self.branches.get(revision, revision)
        if commit not in self.repos[repo]:
            return 404, "RevisionNotFound", ""
        return 200, "", commit


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            repo, kind, revision = "/".join(words[2:4]), words[4] if len(words) > 4 else "revision", "/".join(words[5:])
        else:
            repo, kind, revision = "/".join(words[:2]), words[2], words[3]
        status, code, commit = self.hub.find(repo, revision or "main")
        if status != 200:
            self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": f"{code} of {repo}"})
            return
        files = self.hub.repos[repo][commit]
        if kind == "resolve":
            self._send_file("/".join(words[4:]), files, commit)
            return
        listed: Any = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        if kind == "tree":
            listed = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, files: Mapping[str, bytes], commit: str) -> None:
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        first = 0
        if asked := self.headers.get("Range"):
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        breaks = self.hub.breaks.pop(name, None) if self.command == "GET" else None
        self._send(206 if asked else 200, data[first:], headers, breaks)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], breaks: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:breaks])
        if breaks is not None:
            self.close_connection = True


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the hub at 127.0.0.1 while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_OfHub", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(home: Path, endpoint: str = "") -> dict[str, str]:
    """The environment variables of a program: HF_HOME, and offline unless there is an endpoint."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    online = {"HF_ENDPOINT": endpoint} if endpoint else {"HF_HUB_OFFLINE": "1"}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    return {**kept, **online, **quiet, "HF_HOME": str(home)}


_FETCH = """
import json, sys
from megapar.base.errors import MegaparError
from megapar.system.hub import ModelName, fetch
found = []
for name, file in json.loads(sys.argv[1]):
    try:
        snapshot = fetch(ModelName.parse(name), ["config.json", file], needed=[file])
        found.append([snapshot.repo, snapshot.commit, str(snapshot.folder)])
    except MegaparError as error:
        found.append([type(error).__name__, error.exit_code, str(error)])
print(json.dumps(found))
"""


def fetch_apart(calls: Sequence[tuple[str, str]], env: Mapping[str, str], before: str = "") -> list[Any]:
    """Fetch files of models, config.json beside them, in a Python that reads the environment anew.

    Returns repository, commit and folder of each, or class, exit code and line of its error. `before` runs first.
    """
    command = [sys.executable, "-c", before + _FETCH, json.dumps(calls)]
    ended = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
