import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from chats import CHATML, LLAMA, MISTRAL, THINKING, assistant, chat_tokenizer, user
from extras import import_extra

from jaxrl.data import Record
from jaxrl.data.chat import ChatTemplate
from jaxrl.data.demonstrations import (
    Demonstration,
    DemonstrationStream,
    read_demonstrations,
    solutions_of,
)
from jaxrl.data.messages import PromptFormat
from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.errors import UserError

QWEN = pathlib.Path(__file__).parents[2] / "../shared/data/tokenizers/qwen2.5"
TOKENIZER = train_tokenizer(["1 + 1 = 2"], vocab_size=258)
SYSTEM = {"role": "system", "content": "Add."}


def with_chat(source):
    """The tokenizer, a character a token, with a chat template."""
    template = ChatTemplate(source, origin="this test", special_tokens={})
    return type(TOKENIZER)(**{**vars(TOKENIZER), "chat_template": template})


# Answers end with the end-of-sequence token, as in most published templates.
MARKED = with_chat(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def stream(demonstrations, tokenizer=TOKENIZER, **settings):
    defaults = {"examples_per_batch": len(demonstrations), "seed": 3, "max_tokens": 100}
    return DemonstrationStream(demonstrations, tokenizer, **{**defaults, **settings})


def encoded(context, response, tokenizer, **settings):
    """The one example of a demonstration."""
    demonstration = Demonstration(context, response, "s", all_turns=True)
    (example,) = next(stream([demonstration], tokenizer, **settings))
    assert (example.prompt.dtype, example.response.dtype) == (np.int32, np.int32)
    assert (example.mask.dtype, example.mask.shape) == (np.float32, example.response.shape)
    return example


def spelt(tokenizer, tokens) -> str:
    """The tokens as text, special ones included."""
    return tokenizer.backend.decode(list(tokens), skip_special_tokens=False)


def learnt(tokenizer, example) -> list[str]:
    """The runs of response tokens inside the mask, as text."""
    edges = np.flatnonzero(np.diff(example.mask, prepend=0, append=0)).reshape(-1, 2)
    return [spelt(tokenizer, example.response[start:end]) for start, end in edges]


# Files.


def test_rows_are_questions_with_answers_or_conversations(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "1+1=", "response": "2"},
        {"prompt": [SYSTEM, user("1+1=")], "response": "2"},
        {"prompt": 7, "messages": [user("1+1="), assistant("2")]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_demonstrations(path, source="s") == (
        Demonstration("1+1=", "2", "s"),
        Demonstration((SYSTEM, user("1+1=")), "2", "s"),
        Demonstration((user("1+1="),), "2", "s", all_turns=True),
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, "no field 'response'; the row has 'prompt'"),
        ({"response": "2"}, "no field 'prompt'"),
        ({"prompt": "?", "response": ""}, "field 'response' is \"\""),
        ({"messages": "?"}, "field 'messages' is \"?\"; it must be a list of messages"),
        ({"messages": [assistant("2"), user("?")]}, "the last message of field 'messages' is by"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "?", "response": "2"}) + "\n" + json.dumps(row))
    with pytest.raises(UserError, match=re.escape(f"{path}:2: ") + f".*{re.escape(message)}"):
        read_demonstrations(path, source="s")


# Tokens and masks.


def test_a_question_and_its_answer():
    example = encoded("1+1=", "2!", TOKENIZER, prompt_format=PromptFormat("<{prompt}>"))
    assert spelt(TOKENIZER, example.prompt) == "<1+1=>"
    assert learnt(TOKENIZER, example) == ["2!<eos>"]
    example = encoded("1+1=", "2!", MARKED, prompt_format=PromptFormat(chat=True))
    assert spelt(MARKED, example.prompt) == "u:1+1=<eos>a:"
    assert learnt(MARKED, example) == ["2!<eos>"]


def test_of_a_conversation_what_the_assistant_says_is_learnt():
    context = (SYSTEM, user("1+1="), assistant("2"), user("+1="), assistant("3"), user("+2="))
    example = encoded(context, "5", MARKED)
    assert spelt(MARKED, example.prompt) == "s:Add.<eos>u:1+1=<eos>a:"
    assert spelt(MARKED, example.response) == "2<eos>u:+1=<eos>a:3<eos>u:+2=<eos>a:5<eos>"
    assert learnt(MARKED, example) == ["2<eos>", "3<eos>", "5<eos>"]


def test_where_a_template_marks_no_end_only_the_last_answer_has_one():
    unmarked = with_chat(
        "{% for m in messages %}{{ '>' if m.role == 'assistant' }}{{ m.content }}|{% endfor %}"
        "{{ '>' if add_generation_prompt }}"
    )
    example = encoded((user("1"), assistant("2"), user("3")), "4", unmarked)
    assert learnt(unmarked, example) == ["2", "4<eos>"]
    bare = with_chat("{% for m in messages %}{{ m.content }}{% endfor %}")
    example = encoded((user("1"), assistant("2"), assistant("3")), "4", bare)
    assert learnt(bare, example) == ["234<eos>"]


def test_a_template_that_rewrites_earlier_answers_is_refused():
    trimming = with_chat("{% for m in messages %}{{ m.content | trim }}|{% endfor %}")
    turns = (user("1"), assistant("2 "), user("3"))
    with pytest.raises(UserError, match="row 1 of s cannot be trained on as one sequence"):
        stream(
            [Demonstration(turns[:1], "2 ", "s", True), Demonstration(turns, "4", "s", True)],
            trimming,
        )
    # The remedy: a row for each answer.
    examples = next(
        stream([Demonstration(turns[:1], "2 ", "s"), Demonstration(turns, "4", "s")], trimming)
    )
    words = {(spelt(trimming, e.prompt), *learnt(trimming, e)) for e in examples}
    assert words == {("1|", "2 <eos>"), ("1|2|3|", "4<eos>")}


@pytest.mark.skipif(not QWEN.is_dir(), reason="no Qwen tokenizer beside the repository")
def test_qwens_template():
    tokenizer = load_tokenizer(QWEN)
    context = (SYSTEM, user("1 + 1?"), assistant("It is 2."), user("And 3 more?"))
    example = encoded(context, "That makes 5.", tokenizer)
    messages = [*context, assistant("That makes 5.")]
    whole = tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=False))
    tokens = np.concatenate([example.prompt, example.response])
    # The template ends its last message with a line break, which no model writes after its end. The
    # directory's own end-of-sequence token is the one that ends a response.
    np.testing.assert_array_equal(tokens[:-1], whole[: len(tokens) - 1])
    assert tokens[-1] == tokenizer.eos_id
    said = learnt(tokenizer, example)
    assert [text.partition("<|")[0] for text in said] == ["It is 2.", "That makes 5."]


# Calls, reasoning and tools.

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "add", "content": "3"}
CALLED = [user("1+2?"), assistant("", tool_calls=[CALL]), RESULT, assistant("It is 3.")]
TWO_CALLS = assistant("I add.", tool_calls=[CALL, CALL])
CONVERSATIONS = {
    "a call": CALLED,
    "a call at the end": CALLED[:2],
    "a call with reasoning": [
        CALLED[0],
        assistant("", tool_calls=[CALL], reasoning="Hm."),
        *CALLED[2:],
    ],
    "reasoning": [CALLED[0], assistant("3", reasoning="1 and 2.")],
    "two calls beside a text": [CALLED[0], TWO_CALLS, RESULT, RESULT, *CALLED[3:]],
    "another question": [*CALLED, user("And 3?"), assistant("6")],
}


def theirs_of(tokenizer, messages, **options):
    """What Transformers makes of a conversation."""
    transformers = import_extra("parity", "transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, **tokenizer.special_tokens
    )
    source = tokenizer.chat_template.source(tools=True)
    # Some templates read reasoning by this name alone.
    named = [
        {"reasoning_content" if k == "reasoning" else k: x for k, x in m.items()} for m in messages
    ]
    return theirs.apply_chat_template(named, tools=TOOLS, chat_template=source, **options)


def example_of(messages, tokenizer, tmp_path, **row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": TOOLS, **row}))
    (example,) = next(stream(read_demonstrations(path, source="s"), tokenizer, max_tokens=2000))
    return example


TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "llama": LLAMA, "mistral": MISTRAL}
# What a template leaves out, or writes otherwise when more is said: the tools stand at the last question.
REFUSED = {
    *(
        (name, x)
        for name in ("chatml", "llama", "mistral", "qwen2.5")
        for x in CONVERSATIONS
        if "rea" in x
    ),
    *((name, "two calls beside a text") for name in ("llama", "mistral")),
    ("mistral", "another question"),
}


def tokenizer_of(name):
    if name in TEMPLATES:
        return chat_tokenizer(TEMPLATES[name])
    if not QWEN.is_dir():
        pytest.skip("no Qwen template beside the repository")
    template = load_tokenizer(QWEN).chat_template
    if name == "qwen3":
        config = json.loads((QWEN.with_name(name) / "tokenizer_config.json").read_text())
        template = ChatTemplate(config["chat_template"], origin=name, special_tokens={})
    return dataclasses.replace(chat_tokenizer(CHATML), chat_template=template)


@pytest.mark.parametrize("what", CONVERSATIONS)
@pytest.mark.parametrize("name", [*TEMPLATES, "qwen2.5", "qwen3"])
def test_what_is_said_beside_a_text_is_learnt_as_the_template_writes_it(name, what, tmp_path):
    tokenizer, messages = tokenizer_of(name), CONVERSATIONS[what]
    if (name, what) in REFUSED:
        with pytest.raises(UserError, match="row 0 of s cannot be trained on as one sequence"):
            example_of(messages, tokenizer, tmp_path)
        return
    example = example_of(messages, tokenizer, tmp_path)
    tokens = [*example.prompt, *example.response]
    whole = theirs_of(tokenizer, messages, tokenize=False)
    assert spelt(tokenizer, tokens) == whole.rstrip("\n") and tokens[-1] in tokenizer.stop_ids
    said = [message for message in messages if message["role"] == "assistant"]
    for text, message in zip(learnt(tokenizer, example), said, strict=True):
        assert message["content"] in text and message.get("reasoning", "") in text
        assert text.count('"add"') == len(message.get("tool_calls", ()))
        assert tokenizer.encode(text)[-1] in tokenizer.stop_ids


def test_of_a_call_the_whole_turn_is_learnt(tmp_path):
    tokenizer = chat_tokenizer(CHATML)
    example = example_of(CALLED, tokenizer, tmp_path, tools=json.dumps(TOOLS))
    assert learnt(tokenizer, example) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 3.<|im_end|>",
    ]
    assert '"description": "Adds."' in spelt(tokenizer, example.prompt)
    assert "<tool_response>\n3\n</tool_response>" in spelt(tokenizer, example.response)


def test_the_mask_is_that_of_transformers(tmp_path):
    """Which has it only of templates that mark what the assistant says."""
    marked = CHATML.replace("m.role + '\\n' + m.content }}", "m.role + '\\n' }}{{- m.content }}")
    begin = (
        "{%- if m.role == 'assistant' %}{%- generation %}"
        + marked[marked.index("{{- m.content }}") :]
    )
    turn, rest = begin.split("{{- '<|im_end|>\\n' }}", 1)
    marked = (
        marked[: marked.index("{{- m.content }}")]
        + turn
        + "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}{%- else %}"
        + "{{- m.content + '<|im_end|>\\n' }}{%- endif %}"
        + rest
    )
    tokenizer = dataclasses.replace(
        chat_tokenizer(CHATML),
        chat_template=ChatTemplate(marked, origin="this test", special_tokens={}),
    )
    for messages in (CONVERSATIONS["two calls beside a text"], CONVERSATIONS["another question"]):
        theirs = theirs_of(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
        example = example_of(messages, tokenizer, tmp_path)
        tokens = [*example.prompt, *example.response]
        assert tokens == theirs["input_ids"][: len(tokens)]
        mask = [0] * len(example.prompt) + example.mask.astype(int).tolist()
        assert mask == theirs["assistant_masks"][: len(tokens)] and sum(mask) > 20


def test_tools_are_a_list(tmp_path):
    for tools in ("[1]", [1], 5, True, "no JSON"):
        with pytest.raises(
            UserError, match=r"rows.jsonl:1: field .tools. is .*; it must be a list of tools"
        ):
            example_of(CALLED, MARKED, tmp_path, tools=tools)


# The stream.


def test_solutions_of_problems_are_demonstrations():
    records = [Record(f"{a}+{a}=", f"{2 * a}", "sums", f"so {2 * a}") for a in range(5)]
    settings = {"examples_per_batch": 3, "seed": 3, "max_tokens": 100}
    examples = DemonstrationStream(solutions_of(records), TOKENIZER, **settings)
    pairs = {(r.prompt, r.solution) for r in records}
    for example in (e for _ in range(4) for e in next(examples)):
        texts = TOKENIZER.decode(example.prompt), TOKENIZER.decode(example.response)
        assert texts in pairs and example.response[-1] == TOKENIZER.eos_id
        assert np.all(example.mask == 1)


def test_a_restored_stream_goes_on_and_the_mask_belongs_to_its_identity():
    rows = [
        Demonstration((user(str(a)), assistant("b"), user("c")), "d", "s", all_turns=True)
        for a in range(5)
    ]
    examples = stream(rows, MARKED, examples_per_batch=2)
    next(examples)
    state = json.loads(json.dumps(examples.state()))
    expected = [e.response.tolist() for _ in range(3) for e in next(examples)]
    restored = stream(rows, MARKED, examples_per_batch=2)
    restored.restore(state)
    assert [e.response.tolist() for _ in range(3) for e in next(restored)] == expected
    # The same text said by another: the tokens are alike, and what is learnt is not.
    quoted = [Demonstration(f"u:{a}<eos>a:", "b<eos>u:c<eos>a:d", "s") for a in range(5)]
    with pytest.raises(UserError, match="in other data"):
        stream(quoted, MARKED).restore(state)


def test_long_examples_are_dropped_and_counted(caplog):
    rows = [Demonstration("1+1=", "2" * n, "s") for n in (1, 2, 3)]
    assert stream(rows, max_tokens=7).state()["num_rows"] == 2
    assert "1 of 3 examples dropped: longer than max_tokens 7" in caplog.text
