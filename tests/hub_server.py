"""A server on loopback with the part of the Hugging Face hub's interface that downloads and uploads use."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(
    r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/(revision|tree|preupload|commit)/([^/?]+))?"
)
_FILE = re.compile(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


class HubServer(http.server.ThreadingHTTPServer):
    """Repositories as dicts of files.

    Attributes:
      repos: (kind, name) -> path -> content; kind is "models" or "datasets".
      revisions: branches besides main: (kind, name, revision) -> path -> content.
      gated: names that need a token.
      cards: head of a data set's card, as the hub parses it.
      cut_off: paths whose next answer ends in the middle.
      most_bytes: the most bytes of a file in one answer, which breaks off then; 0 for all.
      ranges: whether an answer can begin in the middle of a file.
      damaged: paths that arrive with other content than the hub tells.
      headers: headers of files that differ from what they should be.
      odd: part of a path -> a function of the handler, which answers in place of the hub.
      about: what differs from what should be told about a repository.
      over: set at the end, for answers in `odd` that go on until then.
      requests: method and path of all requests.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.revisions, self.cards = {}, {}, {}
        self.gated, self.cut_off, self.damaged = set(), set(), set()
        self.headers, self.odd, self.about = {}, {}, {}
        self.most_bytes, self.ranges = 0, True
        self.over = threading.Event()
        self.requests = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, kind: str, name: str, revision: str):
        """The files of a revision; None if there is no such repository, {} if there is no such revision."""
        main = self.repos.get((kind, name))
        if main is None or revision in ("main", COMMIT):
            return main
        for key, files in self.revisions.items():
            if key == (kind, name, revision) or (
                key[:2] == (kind, name) and commit_of(key[2]) == revision
            ):
                return files
        return {}

    def handle_error(self, request, client_address):
        """A client may leave."""


def commit_of(revision: str) -> str:
    """The commit that a revision stands for."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return COMMIT if revision == "main" else hashlib.sha1(revision.encode()).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[HubServer]:
    """Runs a server without repositories."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format, *args):
        """Quiet."""

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        content = self.rfile.read(length)
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.requests.append(("POST", path))
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self._json({"error": "Unauthorized"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = (
                f"{asked['organization']}/{asked['name']}"
                if asked.get("organization")
                else asked["name"]
            )
            self.server.repos.setdefault(("models", name), {})
            return self._json({"url": f"{self.server.url}/{name}"})
        found = _API.fullmatch(path)
        if found is None:
            return self._json({"error": path}, 404)
        kind, name, action, _ = found.groups()
        if action == "preupload":
            files = json.loads(content)["files"]
            told = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            return self._json({"files": told})
        for line in filter(None, content.splitlines()):
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                self.server.repos[kind, name][value["path"]] = base64.b64decode(value["content"])
        url = f"{self.server.url}/{name}/commit/{COMMIT}"
        return self._json({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def _answer(self, *, body: bool):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        for part, answer in self.server.odd.items():
            if part in path:
                self.close_connection = True
                return answer(self)
        if found := _API.fullmatch(urllib.parse.urlsplit(self.path).path):
            kind, name, action, revision = found.groups()
            return self._about(kind, name, action, urllib.parse.unquote(revision or "main"))
        # A revision may have slashes, which come quoted.
        if found := _FILE.fullmatch(urllib.parse.urlsplit(self.path).path):
            dataset, name, revision, file = (urllib.parse.unquote(g or "") for g in found.groups())
            return self._file("datasets" if dataset else "models", name, revision, file, body=body)
        return self._json({"error": path}, 404)

    def _about(self, kind: str, name: str, action: str | None, revision: str):
        files = self.server.files(kind, name, revision)
        if files is None:
            return self._json(
                {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"}
            )
        if not files and (kind, name) in self.server.repos and revision not in ("main", COMMIT):
            return self._json({"error": "no revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if action == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(c), "oid": _sha1(c), "lfs": _lfs(c)}
                for path, c in files.items()
            ]
            return self._json(entries)
        siblings = [
            {"rfilename": p, "size": len(c), "blobId": _sha1(c), "lfs": _lfs(c)}
            for p, c in files.items()
        ]
        return self._json(
            {
                "id": name,
                "sha": commit_of(revision),
                "siblings": siblings,
                "gated": "manual" if name in self.server.gated else False,
                "private": False,
                "cardData": self.server.cards.get(name),
            }
            | self.server.about
        )

    def _file(self, kind: str, name: str, revision: str, file: str, *, body: bool):
        if name in self.server.gated and self.headers.get("Authorization") != "Bearer hf_right":
            return self._json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
        content = (self.server.files(kind, name, revision) or {}).get(file)
        if content is None:
            return self._json({"error": "no file"}, 404, {"X-Error-Code": "EntryNotFound"})
        told = hashlib.sha256(content).hexdigest()
        if file in self.server.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and self.server.ranges:
            start = int(asked[1])
        self.send_response(206 if start else 200)
        headers = {"ETag": f'"{told}"', "X-Repo-Commit": commit_of(revision)} | self.server.headers
        for key, text in headers.items():
            self.send_header(key, text)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return None
        part = content[start:]
        if file in self.server.cut_off:
            self.server.cut_off.discard(file)
            self.wfile.write(part[: len(part) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return None
        if 0 < self.server.most_bytes < len(part):
            self.wfile.write(part[: self.server.most_bytes])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return None
        self.wfile.write(part)
        return None

    def _json(self, value, status: int = 200, headers: dict[str, str] | None = None):
        content = json.dumps(value).encode()
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        if "error" in (value if isinstance(value, dict) else {}):
            self.send_header("X-Error-Message", value["error"])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _lfs(content: bytes) -> dict:
    sha256 = hashlib.sha256(content).hexdigest()
    return {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 130}


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
