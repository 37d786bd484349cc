"""Checks `chat_template_kwargs` (vLLM's name): variables that a client passes to the model's chat template.

The template always runs in a sandbox (`data.chat`). The checks here keep a client from overriding the
server's own variables, and ensure that the values are plain JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.data.chat import RESERVED_VARIABLES

MAX_VARIABLES, MAX_NAME_CHARACTERS, MAX_DEPTH = 64, 64, 8

# The server supports no tools and no documents. If it ever does, they will be fields of their own.
_OF_THE_SERVER = RESERVED_VARIABLES | {"tools", "documents"}
# eos_token and the like: they belong to the model.
_SPECIAL_TOKEN = "_token"

VARIABLES_RULE = (
    f"an object of up to {MAX_VARIABLES} variables of the chat template, with texts, numbers, true, false, "
    f"null, and lists and objects of them up to {MAX_DEPTH} deep"
)


def variables_fault(variables: Mapping[str, Any]) -> str | None:
    """The rule that a client's variables break; None if they are valid.

    Args:
      variables: variables as parsed from JSON.
    """
    if len(variables) > MAX_VARIABLES:
        return f"there are {len(variables)}; give at most {MAX_VARIABLES}"
    for name, value in variables.items():
        if not (name.isascii() and name.isidentifier() and len(name) <= MAX_NAME_CHARACTERS):
            return (
                f"{ascii(name)[:60]} is no name of a variable: letters, digits and _, at most "
                f"{MAX_NAME_CHARACTERS} of them, and no digit first"
            )
        if name in _OF_THE_SERVER or name.endswith(_SPECIAL_TOKEN):
            return f"{name} is set by the server; name other variables of the chat template"
        if fault := _value_fault(value):
            return f"{name} {fault}"
    return None


def _value_fault(value: Any) -> str | None:
    level = [value]
    # Iterative: values can be nested deeper than Python's recursion limit.
    for _ in range(MAX_DEPTH + 1):
        objects = [item for item in level if isinstance(item, dict)]
        texts = [item for item in level if isinstance(item, str)]
        texts += [name for item in objects for name in item]
        if not all(map(_encodes, texts)):
            return "holds half of a surrogate pair, which is no text"
        inner = [part for item in objects for part in item.values()]
        inner += [part for item in level if isinstance(item, list) for part in item]
        if not inner:
            return None
        level = inner
    return f"is nested too deeply; {MAX_DEPTH} levels are read"


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
