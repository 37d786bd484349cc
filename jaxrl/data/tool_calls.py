"""Tool calls: chat messages with them, and the views that are parsed from sampled tokens.

    format    text of a call, as the model writes it                    recognised in the chat template by
    Hermes    <tool_call>\n{"name": .., "arguments": {..}}\n</tool_call>  <tool_call>       (Qwen, too)
    Llama 3   {"name": .., "parameters": {..}}                          ipython, "parameters"
    Mistral   [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]        [TOOL_CALLS]

A view (reasoning, content, calls) is for clients. It never goes back to tokens: spaces and the order of keys
are lost, and encoding decoded text can give other tokens. Not supported: calls that are no JSON
(Qwen3-Coder's XML, Llama 4's Python), and Mistral's form without a list.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import TextStream, Tokenizer

THINK, END_THINK = "<think>", "</think>"
# The last tokens of a prompt, of which the text tells whether it opens the reasoning.
_LAST_TOKENS = 8


# Messages


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


@dataclasses.dataclass(frozen=True)
class AssistantMessage:
    """The view of an answer.

    Example: the tokens of `<think>\nA sum.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n
    </tool_call><|im_end|>` give reasoning "A sum.", no content, and one call.

    Attributes:
      content: text for the user.
      reasoning: text before the content.
      calls: the calls, in order.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def to_message(self) -> dict[str, Any]:
        """The message in OpenAI's form; without content it is null, as there."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


# Formats


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    Attributes:
      opening: text that begins the calls.
      split: text of an answer -> its content and its calls; ValueError if the calls are malformed.
      forced: beginning of an answer that must call a tool.
      forced_name: what follows it if the tool is named; "{}" is the name.
      closing: what follows the arguments of a call.
      bare: whether calls are also recognised by an answer that begins with "{".
      repeats: whether further calls follow, each in a line with an opening of its own.
    """

    opening: str
    split: Callable[[str], tuple[str, tuple[ToolCall, ...]]]
    forced: str
    forced_name: str
    closing: str
    bare: bool = False
    repeats: bool = False

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
        return _before(text, self.opening).rstrip()


def _before(text: str, mark: str) -> str:
    """What precedes `mark`, or precedes an end of `text` that may become it."""
    if (at := text.find(mark)) >= 0:
        return text[:at]
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    begun = next((length for length in lengths if text.endswith(mark[:length])), 0)
    return text[: len(text) - begun]


def _call(value: Any, arguments: str = "arguments") -> ToolCall:
    """A call from its JSON; ValueError if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    given = value.get(arguments, value.get("arguments", {}))
    if not isinstance(given, dict):
        raise ValueError("arguments are an object")
    text = json.dumps(given, ensure_ascii=False)
    text.encode()  # \ud800 in JSON is no text
    return ToolCall(value["name"], text)


def _hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    content, *rest = text.split("<tool_call>")
    # The last call may have been ended by the end of the answer instead of its closing tag.
    calls = tuple(_call(json.loads(part.split("</tool_call>")[0])) for part in rest)
    return content.rstrip() if calls else text, calls


def _llama(text: str) -> tuple[str, tuple[ToolCall, ...]]:
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


def _mistral(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return text, ()
    values = json.loads(rest)
    if not isinstance(values, list):
        raise ValueError("calls are a list")
    return content.rstrip(), tuple(map(_call, values))


_JSON = json.JSONDecoder()
_BETWEEN = re.compile(r"[\s;]*")

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


def call_format(template: str) -> CallFormat | None:
    """The format of calls that a chat template shows to its model; None if it is not known."""
    # Newer models of Mistral write [TOOL_CALLS]name[ARGS]{...}.
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    # Qwen3-Coder has the same tag around <function=name>, GLM around name and <arg_key>.
    if "<tool_call>" in template and not re.search("<function=|<arg_key>", template):
        return HERMES
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA
    return None


# Views


class AnswerParser:
    """Parses the answers of a model.

    Attributes:
      format: format of calls; None if the template has none that is known.
      opening_id: special token that begins calls, which the tokenizer's own `decode` leaves out; None if they
        begin with text.
    """

    def __init__(self, tokenizer: Tokenizer):
        template = tokenizer.chat_template
        plain = "" if template is None else template.source()
        with_tools = "" if template is None else template.source(tools=True)
        self._tokenizer = tokenizer
        self._reasons = END_THINK in plain + with_tools
        self.format = call_format(with_tools)
        self.opening_id: int | None = None
        if self.format is not None:
            ids = tokenizer.encode(self.format.opening)
            # A special token, which `decode` leaves out.
            if len(ids) == 1 and not tokenizer.decode(ids):
                self.opening_id = int(ids[0])

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, without special tokens except the one that begins calls."""
        if self.opening_id is None:
            return self._tokenizer.decode(tokens)
        assert self.format is not None
        parts = np.split(np.asarray(tokens), np.flatnonzero(np.equal(tokens, self.opening_id)))
        # Each later part begins with the token, which the tokenizer leaves out, so its text joins them.
        texts = [self._tokenizer.decode(part) for part in parts]
        return self.format.opening.join(texts)

    def pieces(self, tokens: np.ndarray) -> tuple[str, ...]:
        """The text of each token of a prompt, in which special tokens have their names."""
        add = TextStream(self._tokenizer.decode).add
        names = {i: name for name, i in self._tokenizer.special_ids.items()}
        return tuple(names.get(i) or add([i])[0][0] for i in tokens.tolist())

    def special_name(self, token: int) -> str:
        """The name of a special token; "" for others."""
        special = self._tokenizer.special_ids.items()
        return next((name for name, i in special if i == token), "")

    def token_bytes(self, token: int, text: str) -> bytes:
        """The bytes of a token, which has `text` in an answer; see `Tokenizer.token_bytes`."""
        own = self._tokenizer.token_bytes(token)
        try:
            spelled = own.decode()
        except UnicodeDecodeError:
            return own
        # The text may have a space that the token alone has not, or invalid bytes of tokens before.
        is_text = text.endswith(spelled) and "\N{REPLACEMENT CHARACTER}" not in text
        return text.encode() if is_text else own

    def opens_reasoning(self, prompt: np.ndarray) -> bool:
        """Whether a prompt ends with the beginning of reasoning, as the templates of some models do."""
        return self._reasons and self.decode(prompt[-_LAST_TOKENS:]).rstrip().endswith(THINK)

    def split_reasoning(self, text: str, *, opened: bool = False) -> tuple[str, str]:
        """Splits the text of an answer into reasoning and the rest.

        Args:
          text: the text, which may be cut.
          opened: whether the prompt has the opening tag.
        """
        begun = text.lstrip()
        if not self._reasons or not (opened or begun.startswith(THINK)):
            return "", text
        reasoning, _, rest = begun.removeprefix(THINK).partition(END_THINK)
        return reasoning.strip("\n"), rest.lstrip("\n")

    def visible(self, text: str, *, opened: bool, calls: bool) -> tuple[str, str]:
        """The parts of an unfinished answer's reasoning and content that its view will begin with.

        Args:
          text: the text so far.
          opened: whether the prompt has the opening tag of reasoning.
          calls: whether calls are parsed.
        """
        if self._reasons and not opened and THINK.startswith(text.lstrip()):
            return "", ""  # it may become the tag
        if END_THINK not in text:
            text = _before(text, END_THINK) if self._reasons else text
        reasoning, content = self.split_reasoning(text, opened=opened)
        if calls and self.format is not None:
            content = self.format.visible(content)
        return reasoning, content

    def view(
        self,
        prompt: np.ndarray,
        tokens: np.ndarray,
        *,
        start: str = "",
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AssistantMessage:
        """The view of an answer. Malformed calls, and those of functions that do not exist, are content.

        Args:
          prompt: int32 [T], all that precedes.
          tokens: int32 [R], the sampled tokens.
          start: end of the prompt that is the beginning of the answer.
          stop, stop_ids: texts and token ids that end the answer and are not shown.
          tools: tools that the model may call, as its template reads them.
        """
        ended = len(tokens) and int(tokens[-1]) in stop_ids
        text = self.decode(tokens[:-1] if ended else tokens)
        found = [at for at in map(text.find, stop) if at >= 0]
        text = start + text[: min(found, default=None)]
        # With `start` the prompt ends with a call, and not with the tag of reasoning.
        opened = not start and self.opens_reasoning(prompt)
        reasoning, content = self.split_reasoning(text, opened=opened)
        names = {tool["function"]["name"] for tool in tools}
        if not names or self.format is None:
            return AssistantMessage(content, reasoning)
        try:
            said, parsed = self.format.split(content)
        # A model may nest deeper than the parser can follow.
        except (ValueError, RecursionError):
            said, parsed = content, ()
        if {call.name for call in parsed} <= names:
            content = said
        else:
            parsed = ()
        # The same in every process, because some templates show them to the model.
        seed = hashlib.sha256(np.int32(prompt).tobytes() + b"|" + np.int32(tokens).tobytes())
        # Nine letters and digits: Mistral's templates refuse others.
        call_ids = (
            hashlib.sha256(seed.digest() + str(i).encode()).hexdigest()[:9]
            for i in range(len(parsed))
        )
        named = (dataclasses.replace(c, id=n) for c, n in zip(parsed, call_ids, strict=True))
        return AssistantMessage(content, reasoning, tuple(named))
