"""The HTTP client of `huggingface_hub`, with limits on what a server may answer.

    headers of an answer        within `ANSWER_S`, even if they come byte by byte
    an answer about files       at most `ANSWER_BYTES`, within `ANSWER_S` more
    a file                      at `FILE_BYTES_PER_S` or faster; without a stated size `UNSIZED_BYTES` at most
    names of files in it        no part that leads to another folder

`huggingface_hub` itself limits only the time between two bytes. It also makes paths of its cache from ETags:
"../../../x" would be written outside.
"""

from __future__ import annotations

import concurrent.futures
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import huggingface_hub
from huggingface_hub.utils import _http

from jaxrl.errors import UserError

ANSWER_S = 60.0
ANSWER_BYTES = 1 << 26
FILE_BYTES_PER_S = 1000
UNSIZED_BYTES = 1 << 28

# Time between two bytes, for requests to which `huggingface_hub` gives none.
_SILENCE_S = 10.0
_NAME = re.compile(r"[\w+:=-][\w.+:=-]*")
_NAMES = ("sha", "sha256", "oid", "xetHash")
_PATHS = ("path", "rfilename")


def guard() -> None:
    """Makes `huggingface_hub` use the client in this process, for all that it downloads."""
    # `hf_xet` downloads with a client of its own, which knows no limits.
    huggingface_hub.constants.HF_HUB_DISABLE_XET = True

    def guarded() -> Any:
        client: Any = _http.default_client_factory()
        client.send = functools.partial(_send, client.send)
        client.event_hooks["response"].append(_check_headers)
        return client

    huggingface_hub.set_client_factory(guarded)


def _send(send: Callable[..., Any], request: Any, *, stream: bool = False, **options: Any) -> Any:
    if request.method not in ("GET", "HEAD"):
        return send(request, stream=stream, **options)
    times = request.extensions.setdefault("timeout", {})
    times.update({name: times.get(name) or _SILENCE_S for name in ("connect", "read", "write")})
    answered: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def ask() -> None:
        try:
            answered.set_result(send(request, stream=True, **options))
        except BaseException as error:  # raised again by `answered.result()`
            answered.set_exception(error)

    # A daemon, so that a server that never ends does not keep the process.
    threading.Thread(target=ask, daemon=True).start()
    concurrent.futures.wait([answered], timeout=ANSWER_S)
    if not answered.done():
        raise _fault(request, f"has not answered within {ANSWER_S:g} s")
    response = answered.result()
    if not stream:
        try:
            response.read()
        finally:
            response.close()
        if "/api/" in request.url.path and response.is_success:
            _check_names(request, response.json())
    return response


def _check_headers(response: Any) -> None:
    # Names of the cache come from HEAD only; a storage server may name what it sends as it likes.
    names = ("etag", "x-linked-etag", "x-repo-commit") if response.request.method == "HEAD" else ()
    for name in names:
        value = response.headers.get(name, "")
        if value and not _NAME.fullmatch(value.removeprefix("W/").strip('"')):
            raise _fault(
                response.request,
                f"sent the header {name} {value[:80]!r}, which is no name of a file",
            )
    whole = response.iter_bytes
    # In pieces as they come: to wait until a chunk is full would put off the limits. `huggingface_hub` reads
    # files with a chunk size, and answers without one.
    response.iter_bytes = lambda chunk_size=None: _limited(
        response, whole(), is_file=chunk_size is not None
    )


def _limited(response: Any, pieces: Iterator[bytes], *, is_file: bool) -> Iterator[bytes]:
    """The pieces of an answer; ends an answer that is too large or too slow."""
    # The length of compressed content says nothing of what comes out of it.
    sized = "content-length" in response.headers and "content-encoding" not in response.headers
    began, count = time.monotonic(), 0
    for piece in pieces:
        count += len(piece)
        seconds = time.monotonic() - began
        if not is_file and seconds > ANSWER_S:
            raise _fault(response.request, f"has not ended its answer within {ANSWER_S:g} s")
        if is_file and seconds > ANSWER_S and count < FILE_BYTES_PER_S * seconds:
            raise _fault(response.request, f"sent {count:,} bytes of a file in {seconds:.0f} s")
        most = UNSIZED_BYTES if is_file else ANSWER_BYTES
        if count > most and not (is_file and sized):
            raise _fault(
                response.request, f"sent more than {most:,} bytes without telling how many come"
            )
        yield piece


def _check_names(request: Any, answer: Any) -> None:
    """Checks the names in an answer that become paths in the cache."""
    if isinstance(answer, list):
        for member in answer:
            _check_names(request, member)
    if not isinstance(answer, dict):
        return
    for key, value in answer.items():
        # The card is the text of its author; no path is made of it.
        if key == "cardData" or value is None:
            continue
        well = True
        if key in _NAMES:
            well = isinstance(value, str) and _NAME.fullmatch(value)
        elif key in _PATHS:
            well = isinstance(value, str) and not {"", ".", ".."} & set(value.split("/"))
        if not well:
            raise _fault(
                request, f"tells the {key} {str(value)[:80]!r}, which is no name of a file"
            )
        _check_names(request, value)


def _fault(request: Any, fault: str) -> UserError:
    return UserError(
        f"{request.url.host} {fault}; check HF_ENDPOINT and the proxy, or put the files into a directory and "
        "name that"
    )
