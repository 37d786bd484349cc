"""Questions and conversations: reads and checks messages, and renders them as the text of a prompt.

    "What is 1 + 1?"                              a template; the chat template, by setting
    [{"role": "user", "content": "What is ..."}]  always the tokenizer's chat template

Messages are OpenAI's, in rows and in requests alike. Not supported: pictures and other parts than text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxrl.data.rows import BadRow, Row, checked_text, field_of, shown
from jaxrl.errors import UserError

if TYPE_CHECKING:
    from jaxrl.data.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""{"role": ..., "content": text}, and what else of `read_message` has a value."""

Context: TypeAlias = str | tuple[Message, ...]
"""The input to an answer: a question, or the conversation so far."""

ASSISTANT = "assistant"
USER = "user"
SYSTEM = "system"
TOOL = "tool"
ROLES = (SYSTEM, "developer", USER, ASSISTANT, TOOL)

# The first is the one that templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_FIELDS = ("role", "content", "name", *_REASONING, "tool_calls", "tool_call_id")
# What servers and their clients keep beside a message. No model reads it.
_BESIDE = (
    *("annotations", "cache_control", "citations", "extra_content", "metadata", "parsed"),
    *("provider_specific_fields", "reasoning_details", "reasoning_items", "thinking_blocks"),
    *("created", "created_at", "id", "index", "model", "object", "status", "timestamp", "usage"),
    *("finish_reason", "logprobs", "prompt_token_ids", "refusal", "stop_reason", "token_ids"),
    *("content_filter_results", "executed_tools", "search_results", "signature"),
)


class MessageFault(UserError):
    """A message cannot be read.

    Attributes:
      fault: What is wrong.
      path: The place in the message, such as ("tool_calls", 0, "function").
    """

    def __init__(self, fault: str, *path: str | int):
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        super().__init__(f"{place.removeprefix('.')} {fault}".strip())
        self.fault, self.path = fault, path


def read_message(value: Any) -> dict[str, Any]:
    """Reads a message in OpenAI's form, from a row or a request, as chat templates want it.

    Example: {"role": "assistant", "content": None, "refusal": None, "reasoning": "A sum.", "tool_calls":
    [{"id": "a", "function": {"name": "add", "arguments": '{"a": 1}'}}]} becomes {"role": "assistant",
    "content": "", "reasoning_content": "A sum.", "tool_calls": [{"id": "a", "type": "function", "function":
    {"name": "add", "arguments": {"a": 1}}}]}.

    The content is a text: parts are joined, and null, which only the assistant may have, is "". Fields
    without a value (null, "", [], ...) are left out, whatever their names are, and so is what servers keep
    beside a message (`_BESIDE`). A refusal is the content of a message that has no other.

    Raises:
      MessageFault: It is no message, has a role that is not one of `ROLES`, or another field with a value.
    """
    if not isinstance(value, Mapping):
        raise MessageFault(f"is {shown(value)}; it must be an object with a role and a content")
    for name, item in value.items():
        if name not in _FIELDS and name not in _BESIDE and item:
            raise MessageFault(
                f"is no field of a message; it can have {', '.join(_FIELDS)}", str(name)
            )
    role = value.get("role")
    if role not in ROLES:
        raise MessageFault(f"is {shown(role)}; it must be one of {', '.join(ROLES)}", "role")
    content = value.get("content")
    if content is None and role == ASSISTANT:
        content = value.get("refusal") or ""
    if not isinstance(content, str):
        content = _joined(content)
    read = {"role": role, "content": _encodable(content, "content")}
    reasoning = next((value[name] for name in _REASONING if value.get(name)), "")
    optional = {"name": value.get("name"), "tool_call_id": value.get("tool_call_id")}
    for name, text in (optional | {_REASONING[0]: reasoning}).items():
        if text:
            read[name] = _encodable(text, name)
    calls = value.get("tool_calls") or ()
    if calls and role != ASSISTANT:
        raise MessageFault("only the assistant calls tools", "tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise MessageFault("must be a list of calls, each with a function", "tool_calls")
    calls = [_call(call, "tool_calls", i) for i, call in enumerate(calls)]
    # Templates ask whether the field is there at all.
    return read | ({"tool_calls": calls} if calls else {})


def _joined(parts: Any) -> str:
    texts = [
        part.get(part["type"])
        if isinstance(part, Mapping) and part.get("type") in ("text", "refusal")
        else None
        for part in (parts if isinstance(parts, Sequence) else [None])
    ]
    if not all(isinstance(text, str) for text in texts):
        raise MessageFault("must be a text, or a list of text parts", "content")
    return "".join(filter(None, texts))


def _call(call: Any, *path: str | int) -> dict[str, Any]:
    """A call of a tool; its arguments are an object, or the JSON text of one."""
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function")
    if call.get("type") not in (None, "", "function") or not isinstance(function, Mapping):
        raise MessageFault("must be an object with a function", *path)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise MessageFault("must be a text and not empty", *path, "function", "name")
    try:
        # Some clients send "" for no arguments.
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
        # Half of a surrogate pair, which JSON can have, is no text.
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise MessageFault("must be the JSON text of an object", *path, "function", "arguments")
    call_id = _encodable(call.get("id") or "", *path, "id")
    function = {"name": _encodable(name, *path, "function", "name"), "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _encodable(text: Any, *path: str | int) -> str:
    """Checks a text for a tokenizer: JSON can contain half of a surrogate pair, which none accepts."""
    if not isinstance(text, str):
        raise MessageFault(f"is {shown(text)}; it must be a text", *path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MessageFault(f"is no text: {error}", *path) from error
    return text


def prompt_of(row: Row) -> Context:
    """Returns the field "prompt", a question or a list of messages; BadRow if it is neither."""
    return as_context(field_of(row, "prompt"), "field 'prompt'")


def as_context(value: Any, what: str) -> Context:
    """Checks a question or a list of messages; BadRow, with the name `what`, if the value is neither."""
    return messages_of(value, what) if isinstance(value, list) else checked_text(value, what)


def messages_of(value: Any, what: str) -> tuple[Message, ...]:
    """Checks a list of messages; BadRow, with the name `what`, if the value is anything else."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{what} is {shown(value)}; it must be a list of messages and not empty")
    messages = []
    for i, item in enumerate(value, start=1):
        try:
            message = read_message(item)
        except MessageFault as error:
            raise BadRow(f"message {i} of {what}: {error}") from error
        content = f"'content' of message {i} of {what}"
        # A server may be asked nothing; a row without a question is broken. Other messages may be empty.
        if message["content"] or message["role"] == USER:
            checked_text(message["content"], content)
        messages.append(message)
    return tuple(messages)


def split_last_answer(
    messages: tuple[Message, ...], what: str
) -> tuple[tuple[Message, ...], Message]:
    """Splits a conversation into the messages before the last one, and the last one.

    Raises:
      BadRow: The last message is not the assistant's.
    """
    *before, last = messages
    if last["role"] != ASSISTANT:
        raise BadRow(
            f"the last message of {what} is by {last['role']!r}; it must be the {ASSISTANT}'s, "
            "which is what is trained on"
        )
    return tuple(before), last


def is_text(message: Message) -> bool:
    """Whether a message has neither reasoning nor calls, which are written as the chat template does."""
    return not {_REASONING[0], "tool_calls"} & message.keys()


def trained_text(message: Message, what: str) -> str:
    """The text of an answer to learn; BadRow, with the name `what`, if it is more or less than a text."""
    if beside := [name for name in (_REASONING[0], "tool_calls") if name in message]:
        raise BadRow(
            f"{what} has {' and '.join(beside)}, and an answer to learn is a text; write all of it into its "
            "content, as the model is to write it"
        )
    return checked_text(message["content"], f"'content' of {what}")


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """The format of a prompt. For example:

        template        "Solve it.\n{prompt}"        around the question
        system_prompt   "You are terse."             a system message; without chat, the first line
        chat            True                         the tokenizer's chat template renders the whole

    Attributes:
      template: Text around a question, with "{prompt}" in its place. Conversations have no template.
      chat: Whether the tokenizer's chat template renders a question, as one user message. It always renders
        conversations.
      system_prompt: System message of a conversation that does not begin with one; "" for none.
      chat_options: Further variables of the chat template, such as enable_thinking.
    """

    template: str = "{prompt}"
    chat: bool = False
    system_prompt: str = ""
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_template(self.template)

    def fill(self, question: str) -> str:
        # Not str.format, because templates may have other braces, such as \\boxed{}.
        return self.template.replace("{prompt}", question)


def render_context(
    context: Context, tokenizer: Tokenizer, prompt_format: PromptFormat, **options: Any
) -> str:
    """Renders a question or conversation as the text of the prompt; options are those of `render_chat`."""
    system = prompt_format.system_prompt
    if isinstance(context, str):
        text = prompt_format.fill(context)
        if not prompt_format.chat:
            return (f"{system}\n" if system else "") + text
        context = ({"role": USER, "content": text},)
    # A conversation keeps a system message of its own.
    if system and context[0]["role"] != SYSTEM:
        context = ({"role": SYSTEM, "content": system}, *context)
    return tokenizer.render_chat(context, **{**prompt_format.chat_options, **options})


def check_template(template: str) -> None:
    """Raises UserError for a template without "{prompt}"."""
    if "{prompt}" not in template:
        raise UserError(
            f"template {shown(template)} has no {{prompt}}, so every prompt would be alike"
        )


def text_of_context(context: Context) -> str:
    """The text of a question, or of all messages of a conversation."""
    return context if isinstance(context, str) else "\n".join(m["content"] for m in context)


PLAIN_FORMAT = PromptFormat()
"""The question alone."""
