"""Compiles and renders chat templates, in a process of its own that `data.chat` starts.

A template is untrusted code. jinja2's immutable sandbox protects Python's objects, but does not stop
`9 ** 9 ** 9` or nested loops. Only the kernel can, by ending the process.

The module imports no other file of this folder, so that the process starts within a tenth of a second.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.sandbox

from jaxrl.errors import UserError

_LONGEST_TEXT = 1 << 25
_LONGEST_ERROR = 500


def render(request: tuple[str, str | None]) -> str:
    """Renders a template.

    Args:
      request: (text of the template, its variables as JSON). With None for the variables the template is only
        compiled, and the result is empty.

    Raises:
      UserError: The template does not compile or raises, or its text is too long.
    """
    source, variables = request
    try:
        template = _compiled(source)
        text = "" if variables is None else template.render(json.loads(variables))
    except MemoryError:
        raise
    # Untrusted code may raise anything: it divides by zero, adds texts to numbers, recurses.
    except Exception as error:
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise UserError((kind + str(error))[:_LONGEST_ERROR]) from error
    if len(text) > _LONGEST_TEXT:
        raise UserError(f"it writes {len(text)} characters; at most {_LONGEST_TEXT} are taken")
    return text


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    # Published templates expect these two settings and the extension; with jinja's defaults they render
    # with stray newlines.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(time_format: str) -> str:
    return datetime.datetime.now().strftime(time_format)
