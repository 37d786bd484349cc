"""The views of answers: reasoning, content and tool calls, parsed from sampled tokens.

A view is for clients. It never goes back to tokens: spaces and the order of keys are lost, and encoding
decoded text can give other tokens. `call_formats` has the formats of calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import TextStream, Tokenizer
from jaxrl_serving.call_formats import ToolCall, before, call_format, channels_of, joined

THINK, END_THINK = "<think>", "</think>"
# The last tokens of a prompt, of which the text tells whether it opens the reasoning.
_LAST_TOKENS = 8


# Messages


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


# Views


class AnswerParser:
    """Parses the answers of a model.

    Attributes:
      format: format of calls; None if the template has none that is known.
      kept: special tokens of calls by their ids, which the tokenizer's own `decode` leaves out.
    """

    def __init__(self, tokenizer: Tokenizer):
        template = tokenizer.chat_template
        plain = "" if template is None else template.source()
        with_tools = "" if template is None else template.source(tools=True)
        self._tokenizer = tokenizer
        self._reasons = END_THINK in plain + with_tools
        self.format = call_format(with_tools)
        self.kept: dict[int, str] = {}
        if self.format is not None:
            encoded = {mark: tokenizer.encode(mark) for mark in self.format.marks}
            self.kept = {
                int(ids[0]): mark
                for mark, ids in encoded.items()
                if len(ids) == 1 and not tokenizer.decode(ids)
            }

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, without special tokens except those of calls."""
        if not self.kept:
            return self._tokenizer.decode(tokens)
        # Each later part begins with such a token, which the tokenizer leaves out.
        first, *others = np.split(
            np.asarray(tokens), np.flatnonzero(np.isin(tokens, list(self.kept)))
        )
        texts = (self.kept[int(part[0])] + self._tokenizer.decode(part) for part in others)
        return self._tokenizer.decode(first) + "".join(texts)

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
        if self.format is not None and self.format.channels:
            return joined(channels_of(text, ended=False), reasoning=True), text
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
            text = before(text, END_THINK) if self._reasons else text
        reasoning, content = self.split_reasoning(text, opened=opened)
        if self.format is not None and self.format.channels:
            content = joined(channels_of(text, ended=False), calls=not calls)
        elif calls and self.format is not None:
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
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        said, parsed = "", ()
        if schemas and self.format is not None:
            # A model may nest deeper than the parser can follow.
            with contextlib.suppress(ValueError, RecursionError):
                said, parsed = self.format.split(content, schemas)
        if parsed and {call.name for call in parsed} <= schemas.keys():
            content = said
        else:
            parsed = ()
            if self.format is not None and self.format.channels:
                content = joined(channels_of(content, ended=True))
        # The same in every process, because some templates show them to the model.
        seed = hashlib.sha256(np.int32(prompt).tobytes() + b"|" + np.int32(tokens).tobytes())
        # Nine letters and digits: Mistral's templates refuse others.
        call_ids = (
            hashlib.sha256(seed.digest() + str(i).encode()).hexdigest()[:9]
            for i in range(len(parsed))
        )
        named = (dataclasses.replace(c, id=n) for c, n in zip(parsed, call_ids, strict=True))
        return AssistantMessage(content, reasoning, tuple(named))
