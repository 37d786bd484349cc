"""Conversations: any client, any order of requests; the tokens are those that the model saw and sampled."""

import functools
import json
import pathlib

import numpy as np
import pytest
from chats import CHATML, CODER, HARMONY, LLAMA, MISTRAL, THINKING, assistant, chat_tokenizer, user
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.types import Stretch
from jaxrl_agents.conversation import ChatModel, Conversation, Counts

QWEN = pathlib.Path(__file__).parents[3] / "../shared/data/tokenizers/qwen2.5"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@functools.cache
def model_of(template: str) -> ChatModel:
    if template == "qwen":
        if not QWEN.is_dir():
            pytest.skip("no tokenizer beside the repository")
        return ChatModel(load_tokenizer(QWEN))
    return ChatModel(chat_tokenizer(template))


def tool(content, call_id="abcdefghi"):
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def encode(text, template=CHATML):
    return model_of(template).tokenizer.encode(text)


def say(conversation, turn, text, template=CHATML, version=0, **options):
    """Answers a turn with the tokens of a text; the log-probability of a token is its number."""
    tokens = encode(text, template)
    logprob = np.arange(len(tokens), dtype=np.float32)
    return conversation.answer(turn, Stretch(tokens, logprob, logprob / 2, version), **options)


# By hand


def test_only_the_new_messages_are_encoded():
    conversation = Conversation(model_of(CHATML))
    first = conversation.extend([user("2 + 2?")])
    assert first.answer is None and first.prompt_ids.dtype == np.int32
    beginning = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert np.array_equal(first.prompt_ids, encode(beginning))
    view = say(conversation, first, "4<|im_end|>", version=3)
    assert (view.content, view.calls) == ("4", ())
    second = conversation.extend([user("2 + 2?"), assistant("4"), user("Why?")])
    # The separator is ours, the terminator was sampled.
    suffix = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    expected = np.concatenate([first.prompt_ids, encode("4<|im_end|>"), encode(suffix)])
    assert np.array_equal(second.prompt_ids, expected)
    say(conversation, second, "So", version=4, finish="length")
    (branch,) = conversation.branches()
    one, two, three, four = map(len, map(encode, (beginning, "4<|im_end|>", suffix, "So")))
    assert branch.mask.tolist() == [0] * one + [1] * two + [0] * three + [1] * four
    assert branch.version.tolist() == [0] * one + [3] * two + [0] * three + [4] * four
    assert branch.logprob[one:].tolist() == [0, 1] + [0] * three + [0, 1]
    assert branch.entropy[one:].tolist() == [0, 0.5] + [0] * three + [0, 0.5]
    assert branch.truncated
    assert conversation.counts == Counts(one + three, two + four)
    # A turn that was cut lacks the terminator, which is ours then.
    history = [user("2 + 2?"), assistant("4"), user("Why?"), assistant("So"), user("?")]
    third = conversation.extend(history)
    added = third.prompt_ids[len(branch.tokens) :]
    expected = "<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    assert np.array_equal(added, encode(expected))


def test_two_tool_messages_are_rendered_together():
    conversation = Conversation(model_of(CHATML))
    first = conversation.extend([user("x")], TOOLS)
    view = say(conversation, first, '<tool_call>{"arguments":{"b":1,"a":2},"name":"add"}<|im_end|>')
    (call,) = view.to_message()["tool_calls"]
    # As clients send it back: another order, ids of theirs.
    call = {**call, "id": "another", "function": {"name": "add", "arguments": '{"a": 2, "b": 1}'}}
    history = [user("x"), assistant(None, tool_calls=[call], refusal=None), tool("3"), tool("4")]
    second = conversation.extend(history, TOOLS)
    added = second.prompt_ids[len(first.prompt_ids) + len(first.answer.tokens) :]
    results = "\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    expected = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    assert np.array_equal(added, encode(expected))


def test_calls_and_results_of_gpt_oss():
    conversation = Conversation(model_of(HARMONY))
    first = conversation.extend([user("x")], TOOLS)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = thought + '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'
    view = say(conversation, first, said, HARMONY)
    assert (view.reasoning, view.content, len(view.calls)) == ("Hm.", "", 1)
    history = [user("x"), view.to_message(), tool("3", view.calls[0].id)]
    second = conversation.extend(history, TOOLS)
    # What was sampled stays, the thought too, and only the result is encoded.
    result = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|>"
    expected = [
        first.prompt_ids,
        encode(said, HARMONY),
        encode(result + "<|start|>assistant", HARMONY),
    ]
    assert np.array_equal(second.prompt_ids, np.concatenate(expected))
    view = say(conversation, second, "<|channel|>final<|message|>4<|return|>", HARMONY)
    assert (view.content, view.calls) == ("4", ())


def test_without_tools_calls_are_content():
    conversation = Conversation(model_of(CHATML))
    call = '<tool_call>{"name": "add"}</tool_call>'
    assert say(conversation, conversation.extend([user("x")]), call).content == call
    turn = conversation.extend([user("x")], TOOLS)
    assert say(conversation, turn, call, calls=False).content == call


def test_a_demonstration_is_given_and_an_edit_is_a_branch():
    conversation = Conversation(model_of(CHATML))
    shown = [user("1 + 1?"), assistant("2"), user("2 + 2?")]
    first = conversation.extend(shown)
    say(conversation, first, "4<|im_end|>")
    second = conversation.extend([*shown, assistant("4"), user("Why?")])
    say(conversation, second, "Because<|im_end|>")
    # The last question is edited, then the first answer.
    third = conversation.extend([*shown, assistant("4"), user("How?")])
    say(conversation, third, "So<|im_end|>")
    fourth = conversation.extend([*shown, assistant("5"), user("Why?")])
    assert fourth.parent is None
    whole = model_of(CHATML).renderer.whole([*shown, assistant("5"), user("Why?")])
    assert np.array_equal(fourth.prompt_ids, encode(whole))
    main, other = conversation.branches()  # the fourth has no answer
    # Both have two turns, so that with the smaller key comes first.
    pair = sorted((second, third), key=lambda turn: turn.key)
    for branch, turn in zip((main, other), pair, strict=True):
        whole = np.concatenate([turn.prompt_ids, turn.answer.tokens])
        assert np.array_equal(branch.tokens, whole)
    # The first answer is trained once, and is the end of both prompts.
    start, num = len(first.prompt_ids), len(encode("4<|im_end|>"))
    assert main.mask[start:][:num].all() and not other.mask[start:][:num].any()
    assert main.mask.sum() + other.mask.sum() == conversation.counts.sampled
    new = len(third.prompt_ids) - len(second.parent.prompt_ids) - num
    assert conversation.counts.forked == new + len(fourth.prompt_ids)


def test_a_repeated_request_gets_the_same_answer():
    conversation, again = Conversation(model_of(CHATML)), Conversation(model_of(CHATML))
    turn = conversation.extend([user("x")], TOOLS)
    assert conversation.extend([user("x")], TOOLS) is turn
    assert again.extend([user("x")], TOOLS).key == turn.key
    view = say(conversation, turn, "one<|im_end|>")
    assert conversation.extend([user("x")], TOOLS).answer.view is view
    # Whoever answers twice keeps the first.
    assert say(conversation, turn, "two<|im_end|>") is view
    assert conversation.counts.sampled == len(encode("one<|im_end|>"))
    others = [conversation.extend([user("x")]), conversation.extend([user("x")], TOOLS, start="<")]
    assert len({turn.key, *(other.key for other in others)}) == 3


def test_variables_of_the_template_may_have_any_name():
    conversation = Conversation(model_of(CHATML))
    names = {"start": 1, "system": 2, "variables": 3, "mark": 4, "text": 5}
    turn = conversation.extend([user("x")], variables=names)
    say(conversation, turn, "4<|im_end|>")
    later = conversation.extend([user("x"), assistant("4"), user("y")], variables=names)
    assert later.parent is turn
    # Another way to show the conversation is another conversation.
    assert conversation.extend([user("x"), assistant("4"), user("y")]).parent is None


def test_the_beginning_of_a_call_can_be_given():
    conversation = Conversation(model_of(CHATML))
    start = '<tool_call>\n{"name": "'
    turn = conversation.extend([user("x")], TOOLS, start=start)
    assert np.array_equal(turn.prompt_ids[-len(encode(start)) :], encode(start))
    view = say(conversation, turn, 'add", "arguments": {}}\n</tool_call><|im_end|>')
    assert view.calls[0].name == "add"
    later = conversation.extend([user("x"), view.to_message(), tool("1")], TOOLS)
    assert later.parent is turn


@pytest.mark.parametrize("said", ["  4\n", "4"])
def test_clients_that_strip_texts_or_leave_reasoning_out_are_recognised(said):
    conversation = Conversation(model_of(THINKING))
    turn = conversation.extend([user("x")])
    view = say(conversation, turn, f"<think>\nR\n</think>\n\n{said}<|im_end|>", THINKING)
    assert view.reasoning == "R"
    for message in (
        view.to_message(),
        assistant("4"),
        assistant("4", reasoning_content="R"),
        assistant("<think>R</think>\n4"),
    ):
        assert conversation.extend([user("x"), message, user("y")]).parent is turn
    for message in (assistant("5"), assistant("4", reasoning_content="S")):
        assert conversation.extend([user("x"), message, user("y")]).parent is None


def test_reasoning_that_the_template_drops_is_kept_or_starts_a_branch():
    said = "<think>\nR\n</think>\n\n4<|im_end|>"
    history = [user("x"), assistant("4", reasoning_content="R"), user("y")]
    kept, forked = (Conversation(model_of(THINKING), history=h) for h in ("kept", "as_template"))
    for conversation in (kept, forked):
        say(conversation, conversation.extend(history[:1]), said, THINKING)
        turn = conversation.extend(history)
        say(conversation, turn, "5<|im_end|>", THINKING)
        conversation.branches()
        assert conversation.counts.rewritten == len(encode(said, THINKING))
        later = conversation.extend([*history, assistant("5"), tool("z")])
        # Nothing more is rewritten, so the second turn is continued.
        assert later.context is turn
        say(conversation, later, "6<|im_end|>", THINKING)
        conversation.branches()
        assert conversation.counts.rewritten == len(encode(said, THINKING))
    (branch,) = kept.branches()
    assert branch.mask.sum() == kept.counts.sampled
    assert kept.counts.forked == 0
    main, first = forked.branches()
    whole = forked._model.renderer.whole(history)
    start = len(encode(whole, THINKING))
    assert np.array_equal(main.tokens[:start], encode(whole, THINKING))
    assert "R" not in whole and first.mask.sum() == len(encode(said, THINKING))
    assert forked.counts.forked == start


def test_the_order_of_branches_does_not_depend_on_that_of_the_answers():
    asked = [[user("x")], [user("y")], [user("x"), assistant("4"), user("one")]]
    asked.append([*asked[2][:2], user("two")])
    found = []
    for order in ((0, 1, 2, 3), (1, 0, 3, 2), (0, 3, 2, 1)):
        conversation = Conversation(model_of(CHATML))
        for i in order:
            say(conversation, conversation.extend(asked[i]), "4<|im_end|>")
        found.append([(b.tokens.tolist(), b.mask.tolist()) for b in conversation.branches()])
    assert found[0] == found[1] == found[2] and len(found[0]) == 3
    # The deepest first, and the other question last.
    y = encode("<|im_start|>user\ny").tolist()
    assert found[0][2][0][: len(y)] == y


# In any order


class Client:
    """A client that mangles what it is sent, beside a list of what the model saw and sampled.

    Attributes:
      history: its messages.
      seen: prompt and sampled tokens of each of its answers, in order of the messages.
      exact: whether every text so far comes back as the same tokens.
    """

    def __init__(self, draw, template, conversation):
        self.draw, self.template, self.conversation = draw, template, conversation
        self.model = model_of(template)
        self.history, self.seen, self.exact = [], [], not self.model.renderer.rewrites
        self.encoded = 0
        self.points = []

    def new_messages(self):
        words = st.text("ab 1\n", max_size=4)
        messages = []
        # Mistral's template refuses results without calls.
        answered = self.history and (self.template != MISTRAL or "tool_calls" in self.history[-1])
        if answered and self.draw(st.booleans()):
            messages += [tool(self.draw(words)) for _ in range(self.draw(st.integers(1, 3)))]
        for _ in range(self.draw(st.integers(0 if messages else 1, 2))):
            if self.draw(st.booleans()):
                messages += [user("q"), assistant("shown" + self.draw(words))]
            messages.append(user(self.draw(words)))
        return messages

    def sample(self):
        """Tokens, and whether encoding their text gives them back."""
        tokenizer = self.model.tokenizer
        end = [self.draw(st.sampled_from([tokenizer.stop_ids[0], tokenizer.stop_ids[-1]]))]
        kind = self.draw(st.sampled_from(["ids", "text", "cut", "call", "reasoning"]))
        if kind == "ids":
            ids = st.integers(0, tokenizer.vocab_size - 1)
            return self.draw(st.lists(ids, max_size=8)) + end, False
        text = {
            "call": '{"name": "add", "arguments": {"b": 1,"a":[true]}}',
            "reasoning": "<think>\nR\n</think>\n\nyes",
        }.get(kind, "some text")
        if kind == "call":
            opening = {"qwen": "<tool_call>", CHATML: "<tool_call>", MISTRAL: "[TOOL_CALLS]["}
            text = opening.get(self.template, "") + text + ("]" if self.template == MISTRAL else "")
            if self.template == CODER:
                value = "<parameter=b>\n1\n</parameter>"
                text = f"<tool_call>\n<function=add>\n{value}\n</function>\n</tool_call>"
        ids = tokenizer.encode(text).tolist()
        if kind == "cut":
            return ids, True
        exact = kind == "text" and end[0] == tokenizer.stop_ids[0]
        return ids + end, exact

    def mangled(self, message):
        """A message as another program writes it."""
        message = json.loads(json.dumps(message))
        if message["role"] == "assistant":
            if self.draw(st.booleans()):
                message.pop("reasoning_content", None)
            for call in message.get("tool_calls", []):
                arguments = json.loads(call["function"]["arguments"])
                in_order = dict(sorted(arguments.items()))
                call["function"]["arguments"] = json.dumps(in_order, indent=1)
        elif self.draw(st.booleans()):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message

    def edit(self):
        """Goes back to an earlier answer, and leaves another first message if there is none."""
        back = self.draw(st.integers(0, len(self.points)))
        self.points = self.points[:back]
        self.seen = self.seen[:back]
        self.history = self.history[: self.points[-1][0]] if back else []
        self.exact = self.points[-1][1] if back else not self.model.renderer.rewrites

    def take_turn(self, tag):
        new = self.new_messages()
        # Texts of their own, so that no branch repeats another by chance.
        new.append(user(f"turn {tag}"))
        self.history += new
        request = [self.mangled(message) for message in self.history]
        turn = self.conversation.extend(request, TOOLS)
        assert turn.answer is None
        before = np.concatenate([*self.seen[-1]]) if self.seen else np.zeros(0, np.int32)
        assert np.array_equal(turn.prompt_ids[: len(before)], before)
        self.encoded += len(turn.prompt_ids) - len(before)
        if self.exact:
            whole = self.model.renderer.whole(self.history, {"tools": TOOLS})
            assert np.array_equal(turn.prompt_ids, self.model.tokenizer.encode(whole))
        tokens, exact = self.sample()
        tokens = np.array(tokens, np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        view = self.conversation.answer(turn, Stretch(tokens, zeros, zeros, 0))
        self.seen.append((turn.prompt_ids, tokens))
        self.history.append(view.to_message())
        self.exact &= exact
        self.points.append((len(self.history), self.exact))
        if self.draw(st.booleans()):
            again = self.conversation.extend([self.mangled(m) for m in self.history[:-1]], TOOLS)
            assert again is turn and again.answer.view is view
        return len(tokens)


def play(data, template, *, turns):
    conversations = [Conversation(model_of(template)) for _ in range(2)]
    clients = [Client(data.draw, template, conversation) for conversation in conversations]
    sampled, leaves = [0, 0], [[], []]
    for tag in range(turns):
        which = data.draw(st.integers(0, 1))
        client = clients[which]
        if client.seen and data.draw(st.integers(0, 3)) == 0:
            leaves[which].append(np.concatenate(client.seen[-1]))
            client.edit()
        sampled[which] += client.take_turn(tag)
    for client, total, earlier in zip(clients, sampled, leaves, strict=True):
        conversation = client.conversation
        if not client.seen:
            assert conversation.branches() == ()
            continue
        branches = conversation.branches()
        found = {branch.tokens.tobytes() for branch in branches}
        assert np.concatenate(client.seen[-1]).tobytes() in found
        # A client that went back and went on has left its earlier end as a branch.
        ends = {ids.tobytes() for ids in earlier}
        grown = {ids for ids in ends if any(whole.startswith(ids) for whole in found)}
        assert ends == grown
        assert sum(branch.mask.sum() for branch in branches) == total
        assert conversation.counts.sampled == total
        assert conversation.counts.encoded == client.encoded


@pytest.mark.parametrize(
    "template", [CHATML, CODER, MISTRAL, LLAMA], ids=["chatml", "coder", "mistral", "llama"]
)
@given(data=st.data())
def test_ids_are_what_the_model_saw(template, data):
    play(data, template, turns=10)


@settings(max_examples=10)
@given(data=st.data())
def test_also_with_qwens_tokenizer(data):
    play(data, "qwen", turns=10)


@given(data=st.data())
def test_as_template_every_prompt_is_the_templates_and_every_token_is_trained_once(data):
    model, words = model_of(THINKING), st.text("ab 1\n", max_size=4)
    conversation = Conversation(model, history="as_template")
    history, seen = [], {}
    for i in range(6):
        for _ in range(data.draw(st.integers(1, 2))):
            text = data.draw(words)
            history.append(user(text) if not i or data.draw(st.booleans()) else tool(text))
        turn = conversation.extend(history)
        shown = model.tokenizer.backend.decode(turn.prompt_ids.tolist(), skip_special_tokens=False)
        assert shown == model.renderer.whole(history)
        said = data.draw(st.sampled_from(["<think>\nR\n</think>\n\n", "<think>R</think>", ""]))
        said += "said" + data.draw(words) + data.draw(st.sampled_from(["<|im_end|>", ""]))
        view = say(conversation, turn, said, THINKING)
        history.append(view.to_message())
        seen[turn.prompt_ids.tobytes() + turn.answer.tokens.tobytes()] = len(turn.answer.tokens)
    branches = conversation.branches()
    assert {branch.tokens.tobytes() for branch in branches} <= seen.keys()
    assert sum(branch.mask.sum() for branch in branches) == sum(seen.values())
    assert branches[0].tokens.tobytes() == list(seen)[-1]
    assert conversation.counts.sampled == sum(seen.values())
