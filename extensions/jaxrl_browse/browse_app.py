"""The pages of `jaxrl browse`: the samples of one step with filters, and one sample, token by token.

A page reads the file of its step, and keeps it until the file changes or another step is asked for. 2,048
samples of 512 tokens (33 MB) are read in a third of a second.

Text of a model is treated as hostile. Templates escape all of it and show invisible characters as codes. The
pages have no scripts, and their content security policy forbids scripts, inline styles and foreign resources;
colours are CSS classes for this reason. `HttpServer` refuses requests that come under another site's name.
"""

from __future__ import annotations

import bisect
import collections
import importlib.resources
import json
import math
import pathlib
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl.files import open_file
from jaxrl.tracking.readable import visible
from jaxrl.tracking.sample_rows import TOKEN_STRINGS, read_head
from jaxrl_report.page import environment_of

# Number of characters of a text that are searched. The pages also show the rest.
_SEARCHED_CHARS = 100_000
# Number of characters of a text in a list: its beginning and its end.
_START_CHARS, _END_CHARS = 120, 160
_PER_PAGE = 50
_TOKENS_PER_PAGE = 2000
_CHARS_PER_PAGE = 40_000
# Largest numbers of characters shown of a prompt, of a single token and of a fact, such as an error.
_MOST_CHARS, _MOST_TOKEN_CHARS, _MOST_FACT_CHARS = 40_000, 1000, 2000
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

# Upper bounds of the colour classes, in nats: negative log-probability of a token, and its difference
# between sampler and trainer.
_LOGPROB_ENDS = (0.1, 0.4, 1.0, 2.0, 4.0)
_GAP_ENDS = (0.01, 0.05, 0.2, 0.5, 1.0)


_ORDERS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    # Samples without a value come last.
    "reward, highest": lambda row: math.inf if row["reward"] is None else -row["reward"],
    "reward, lowest": lambda row: math.inf if row["reward"] is None else row["reward"],
    "longest": lambda row: math.inf if row["length"] is None else -row["length"],
    "shortest": lambda row: math.inf if row["length"] is None else row["length"],
}
_FACTS = (
    *("step", "source", "prompt_id", "sample", "answer", "prediction", "correct", "reward"),
    *("score", "shaping", "length", "truncated", "stop_reason", "entropy"),
)
_ANY_FAILURE, _NO_FAILURE = "any kind", "none"
# Kind of a failure that is no grader's.
_AGENT = "agent"


class SampleFile:
    """The samples of a file, without their tokens.

    Attributes:
      rows: one dict per sample: its line, its place in the file, the columns of lists, and "folded", the text
        to search.
    """

    def __init__(self, path: pathlib.Path):
        """Reads the whole file, except for an incomplete last line."""
        self.rows: list[dict[str, Any]] = []
        self._path = path
        start = 0
        with open_file(path, absent="name a file of samples") as file:
            for number, line in enumerate(file):
                # A running job may be writing this line.
                if not line.endswith(b"\n"):
                    break
                self.rows.append(_columns(read_head(line)) | {"line": number, "start": start})
                start += len(line)

    def whole(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The complete row of a sample, with its tokens."""
        with self._path.open("rb") as file:
            file.seek(row["start"])
            return json.loads(file.readline())


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    # The columns of a sample. Its texts are a model's, so none of them is shown as it is.
    texts = {name: row.get(name) or "" for name in ("prompt", "completion", "answer", "prediction")}
    searched = (texts[name][:_SEARCHED_CHARS] for name in ("prompt", "completion", "answer"))
    plain = ("step", "prompt_id", "sample", "correct", "reward", "length", "truncated")
    failure = row.get("failure") or {}
    texts["fault"] = ": ".join(_fault(failure))
    return {
        **{name: row.get(name) for name in plain},
        "source": visible(row.get("source") or ""),
        "failure": visible(failure.get("kind", "")),
        # The beginning of a text and its end, where the answer usually is, or the line of an error.
        **{
            name: visible(
                text
                if len(text) <= _START_CHARS + _END_CHARS
                else f"{text[:_START_CHARS]} […] {text[-_END_CHARS:]}"
            )
            for name, text in texts.items()
        },
        "folded": visible("\n".join(searched)).casefold(),
    }


def _fault(failure: Mapping[str, Any]) -> list[str]:
    # Who failed and why; empty if none did.
    if not failure:
        return []
    if failure["kind"] == _AGENT:
        return ["agent failed", failure["message"]]
    return ["grader failed", f"{failure['kind']}: {failure['message']}"]


def passing(rows: Sequence[dict[str, Any]], given: Mapping[str, str]) -> list[dict[str, Any]]:
    """The samples that pass the filter in the fields of the form, in the order that it asks for.

    Fields that must be numbers and are not are ignored, as are unknown choices.
    """
    found = list(rows)
    for name in ("correct", "truncated"):
        wanted = {"yes": True, "no": False}.get(given.get(name, ""))
        if wanted is not None:
            found = [row for row in found if row[name] is wanted]
    if source := given.get("source", ""):
        found = [row for row in found if row["source"] == source]
    if failure := given.get("failure", ""):
        plain = {_ANY_FAILURE: True, _NO_FAILURE: False}.get(failure)
        found = [
            row
            for row in found
            if (row["failure"] == failure if plain is None else bool(row["failure"]) == plain)
        ]
    for name in ("reward", "length"):
        low, high = (_number(given.get(f"{name}_{end}")) for end in ("from", "to"))
        if low is not None:
            found = [row for row in found if row[name] is not None and row[name] >= low]
        if high is not None:
            found = [row for row in found if row[name] is not None and row[name] <= high]
    if text := visible(given.get("text", "")[:1000]).casefold():
        found = [row for row in found if text in row["folded"]]
    order = _ORDERS.get(given.get("order", ""))
    return found if order is None else sorted(found, key=order)


def build_app(files: Callable[[], Sequence[pathlib.Path]], *, title: str) -> ASGIApp:
    """Builds the web application.

    Args:
      files: returns the present files of samples, the newest first.
      title: title of the pages.
    """
    pages = _Pages(files, title)
    style = importlib.resources.files("jaxrl_browse").joinpath("browse.css").read_bytes()

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this type"
        return PlainTextResponse(error.detail, error.status_code, error.headers)

    app = Starlette(
        routes=[
            Route("/", pages.samples),
            Route("/sample/{file:str}/{line:int}", pages.sample),
            Route("/browse.css", lambda _: Response(style, media_type="text/css")),
        ],
        exception_handlers={HTTPException: refused},
    )

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] == "http":
            await app(scope, receive, send_guarded)

    return guarded


class _Pages:
    """The pages. Starlette runs plain methods in threads, so a long search blocks no other request."""

    def __init__(self, files: Callable[[], Sequence[pathlib.Path]], title: str):
        self._files = files
        self._title = title
        self._templates = environment_of("jaxrl_browse")
        self._reading = threading.Lock()
        self._read: tuple[Any, SampleFile] | None = None

    def _file(self, path: pathlib.Path) -> SampleFile:
        # The samples of a file; the last file is kept until it changes.
        with self._reading:
            try:
                status = path.stat()
                key = (path, status.st_ino, status.st_size, status.st_mtime_ns)
                if self._read is None or self._read[0] != key:
                    self._read = None  # two large files at a time would need twice the memory
                    self._read = key, SampleFile(path)
            except OSError as error:
                raise HTTPException(
                    404, f"{path.name} cannot be read; go back to the list"
                ) from error
            return self._read[1]

    def samples(self, request: Request) -> Response:
        """Returns the list of a step's samples that pass the filter in the query."""
        # A field that is missing in the query counts as empty.
        given = collections.defaultdict(str, request.query_params)
        # Looked up by name among the present files: a query never becomes a path.
        paths = {path.stem: path for path in self._files()}
        name = given["file"] if given["file"] in paths else next(iter(paths), "")
        found = self._file(paths[name]) if name else None
        rows = passing(found.rows, given) if found else []
        pages = max(1, math.ceil(len(rows) / _PER_PAGE))
        number, asked = _page_number(given, pages), bool(given)
        # Further pages are of this step, even if a newer one is there by then.
        given |= {"file": name}
        kinds = sorted({row["failure"] for row in found.rows} - {""})[:50] if found else []
        means = {}
        for key in ("reward", "correct", "length"):
            # What an agent left that failed is no response.
            known = [x[key] for x in rows if x[key] is not None and x["failure"] != _AGENT]
            means[key] = sum(known) / len(known) if known else None
        return self._rendered(
            "list.html",
            given=given,
            asked=asked,
            count=len(rows),
            means=means,
            rows=rows[(number - 1) * _PER_PAGE : number * _PER_PAGE],
            number=number,
            pages=pages,
            links=_page_links(given, number, pages),
            files=list(paths),
            file=name,
            sources=sorted({row["source"] for row in found.rows} - {""})[:200] if found else [],
            failures=[_ANY_FAILURE, _NO_FAILURE, *kinds] if kinds else [],
            orders=list(_ORDERS),
            searched=_SEARCHED_CHARS,
        )

    def sample(self, request: Request) -> Response:
        """Returns one sample, token by token, coloured by the query's `color`."""
        name, line = request.path_params["file"], request.path_params["line"]
        path = next((path for path in self._files() if path.stem == name), None)
        found = self._file(path) if path else None
        place = next((row for row in found.rows if row["line"] == line), None) if found else None
        if not found or not place:
            raise HTTPException(404, "there is no such sample; go back to the list")
        row = found.whole(place)
        given = dict(request.query_params)
        color = given.get("color", "")
        color = color if color in ("logprob", "gap", "version", "none") else "logprob"
        # The table above the text.
        facts = [(key, row[key]) for key in _FACTS if row.get(key) is not None]
        if fault := _fault(row.get("failure") or {}):
            facts.append((fault[0], fault[1]))
        parts = row.get("reward_parts", {}).items()
        facts += [(f"reward, {part}", x) for part, x in parts if x is not None]
        tokens = tokens_of(row)
        text = row["completion"]
        size = (len(tokens), _TOKENS_PER_PAGE) if tokens else (len(text), _CHARS_PER_PAGE)
        pages = max(1, math.ceil(size[0] / size[1]))
        number = _page_number(given, pages)
        # Long samples have pages, because a browser is slow with tens of thousands of spans.
        part = slice((number - 1) * size[1], number * size[1])
        same = ("source", "prompt_id")
        group = [x for x in found.rows if all(x[key] == place[key] for key in same)]
        newest = max((token["version"] or 0 for token in tokens), default=0)
        return self._rendered(
            "sample.html",
            file=name,
            place=place,
            prompt=row["prompt"],
            most_chars=_MOST_CHARS,
            facts=[(str(name)[:100], str(value)[:_MOST_FACT_CHARS]) for name, value in facts],
            traceback=(row.get("failure") or {}).get("traceback", ""),
            tokens=[_shown(token, color, newest) for token in tokens[part]],
            text="" if tokens else text[part],
            color=color,
            unknown={
                color
                for color, field in (("gap", "old_logprob"), ("version", "version"))
                if all(token[field] is None for token in tokens)
            },
            number=number,
            pages=pages,
            links=_page_links(given, number, pages),
            group=sorted(group, key=lambda x: x["sample"] or 0)[:500],
        )

    def _rendered(self, template: str, **values: Any) -> HTMLResponse:
        text = self._templates.get_template(template).render(title=self._title, **values)
        # Lone surrogates cannot be encoded as UTF-8.
        return HTMLResponse(text.encode("utf-8", errors="backslashreplace"))


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _page_number(given: Mapping[str, str], pages: int) -> int:
    number = _number(given.get("page"))
    return min(max(int(number or 1), 1), pages)


def _page_links(given: Mapping[str, str], number: int, pages: int) -> list[tuple[str, str]]:
    # (label, query string) of the first, previous, next and last page, with the other fields unchanged.
    wanted = {"first": 1, "previous": number - 1, "next": number + 1, "last": pages}
    return [
        (label, "?" + urllib.parse.urlencode({**given, "page": page}, errors="replace"))
        for label, page in wanted.items()
        if 1 <= page <= pages and page != number
    ]


def tokens_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tokens of a row, each with its log-probabilities; empty if the row has no tokens.

    Further conversations of the sample follow, each after a heading.
    """
    fields = row.get(TOKEN_STRINGS)
    if not fields:
        return []
    names, given = ("rollout_logprob", "old_logprob", "version"), {*fields.get("given", ())}
    known = [fields.get(name) or [None] * len(fields["text"]) for name in names]
    tokens = [
        {"text": text, **dict(zip(names, logprobs, strict=True)), "given": i in given}
        for i, (text, *logprobs) in enumerate(zip(fields["text"], *known, strict=True))
    ]
    for number, branch in enumerate(fields.get("branches", ()), start=2):
        heading = f"\n\n[conversation {number}]\n"
        tokens.append({"text": heading, **dict.fromkeys(names), "given": True})
        tokens += tokens_of({TOKEN_STRINGS: branch})
    return tokens


def _shown(token: Mapping[str, Any], color: str, newest: int) -> dict[str, str]:
    # The text of a token on the page, its CSS class and its tooltip.
    text = token["text"][:_MOST_TOKEN_CHARS] or "\N{WHITE VERTICAL RECTANGLE}"
    sampler, trainer = token["rollout_logprob"], token["old_logprob"]
    if token["given"]:
        return {"text": text, "style": "given", "title": "not sampled here"}
    title = [] if sampler is None else [f"sampler {sampler:.4f} ({math.exp(min(sampler, 0)):.1%})"]
    if trainer is not None:
        title.append(f"trainer {trainer:.4f} ({math.exp(min(trainer, 0)):.1%})")
    style = ""
    if color == "logprob" and sampler is not None:
        style = f"p{bisect.bisect_right(_LOGPROB_ENDS, -sampler)}"
    if sampler is not None and trainer is not None:
        title.append(f"gap {trainer - sampler:+.4f}")
        if color == "gap":
            side = "up" if trainer > sampler else "down"
            style = f"{side}{bisect.bisect_right(_GAP_ENDS, abs(trainer - sampler))}"
    if (version := token["version"]) is not None:
        title.append(f"weights of step {version}")
        if color == "version":
            style = f"p{min(newest - version, 5)}"
    return {"text": text, "style": style, "title": ", ".join(title)}
