"""Formats of tool calls: how families of models write them, and how they are read.

    format       text of a call, as the model writes it                   recognised in the chat template by
    Hermes       <tool_call>\n{"name": .., "arguments": {..}}\n</tool_call>  <tool_call>       (Qwen2.5, 3)
    Qwen3-Coder  <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n      <function=        (Qwen3.5, too)
                 </parameter>\n</function>\n</tool_call>
    GLM          <tool_call>NAME\n<arg_key>KEY</arg_key>\n                  <arg_key>
                 <arg_value>VALUE</arg_value>\n</tool_call>
    Gemma 4      <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1}<tool_call|>  <|tool_call>
    gpt-oss      <|channel|>commentary to=functions.NAME                  <|channel|>, <|message|>
                 <|constrain|>json<|message|>{..}<|call|>
    Llama 3      {"name": .., "parameters": {..}}                         ipython, "parameters"
    Mistral      [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]        [TOOL_CALLS]
    Ministral 3  [TOOL_CALLS]NAME[ARGS]{..}                               [ARGS]            (Magistral, too)

Qwen3-Coder and GLM write values as text. Their types are those of the tool's schema (`typed`). Not supported:
Llama 4's Python, and what Mistral's first models wrote without a list.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model.

    Attributes:
      name: name of the tool.
      arguments: JSON text of an object.
      id: name of the call in the messages of its client; it does not count when calls are compared.
    """

    name: str
    arguments: str
    id: str = dataclasses.field(default="", compare=False)


Calls = tuple[ToolCall, ...]


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    Attributes:
      opening: text that begins the calls.
      split: text of an answer and schemas of its tools -> its content and its calls; ValueError if the calls
        are malformed.
      forced: beginning of an answer that must call a tool; "" if calls are no JSON, which no grammar holds.
      forced_name: what follows it if the tool is named; "{}" is the name.
      closing: what follows the arguments of a call.
      parts: further texts that calls are made of, and that may be special tokens.
      bare: whether calls are also recognised by an answer that begins with "{".
      repeats: whether further calls follow, each in a line with an opening of its own.
      channels: whether an answer is a row of messages, each with a channel (`channels_of`).
    """

    opening: str
    split: Callable[[str, Schemas], tuple[str, Calls]]
    forced: str = ""
    forced_name: str = ""
    closing: str = ""
    _: dataclasses.KW_ONLY
    parts: tuple[str, ...] = ()
    bare: bool = False
    repeats: bool = False
    channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts of calls that may be special tokens."""
        return self.opening, *self.parts

    def begin(self, name: str = "") -> str:
        """The beginning of an answer that must call a tool, or the tool `name`.

        It ends where a token of the model's own ends: before the space of `: {`, which belongs to the brace.
        """
        return self.forced + (self.forced_name.replace("{}", name) if name else "")

    def visible(self, text: str) -> str:
        """The beginning of a text that is content, whatever follows.

        `text` is the beginning of an answer, without its reasoning.
        """
        if self.bare and text.lstrip().startswith("{"):
            return ""
        return before(text, self.opening).rstrip()


def before(text: str, mark: str) -> str:
    """What precedes `mark`, or precedes an end of `text` that may become it."""
    if (at := text.find(mark)) >= 0:
        return text[:at]
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    begun = next((length for length in lengths if text.endswith(mark[:length])), 0)
    return text[: len(text) - begun]


# Calls that are JSON


def _call_of(name: Any, given: Any) -> ToolCall:
    """A call of these arguments; ValueError if it is none."""
    if not isinstance(name, str):
        raise ValueError("a call is an object with a name")
    if not isinstance(given, dict):
        raise ValueError("arguments are an object")
    text = json.dumps(given, ensure_ascii=False)
    text.encode()  # \ud800 in JSON is no text
    return ToolCall(name, text)


def _call(value: Any, arguments: str = "arguments") -> ToolCall:
    """A call from its JSON; ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError("a call is an object with a name")
    return _call_of(value.get("name"), value.get(arguments, value.get("arguments", {})))


def _hermes(text: str, schemas: Schemas) -> tuple[str, Calls]:
    content, *rest = text.split("<tool_call>")
    # The last call may have been ended by the end of the answer instead of its closing tag.
    calls = tuple(_call(json.loads(part.split("</tool_call>")[0])) for part in rest)
    return content.rstrip() if calls else text, calls


def _llama(text: str, schemas: Schemas) -> tuple[str, Calls]:
    content, tag, rest = text.partition("<|python_tag|>")
    if not tag:
        if not text.lstrip().startswith("{"):
            return text, ()
        content, rest = "", text
    calls, at = [], 0
    while at < len(rest):
        value, at = _JSON.raw_decode(rest, _BETWEEN.match(rest, at).end())  # pyright: ignore
        calls.append(_call(value, "parameters"))
        at = _BETWEEN.match(rest, at).end()  # pyright: ignore
    return content.rstrip(), tuple(calls)


def _mistral(text: str, schemas: Schemas) -> tuple[str, Calls]:
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return text, ()
    values = json.loads(rest)
    if not isinstance(values, list):
        raise ValueError("calls are a list")
    return content.rstrip(), tuple(map(_call, values))


def _named_arguments(text: str, schemas: Schemas) -> tuple[str, Calls]:
    content, *rest = text.split("[TOOL_CALLS]")
    calls = []
    for part in rest:
        name, mark, given = part.partition("[ARGS]")
        if not mark:
            raise ValueError("a call has arguments")
        calls.append(_call_of(name.partition("[CALL_ID]")[0].strip(), json.loads(given)))
    return content.rstrip() if calls else text, tuple(calls)


_JSON = json.JSONDecoder()
_BETWEEN = re.compile(r"[\s;]*")


# Calls whose values are text


def typed(text: str, schema: Any, root: Any = None) -> Any:
    """The value of a text by its JSON schema; the text itself if the schema does not say what it is.

    Of several types a text is the first of null, boolean, number, array and object that it spells, and else a
    string.

    Args:
      text: what the model wrote.
      schema: schema of the value.
      root: schema that references ("#/$defs/Point") are looked up in.

    Raises:
      ValueError: it is no value of the schema's types.
    """
    kinds = _kinds(schema, root, set())
    if kinds <= _TEXTS:
        return text
    word = text.strip()
    try:
        # As some templates write them, in Python's way.
        value = _WORDS[word] if word in _WORDS else json.loads(word)
    except ValueError:
        value = text
    if not isinstance(value, str) and not kinds.isdisjoint(_KINDS_OF.get(type(value), ())):
        return value
    if kinds & _TEXTS:
        return text
    raise ValueError(f"{text[:80]!r} is no {' or '.join(sorted(kinds))}")


# A string, or what the schema says nothing about.
_TEXTS = {"string", ""}
_WORDS = {"True": True, "False": False, "None": None}
_KINDS_OF = {
    bool: {"boolean"},
    type(None): {"null"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    str: {"string"},
}


def _kinds(schema: Any, root: Any, seen: set[str]) -> set[str]:
    """The types that a schema allows, "" if it does not say. References in `seen` are not followed again."""
    if not isinstance(schema, Mapping):
        return {""}
    if isinstance(place := schema.get("$ref"), str):
        if place in seen:
            return set()
        seen.add(place)
        found = root
        for key in place.removeprefix("#/").split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return _kinds(found, root, seen)
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else {x for x in _list(named) if isinstance(x, str)}
    if not kinds:
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        kinds = {kind for value in values for kind in _KINDS_OF.get(type(value), ())}
        for one in (x for name in ("anyOf", "oneOf", "allOf") for x in _list(schema.get(name))):
            kinds |= _kinds(one, root, seen)
    return kinds or {"object" if "properties" in schema else ""}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _of_texts(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> ToolCall:
    root = schemas.get(name, {})
    properties = root.get("properties")
    of_key = properties if isinstance(properties, Mapping) else {}
    given = {key.strip(): typed(value, of_key.get(key.strip()), root) for key, value in pairs}
    return _call_of(name, given)


def _tagged(head: str, pair: str, end: str) -> Callable[[str, Schemas], tuple[str, Calls]]:
    """Reads calls of the form `<tool_call>` head, pairs of key and value, end."""
    of_head, of_pair, of_end = map(re.compile, (head, pair, end))

    def split(text: str, schemas: Schemas) -> tuple[str, Calls]:
        content, at, calls = before(text, "<tool_call>"), 0, []
        while (at := text.find("<tool_call>", at)) >= 0:
            if (found := of_head.match(text, at + len("<tool_call>"))) is None:
                raise ValueError("a call begins with its name")
            name, pairs = found[1], []
            while next_pair := of_pair.match(text, found.end()):
                found = next_pair
                pairs.append((found[1], found[2]))
            if (closed := of_end.match(text, found.end())) is None:
                raise ValueError("a call has keys with values, and an end")
            calls.append(_of_texts(name, pairs, schemas))
            at = closed.end()
        return content.rstrip() if calls else text, tuple(calls)

    return split


# A value may have anything in it, so it ends only where the call goes on or ends. The last call may have
# been ended by the end of the answer instead of its closing tag.
_coder = _tagged(
    r"\s*<function=([^>\n]+)>\s*",
    r"<parameter=([^>\n]+)>\n?((?s:.)*?)\n?</parameter>\s*(?=<parameter=|</function>)",
    r"</function>\s*(?:</tool_call>|\Z)",
)
_glm = _tagged(
    r"\s*([^\s<]+)\s*",
    r"<arg_key>([^<]+)</arg_key>\s*<arg_value>((?s:.)*?)</arg_value>\s*"
    r"(?=<arg_key>|</tool_call>|\Z)",
    r"(?:</tool_call>|\Z)",
)


# Gemma's notation

_QUOTE = '<|"|>'
_GEMMA_HEAD = re.compile(r"\s*call:([^\s{]+)\s*")
_GEMMA_KEY = re.compile(r'\s*([^\s:{}\[\],<"]+)\s*:')
_GEMMA_QUOTED_KEY = re.compile(r'\s*<\|"\|>((?s:.)*?)<\|"\|>\s*:')
_GEMMA_WORD = re.compile(r"[^\s,{}\[\]<]+")
_SPACE = re.compile(r"\s*")


def _gemma(text: str, schemas: Schemas) -> tuple[str, Calls]:
    content, at, calls = before(text, "<|tool_call>"), 0, []
    while (at := text.find("<|tool_call>", at)) >= 0:
        if (head := _GEMMA_HEAD.match(text, at + len("<|tool_call>"))) is None:
            raise ValueError("a call begins with call: and its name")
        given, at = _gemma_value(text, head.end())
        calls.append(_call_of(head[1], given))
        if not text.startswith("<tool_call|>", at) and text[at:].strip():
            raise ValueError("a call ends behind its arguments")
    return content.rstrip() if calls else text, tuple(calls)


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """A value, and where it ends."""
    at = _spaces(text, at)
    if text.startswith(_QUOTE, at):
        end = text.index(_QUOTE, at + len(_QUOTE))
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        is_object = text[at] == "{"
        close, pairs, values = "}" if is_object else "]", {}, []
        at = _spaces(text, at + 1)
        while text[at : at + 1] != close:
            if pairs or values:
                if text[at : at + 1] != ",":
                    raise ValueError("a comma between two values")
                at += 1
            if is_object:
                key = _GEMMA_QUOTED_KEY.match(text, at) or _GEMMA_KEY.match(text, at)
                if key is None:
                    raise ValueError("a key and a colon before each value of an object")
                pairs[key[1]], at = _gemma_value(text, key.end())
            else:
                value, at = _gemma_value(text, at)
                values.append(value)
            at = _spaces(text, at)
        return (pairs if is_object else values), at + 1
    word = _GEMMA_WORD.match(text, at)
    if word is None:
        raise ValueError("a value is missing")
    return json.loads(word[0]), word.end()


def _spaces(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


# gpt-oss's channels


class ChannelMessage(NamedTuple):
    """A message of an answer: whom it goes to ("" for the user), its channel, and its text."""

    to: str
    channel: str
    text: str


_MESSAGE_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w*)")


def channels_of(text: str, *, ended: bool) -> list[ChannelMessage]:
    """The messages of an answer of gpt-oss, the last of which may be cut.

    Example: `<|channel|>analysis<|message|>A sum.<|end|><|start|>assistant<|channel|>commentary
    to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>` is analysis, and a call.

    Args:
      text: the answer.
      ended: whether nothing follows. A text without any head is then a final one.
    """
    if ended and "<|message|>" not in text:
        return [ChannelMessage("", "final", _MESSAGE_ENDS.sub("", text))]
    found = []
    for part in _MESSAGE_ENDS.split(text):
        head, mark, said = part.partition("<|message|>")
        if mark:
            to, channel = _TO.search(head), _CHANNEL.search(head)
            message = to[1] if to else "", channel[1] if channel else "final", said
            found.append(ChannelMessage(*message))
    return found


def joined(messages: list[ChannelMessage], *, reasoning: bool = False, calls: bool = True) -> str:
    """The texts of messages: reasoning for nobody, or all others, with those that are `calls` or without."""
    return "\n".join(
        message.text
        for message in messages
        if (message.channel == "analysis" and not message.to) == reasoning
        and (calls or not message.to)
    )


def _harmony(text: str, schemas: Schemas) -> tuple[str, Calls]:
    messages = channels_of(text, ended=True)
    calls = tuple(
        _call_of(message.to.removeprefix("functions."), json.loads(message.text))
        for message in messages
        if message.to
    )
    return joined(messages, calls=False), calls


# All of them

HERMES = CallFormat(
    "<tool_call>",
    _hermes,
    '<tool_call>\n{"name": "',
    '{}", "arguments":',
    "}\n</tool_call>",
    repeats=True,
)
LLAMA = CallFormat("<|python_tag|>", _llama, '{"name": "', '{}", "parameters":', "}", bare=True)
MISTRAL = CallFormat(
    "[TOOL_CALLS]", _mistral, '[TOOL_CALLS] [{"name": "', '{}", "arguments":', "}]"
)
MINISTRAL = CallFormat("[TOOL_CALLS]", _named_arguments, parts=("[ARGS]", "[CALL_ID]"))
CODER = CallFormat("<tool_call>", _coder, parts=("</tool_call>",))
GLM = CallFormat(
    "<tool_call>",
    _glm,
    parts=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GEMMA = CallFormat("<|tool_call>", _gemma, parts=("<tool_call|>", _QUOTE))
HARMONY = CallFormat(
    "<|channel|>",
    _harmony,
    parts=(
        *("<|start|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    channels=True,
)


def call_format(template: str) -> CallFormat | None:
    """The format of calls that a chat template shows to its model; None if it is not known."""
    if "[TOOL_CALLS]" in template:
        return MINISTRAL if "[ARGS]" in template else MISTRAL
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "<|tool_call>" in template:
        return GEMMA
    if "<tool_call>" in template:
        inside = {"<function=": CODER, "<arg_key>": GLM}
        return next((form for mark, form in inside.items() if mark in template), HERMES)
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA
    return None
