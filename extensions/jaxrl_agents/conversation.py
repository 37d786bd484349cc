"""A conversation as a tree of exact tokens: what the model saw and sampled, whatever a client sends back.

    request 1   [user]                                  turn A: 20 tokens encoded     answer a: 5 sampled
    request 2   [user, a, tool, tool]                   turn B: 30 encoded, after a   answer b: 7 sampled
    request 3   [user, a, tool, user]                   turn C: 12 encoded, after a   answer c: 4 sampled

    branches    A a C c    mask 0..0 1..1 0..0 1..1     the one with the most turns comes first
                A a B b    mask 0..0 0..0 0..0 1..1     a is trained once

A turn is the block of all given messages between two answers. A request is compared with the tree message
by message. Only what follows its last known answer is rendered and encoded (`suffix`). Answers are recognised
by their views, however a client writes them. A message of the assistant that was not sampled here counts as
given.

    T tokens of a prompt or a branch   R tokens of an answer or a block
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from jaxrl.data.messages import read_message
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Branch, Stretch
from jaxrl_agents.suffix import ChatRenderer, Messages
from jaxrl_serving.tool_calls import AnswerParser, AssistantMessage

History: TypeAlias = Literal["kept", "as_template"]

SYSTEM_ROLES = ("system", "developer")


class ChatModel:
    """The chat format of a model: its tokenizer, with renderer and parser. Shared by all conversations."""

    def __init__(self, tokenizer: Tokenizer):
        """Raises UserError if the tokenizer's chat template cannot carry a conversation."""
        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer)
        self.parser = AnswerParser(tokenizer)


@dataclasses.dataclass(frozen=True, eq=False)
class Answer(Stretch):
    """What the model sampled for a turn, the terminator included if it was sampled.

    Attributes:
      finish: "stop" or "length".
      view: the message for the client.
    """

    finish: str
    view: AssistantMessage


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of tokens of a conversation.

    Attributes:
      encoded: tokens of given messages, separators and terminators included.
      sampled: tokens of answers.
      forked: those of `encoded` that begin another branch after a place that had one, because a history was
        edited or a conversation started again.
      rewritten: those of `sampled` that the chat template shows in another way in a later prompt. They stay
        in that prompt (history "kept", which counts them in `branches`) or are replaced there
        ("as_template").
    """

    encoded: int = 0
    sampled: int = 0
    forked: int = 0
    rewritten: int = 0


class _Message(NamedTuple):
    """A message as it is compared: without ids of calls, arguments with sorted keys."""

    role: str
    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    name: str


_NO_IDS = np.zeros(0, np.int32)
# Turns by their given messages and the beginning of their answer.
_Children: TypeAlias = "dict[tuple[tuple[_Message, ...], str], Turn]"


@dataclasses.dataclass(eq=False)
class Turn:
    """A request of a conversation. Only its `Conversation` changes it.

    Attributes:
      key: name of the turn; it follows from the texts and tokens before it alone.
      prompt_ids: int32 [T], all tokens that the model reads, read-only.
      start: beginning of the answer that was given to the model.
      answer: what was sampled; None before.
    """

    key: str
    prompt_ids: np.ndarray
    start: str
    answer: Answer | None = None
    # The turn whose answer comes before the messages, and the one whose tokens come before the tokens. They
    # differ where a template has rewritten the past: then the prompt continues no other.
    parent: Turn | None = None
    context: Turn | None = None
    # The given messages, as they are rendered.
    messages: tuple[dict[str, Any], ...] = ()
    # Of the template, with the tools.
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Text of the block, and the place of its first token in the prompt.
    text: str = ""
    first: int = 0
    children: _Children = dataclasses.field(default_factory=dict)
    rewritten: bool = False
    # The answer as it is compared.
    shown: _Message | None = None

    def path(self, by: Literal["parent", "context"]) -> list[Turn]:
        """The turns whose messages lead to this one, or whose tokens are in its prompt; itself last."""
        found, turn = [], self
        while turn is not None:
            found.append(turn)
            turn = turn.parent if by == "parent" else turn.context
        return found[::-1]


class Conversation:
    """All requests of one client and their answers, as a tree.

    One thread at a time may use a conversation: callers with several hold a lock around each call.

    Attributes:
      counts: numbers of tokens so far.
      weights: name of the frozen weights that answer; "" for the policy that learns.
    """

    def __init__(
        self, model: ChatModel, *, history: History = "kept", name: str = "", weights: str = ""
    ):
        """Starts an empty conversation.

        Args:
          model: the chat format.
          history: "kept" leaves sampled tokens in all later prompts. "as_template" starts a branch where the
            template shows earlier messages in another way, with the template's rendering.
          name: enters the keys of turns, so that conversations of one session have different ones.
          weights: see the class.
        """
        assert history in get_args(History), history
        self._name, self.weights = name, weights
        self._model = model
        self._history = history
        # By tools and variables of the template.
        self._roots: dict[str, _Children] = {}
        self._turns: list[Turn] = []
        self.counts = Counts()

    def extend(
        self,
        messages: Messages,
        tools: Sequence[Any] = (),
        *,
        start: str = "",
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Turn:
        """Finds or makes the turn of a request.

        Args:
          messages: all messages of the conversation in OpenAI's form, as a client sends them.
          tools: tools as the template reads them.
          start: beginning of the answer, given to the model; for example that of a call.
          variables: further variables of the template.

        Returns:
          The turn. It is the same one if a request is repeated; `Turn.answer` may be there then.

        Raises:
          UserError: the template refuses the messages.
        """
        given = [read_message(message) for message in messages]
        keys = [self._compared(message) for message in given]
        variables = {**variables, **({"tools": list(tools)} if tools else {})}
        root = self._name + json.dumps(variables, sort_keys=True)
        # Added only below, once the turn is made, so that a refused request leaves nothing.
        roots = self._roots.get(root, {})
        parent, known = self._last_known(roots, keys)
        siblings = parent.children if parent is not None else roots
        place = (tuple(keys[known:]), start)
        if place in siblings:
            return siblings[place]
        before = root if parent is None else f"{parent.key} {_digest(_answer_of(parent).tokens)}"
        # Of texts and tokens alone: after a restart an agent that says the same gets the same keys.
        key = _digest(json.dumps([before, *place]).encode())
        new = tuple(given[known:])
        turn = Turn(key, _NO_IDS, start, parent=parent, messages=new, variables=variables)
        self._encode(turn, given)
        siblings[place] = turn
        self._roots.setdefault(root, roots)
        again = len(siblings) > 1 or (turn.context is None and bool(self._turns))
        return self._added(turn, starts_branch=again)

    def extend_ids(self, prompt_ids: np.ndarray) -> Turn:
        """Finds or makes the turn of a prompt that a client has rendered itself, int32 [T].

        It continues the longest turn whose prompt and answer it begins with, and else is a branch.
        """
        before, length = None, 0
        for turn in self._turns:
            if np.array_equal(turn.prompt_ids, prompt_ids):
                return turn
            if turn.answer is not None:
                whole = np.concatenate([turn.prompt_ids, turn.answer.tokens])
                if len(whole) > length and np.array_equal(whole, prompt_ids[: len(whole)]):
                    before, length = turn, len(whole)
        again = any(turn.context is before for turn in self._turns)
        key = _digest(self._name.encode() + prompt_ids.tobytes())
        ids = _fixed(prompt_ids, np.int32)
        turn = Turn(key, ids, "", parent=before, context=before, first=length)
        return self._added(turn, starts_branch=again)

    def _added(self, turn: Turn, *, starts_branch: bool) -> Turn:
        num_new = len(turn.prompt_ids) - turn.first
        self._turns.append(turn)
        self._count(encoded=num_new, forked=num_new if starts_branch else 0)
        return turn

    def answer(
        self,
        turn: Turn,
        sampled: Stretch,
        finish: str = "stop",
        *,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        calls: bool = True,
    ) -> AssistantMessage:
        """Records what was sampled for a turn. A second answer is dropped in favour of the first.

        Args:
          turn: the turn.
          sampled: at least one token.
          finish: "stop" or "length".
          stop, stop_ids: texts and token ids that end the answer and are not in its view.
          calls: whether calls of tools are parsed, if the turn has tools.

        Returns:
          The view of the answer that is recorded.
        """
        if turn.answer is not None:
            return turn.answer.view
        assert len(sampled) and len({*map(len, sampled.arrays)}) == 1, "a value for each token"
        parser, tokens = self._model.parser, sampled.tokens
        tools = turn.variables.get("tools", ()) if calls else ()
        view = parser.view(
            turn.prompt_ids, tokens, start=turn.start, stop=stop, stop_ids=stop_ids, tools=tools
        )
        turn.answer = Answer(
            *(_fixed(x, x.dtype) for x in sampled.arrays), finish=finish, view=view
        )
        turn.shown = self._compared(read_message(view.to_message()))
        self._count(sampled=len(tokens))
        return view

    def branches(self) -> tuple[Branch, ...]:
        """All paths that end with an answer which no other answer continues.

        Those with more turns come first, of equally long ones that with the smaller key: the order in which
        requests arrive has no part in it. Every sampled token has mask 1 in the first branch that has it, and
        only there.
        """
        answered = [turn for turn in self._turns if turn.answer is not None]
        continued = {id(turn.context) for turn in answered}
        leaves = [turn for turn in answered if id(turn) not in continued]
        leaves.sort(key=lambda turn: (-len(turn.path("parent")), turn.key))
        if self._model.renderer.rewrites and self._history == "kept":
            # Only now: to render whole conversations takes too long for each request.
            for leaf in (leaf for leaf in leaves if leaf.messages):
                # The template may refuse as a whole what it has shown in parts.
                with contextlib.suppress(UserError):
                    self._count_rewritten(leaf)
        trained: set[int] = set()
        found = tuple(self._branch(leaf, trained) for leaf in leaves)
        assert sum(branch.mask.sum() for branch in found) == self.counts.sampled
        return found

    def unanswered(self) -> tuple[Branch, ...]:
        """The prompts of all turns of a conversation without answers, as branches without a sampled token."""
        found = []
        for turn in self._turns:
            nothing = np.zeros(len(turn.prompt_ids), np.float32)
            found.append(Branch(turn.prompt_ids, nothing, nothing, 0, nothing))
        return tuple(found)

    def _branch(self, leaf: Turn, trained: set[int]) -> Branch:
        """The branch that ends with the answer of `leaf`; adds the answers that it trains."""
        path = leaf.path("context")
        parts, masks = [], []
        for turn in path:
            answer, given = _answer_of(turn), turn.prompt_ids[turn.first :]
            zeros = np.zeros(len(given), np.float32)
            parts += [Stretch(given, zeros, zeros, 0), answer]
            masks += [zeros, np.full(len(answer), id(turn) not in trained, np.float32)]
            trained.add(id(turn))
        whole = Stretch.concatenate(parts)
        assert np.array_equal(whole.tokens[: len(leaf.prompt_ids)], leaf.prompt_ids), (
            "a branch must hold the tokens that the model has read"
        )
        truncated = _answer_of(leaf).finish == "length"
        return Branch(*whole.arrays, np.concatenate(masks), truncated)

    def _last_known(self, roots: _Children, keys: Sequence[_Message]) -> tuple[Turn | None, int]:
        """The last turn whose answer these messages contain, and the number of messages up to it."""
        # All paths are tried: a client may have sent one message in two branches.
        best: tuple[Turn | None, int] = None, 0
        left: list[tuple[Turn | None, _Children, int]] = [(None, roots, 0)]
        while left:
            turn, children, at = left.pop()
            if at > best[1]:
                best = turn, at
            for (block, _), child in children.items():
                end = at + len(block)
                if child.shown is None or end >= len(keys) or tuple(keys[at:end]) != block:
                    continue
                # Many clients leave out the reasoning of what they were given.
                reasoning = keys[end].reasoning or child.shown.reasoning
                if keys[end]._replace(reasoning=reasoning) == child.shown:
                    left.append((child, child.children, end + 1))
        return best

    def _encode(self, turn: Turn, given: Sequence[dict[str, Any]]) -> None:
        """Sets text and tokens of a new turn; `given` are all messages up to it."""
        renderer, parent = self._model.renderer, turn.parent
        if parent is None:
            turn.text = renderer.whole(given, turn.variables) + turn.start
        else:
            system = [message for message in given[:1] if message["role"] in SYSTEM_ROLES]
            # As the client shows the call, which may be another one than the policy's.
            *_, said = given[: len(given) - len(turn.messages)]
            calls = said.get("tool_calls") or [{"function": {"name": "f"}}]
            text = renderer.after(
                turn.messages,
                turn.variables,
                system=system,
                called=calls[0]["function"]["name"],
            )
            turn.text = text + turn.start
            shown = self._count_rewritten(turn) if self._history == "as_template" else ""
            # All tokens up to the answer of the parent, without a terminator at their end: the text of a
            # block begins with the terminator of the answer before it, sampled or not.
            decode = self._model.parser.decode
            parts = (x.text + decode(_answer_of(x).tokens) for x in parent.path("context"))
            if not shown or shown == "".join(parts) + turn.text:
                answer = _answer_of(parent)
                before = np.concatenate([parent.prompt_ids, answer.tokens])
                turn.context, turn.first = parent, len(before)
                # The stored ids, never encoded again: another encoding of the same text would train other
                # tokens.
                ids = np.concatenate([before, renderer.encode_after(turn.text, answer.tokens)])
                turn.prompt_ids = _fixed(ids, np.int32)
                return
            turn.text = shown
        turn.prompt_ids = _fixed(self._model.tokenizer.encode(turn.text), np.int32)

    def _count_rewritten(self, turn: Turn) -> str:
        """What the template shows up to `turn`; counts each answer that it shows in another way, once."""
        *before, _ = turn.path("parent")
        messages: list[Mapping[str, Any]] = []
        for each in before:
            messages += [*each.messages, read_message(_answer_of(each).view.to_message())]
        shown = self._model.renderer.whole([*messages, *turn.messages], turn.variables) + turn.start
        for each in before:
            answer = _answer_of(each)
            if not each.rewritten and self._model.parser.decode(answer.tokens) not in shown:
                each.rewritten = True
                self._count(rewritten=len(answer.tokens))
        return shown

    def _compared(self, message: Mapping[str, Any]) -> _Message:
        content, reasoning = message["content"], message.get("reasoning_content", "")
        if message["role"] == "assistant":
            # Some clients put it back in front of the content.
            if not reasoning:
                reasoning, content = self._model.parser.split_reasoning(content)
            # Many clients strip texts, and some add a newline.
            content = content.strip()
        calls = tuple(
            (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
            for call in message.get("tool_calls", ())
        )
        return _Message(message["role"], content, reasoning, calls, message.get("name", ""))

    def _count(self, **more: int) -> None:
        added = {name: getattr(self.counts, name) + count for name, count in more.items()}
        self.counts = dataclasses.replace(self.counts, **added)


def _answer_of(turn: Turn) -> Answer:
    assert turn.answer is not None, "only answered turns have others after them"
    return turn.answer


def _fixed(values: Any, dtype: Any) -> np.ndarray:
    """A read-only copy: the record must stay what the model has seen."""
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
