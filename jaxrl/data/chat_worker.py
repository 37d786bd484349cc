"""The process in which chat templates are compiled and rendered; `data.chat` starts it and asks it.

    python -P chat_worker.py CPU_SECONDS MEMORY_BYTES

A template is code of a stranger. jinja2's immutable sandbox keeps it from Python's objects, but not from
`9 ** 9 ** 9` or loops within loops, and nothing stops these from within: so they run here, where the kernel
ends them. Each request has CPU_SECONDS of processor time, which a busy machine does not use up; a timer that
is left at its default action ends the process, whatever it is doing. Memory has a limit of its own.

One JSON object a line, in and out; it ends with its input:

    {"template": name, "source": text or null, "variables": {...} or null}
        -> {"text": rendered} or {"error": message}

The source comes with the first request for a template; without variables it is only compiled. Imports nothing
of jaxrl, so that it starts quickly.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.sandbox

_LONGEST_TEXT = 1 << 25
_LONGEST_ERROR = 500


def main() -> None:
    """Answers requests until there are no more."""
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    _limit_memory(memory_bytes)
    environment = _environment()
    templates: dict[str, jinja2.Template] = {}
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = _answer(environment, templates, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit_memory(memory_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))


def _answer(
    environment: jinja2.Environment, templates: dict[str, jinja2.Template], request: dict[str, Any]
) -> dict[str, str]:
    name, source, variables = request["template"], request["source"], request["variables"]
    try:
        if source is not None:
            templates[name] = environment.from_string(source)
        text = "" if variables is None else templates[name].render(variables)
    except MemoryError:
        return {"error": "it takes more memory than it may"}
    # What a stranger's code may raise is anything: it divides by zero, adds texts to numbers, recurses.
    except Exception as error:
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        return {"error": (kind + str(error))[:_LONGEST_ERROR]}
    if len(text) > _LONGEST_TEXT:
        return {"error": f"it writes {len(text)} characters; at most {_LONGEST_TEXT} are taken"}
    return {"text": text}


def _environment() -> jinja2.Environment:
    # These two settings and the extension are what published templates are written for; with
    # jinja's defaults they render with stray newlines.
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


if __name__ == "__main__":
    main()
