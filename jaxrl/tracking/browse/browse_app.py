"""The pages of `jaxrl browse`: a list of samples with filters, and one sample, token by token.

Text of a model is treated as hostile. Templates escape all of it and show invisible characters as codes. The
pages have no scripts, and their content security policy forbids scripts, inline styles and foreign resources;
colours are CSS classes for this reason. `HttpServer` refuses requests that come under another site's name.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.resources
import math
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl.tracking.browse.sample_index import (
    ANY_FAILURE,
    NO_FAILURE,
    ORDERS,
    SEARCHED_CHARS,
    Filter,
    SampleIndex,
    real,
)
from jaxrl.tracking.report.page import environment_of
from jaxrl.tracking.sample_rows import TOKEN_STRINGS

_PER_PAGE = 50
_TOKENS_PER_PAGE = 2000
_CHARS_PER_PAGE = 40_000
# Largest numbers of characters shown of a prompt and of a single token.
_MOST_CHARS, _MOST_TOKEN_CHARS = 40_000, 1000
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


@dataclasses.dataclass(frozen=True)
class _Token:
    """A token on the page: its text, its CSS class and its tooltip."""

    text: str
    style: str
    title: str


def build_app(index: SampleIndex, *, title: str) -> ASGIApp:
    """Builds the web application.

    Args:
      index: index of the samples.
      title: title of the pages.
    """
    pages = _Pages(index, title)
    return _Guarded(
        Starlette(
            routes=[
                Route("/", pages.samples),
                Route("/sample/{file:str}/{line:int}", pages.sample),
                Route("/browse.css", pages.css),
            ],
            exception_handlers={HTTPException: _refused},
        )
    )


class _Pages:
    """The pages. Starlette runs plain methods in threads, so a long search blocks no other request."""

    def __init__(self, index: SampleIndex, title: str):
        self._index = index
        self._title = title
        self._templates = environment_of("jaxrl.tracking.browse")
        files = importlib.resources.files("jaxrl.tracking.browse")
        self._style = files.joinpath("browse.css").read_bytes()

    def samples(self, request: Request) -> Response:
        """Returns the list of the samples that pass the filter in the query."""
        # A field that is missing in the query counts as empty.
        given = collections.defaultdict(str, request.query_params)
        index, wanted = self._index, filter_of(given)
        overview = index.overview(wanted)
        pages = max(1, math.ceil(overview.count / _PER_PAGE))
        number = _page_number(given, pages)
        total, read = index.progress
        kinds = index.failures()
        return self._rendered(
            "list.html",
            given=given,
            asked=bool(given),
            overview=overview,
            rows=index.page(wanted, start=(number - 1) * _PER_PAGE, count=_PER_PAGE),
            number=number,
            pages=pages,
            links=_page_links(given, number, pages),
            sources=index.sources(),
            failures=[ANY_FAILURE, NO_FAILURE, *kinds] if kinds else [],
            orders=list(ORDERS),
            unread=1 - read / total if read < total else 0,
            bad_lines=index.bad_lines,
            searched=SEARCHED_CHARS,
        )

    def sample(self, request: Request) -> Response:
        """Returns one sample, token by token, coloured by the query's `color`."""
        found = self._index.sample(request.path_params["file"], request.path_params["line"])
        if found is None:
            raise HTTPException(404, "there is no such sample; go back to the list")
        place, row = found
        given = dict(request.query_params)
        color = given.get("color", "")
        color = color if color in ("logprob", "gap", "none") else "logprob"
        tokens = tokens_of(row)
        text = str(row.get("completion", ""))
        size = (len(tokens), _TOKENS_PER_PAGE) if tokens else (len(text), _CHARS_PER_PAGE)
        pages = max(1, math.ceil(size[0] / size[1]))
        number = _page_number(given, pages)
        part = slice((number - 1) * size[1], number * size[1])
        return self._rendered(
            "sample.html",
            place=place,
            row=row,
            prompt=str(row.get("prompt", "")),
            most_chars=_MOST_CHARS,
            facts=_facts(row),
            tokens=[_shown(token, color) for token in tokens[part]],
            text="" if tokens else text[part],
            color=color,
            has_gap=any(token["old_logprob"] is not None for token in tokens),
            number=number,
            pages=pages,
            links=_page_links(given, number, pages),
            group=self._index.group(place["file"], place["source"], place["prompt_id"]),
        )

    def css(self, request: Request) -> Response:
        """Returns the style sheet."""
        del request
        return Response(self._style, media_type="text/css")

    def _rendered(self, template: str, **values: Any) -> HTMLResponse:
        text = self._templates.get_template(template).render(title=self._title, **values)
        # Lone surrogates cannot be encoded as UTF-8.
        return HTMLResponse(text.encode("utf-8", errors="backslashreplace"))


def _refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "registered for this type"
    return PlainTextResponse(error.detail, status_code=error.status_code, headers=error.headers)


class _Guarded:
    """Middleware that adds the security headers."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, send_guarded)


def filter_of(given: Mapping[str, str]) -> Filter:
    """Builds the filter from the fields of the form. Fields that must be numbers and are not are ignored."""

    def between(name: str) -> tuple[float | None, float | None]:
        return _number(given.get(f"{name}_from")), _number(given.get(f"{name}_to"))

    yes_or_no = {"yes": True, "no": False}
    return Filter(
        text=given.get("text", "")[:1000],
        source=given.get("source", ""),
        correct=yes_or_no.get(given.get("correct", "")),
        truncated=yes_or_no.get(given.get("truncated", "")),
        failure=given.get("failure", "")[:1000],
        step=between("step"),
        reward=between("reward"),
        length=between("length"),
        order=given.get("order", "newest"),
    )


def _number(text: str | None) -> float | None:
    try:
        return real(float(text or ""))
    except ValueError:
        return None


def _page_number(given: Mapping[str, str], pages: int) -> int:
    number = _number(given.get("page"))
    return min(max(int(number or 1), 1), pages)


def _page_links(given: Mapping[str, str], number: int, pages: int) -> list[tuple[str, str]]:
    """(label, query string) of the first, previous, next and last page, with the other fields unchanged."""
    wanted = {"first": 1, "previous": number - 1, "next": number + 1, "last": pages}
    return [
        (label, "?" + urllib.parse.urlencode({**given, "page": page}, errors="replace"))
        for label, page in wanted.items()
        if 1 <= page <= pages and page != number
    ]


def tokens_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tokens of a row, each with its log-probabilities; empty if the row has no valid tokens."""
    fields = row.get(TOKEN_STRINGS)
    texts = fields.get("text") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(texts, list):
        return []
    given = fields.get("given")
    places = {x for x in given if isinstance(x, int)} if isinstance(given, list) else set()
    known = {}
    for name in ("rollout_logprob", "old_logprob"):
        values = fields.get(name)
        values = (
            values
            if isinstance(values, list) and len(values) == len(texts)
            else [None] * len(texts)
        )
        known[name] = [real(value) for value in values]
    return [
        {
            "text": text if isinstance(text, str) else "",
            "rollout_logprob": known["rollout_logprob"][i],
            "old_logprob": known["old_logprob"][i],
            "given": i in places,
        }
        for i, text in enumerate(texts)
    ]


def _shown(token: Mapping[str, Any], color: str) -> _Token:
    text = token["text"][:_MOST_TOKEN_CHARS] or "\N{WHITE VERTICAL RECTANGLE}"
    sampler, trainer = token["rollout_logprob"], token["old_logprob"]
    if token["given"]:
        return _Token(text, "given", "from the environment")
    title = [] if sampler is None else [f"sampler {sampler:.4f} ({math.exp(min(sampler, 0)):.1%})"]
    if trainer is not None:
        title.append(f"trainer {trainer:.4f} ({math.exp(min(trainer, 0)):.1%})")
    style = ""
    if color == "logprob" and sampler is not None:
        style = f"p{_class(-sampler, _LOGPROB_ENDS)}"
    if sampler is not None and trainer is not None:
        title.append(f"gap {trainer - sampler:+.4f}")
        if color == "gap":
            side = "up" if trainer > sampler else "down"
            style = f"{side}{_class(abs(trainer - sampler), _GAP_ENDS)}"
    return _Token(text, style, ", ".join(title))


def _class(value: float, ends: Sequence[float]) -> int:
    return sum(value >= end for end in ends)


def _facts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of the table above a sample's text."""
    names = ("step", "source", "prompt_id", "sample", "answer", "prediction", "correct", "reward")
    names += ("score", "shaping", "length", "truncated", "stop_reason", "entropy")
    facts = [(name, row[name]) for name in names if row.get(name) is not None]
    failure = row.get("failure")
    if isinstance(failure, dict):
        facts.append(("grader failed", f"{failure.get('kind')}: {failure.get('message')}"))
    parts = row.get("reward_parts")
    if isinstance(parts, dict):
        facts += [(f"reward, {name}", value) for name, value in parts.items()]
    return [(str(name)[:100], str(value)[:1000]) for name, value in facts]
