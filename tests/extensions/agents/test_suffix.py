"""What is rendered after a sampled turn, for templates after those of published models and for theirs."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from chats import CHATML, CODER, GLM, HARMONY, LLAMA, MISTRAL, THINKING, chat_tokenizer

from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.errors import UserError
from jaxrl_agents.suffix import ChatRenderer

TOKENIZERS = pathlib.Path(__file__).parents[3] / "../shared/data/tokenizers"
RESULT = {"role": "tool", "content": "1", "tool_call_id": "abcdefghi"}
QUESTION = {"role": "user", "content": "x"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


OF_QWEN = (
    "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n1\n"
    "</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.mark.parametrize(
    ("template", "terminator", "rewrites", "of_results", "of_a_question"),
    [
        (CHATML, "<|im_end|>", (), *OF_QWEN),
        (CODER, "<|im_end|>", (), *OF_QWEN),
        (THINKING, "<|im_end|>", ("drops earlier reasoning",), *OF_QWEN),
        (
            LLAMA,
            "<|eot|>",
            ("changes the spaces of earlier answers",),
            2 * "<|head|>ipython<|/head|>\n\n1<|eot|>" + "<|head|>assistant<|/head|>\n\n",
            "<|head|>user<|/head|>\n\nx<|eot|><|head|>assistant<|/head|>\n\n",
        ),
        (
            MISTRAL,
            "</s>",
            ("changes the spaces of earlier answers", "moves the tools"),
            2 * '[TOOL_RESULTS] {"content": "1", "call_id": "abcdefghi"}[/TOOL_RESULTS]',
            f"[AVAILABLE_TOOLS] {json.dumps(TOOLS)}[/AVAILABLE_TOOLS][INST] x[/INST]",
        ),
    ],
    ids=["chatml", "coder", "thinking", "llama", "mistral"],
)
def test_suffixes_by_hand(template, terminator, rewrites, of_results, of_a_question):
    tokenizer = chat_tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    assert ([*renderer.terminators.values()], renderer.rewrites) == ([terminator], rewrites)
    assert all(change in renderer.note for change in rewrites)
    assert bool(renderer.note) == bool(rewrites) and "\n" not in renderer.note
    ended, cut = (tokenizer.encode(text) for text in (f"4{terminator}", "4"))
    for messages, text in (([RESULT, RESULT], of_results), ([QUESTION], of_a_question)):
        after = renderer.after(messages, {"tools": TOOLS})
        assert after == terminator + text
        assert np.array_equal(renderer.encode_after(after, cut), tokenizer.encode(after))
        assert np.array_equal(renderer.encode_after(after, ended), tokenizer.encode(text))
    # Another token that ends answers is not the one of the template.
    other = np.array([tokenizer.stop_ids[1]], np.int32)
    assert np.array_equal(renderer.encode_after(after, other), tokenizer.encode(after))


def test_the_model_may_speak_again_and_texts_may_hold_any_mark():
    renderer = ChatRenderer(chat_tokenizer(CHATML))
    assert renderer.after([]) == "<|im_end|>\n<|im_start|>assistant\n"
    hostile = {"role": "user", "content": "turn0mark turn1mark"}
    assert "turn0mark turn1mark<|im_end|>" in renderer.after([hostile], system=[hostile])


def test_templates_without_special_tokens():
    plain = train_tokenizer(["a"], vocab_size=258)

    def renderer(source):
        template = ChatTemplate(source, origin="this test", special_tokens=plain.special_tokens)
        return ChatRenderer(dataclasses.replace(plain, chat_template=template))

    found = renderer(PLAIN_TEMPLATE)
    assert ([*found.terminators.values()], found.rewrites) == (["<eos>"], ())
    assert found.after([QUESTION]) == "<eos>\nuser: x\nassistant: "
    endless = renderer(PLAIN_TEMPLATE.replace("{{ eos_token }}", ""))
    # The end of an answer is sampled but never rendered, and stays.
    assert endless.terminators == {} and endless.after([QUESTION]) == "\nuser: x\nassistant: "
    ids = endless.encode_after("\nuser: x", np.array([plain.eos_id]))
    assert np.array_equal(ids, plain.encode("\nuser: x"))
    assert "changes earlier messages" in renderer(PLAIN_TEMPLATE.upper().lower() + "{{ 1 }}").note
    with pytest.raises(UserError, match="does not show what the assistant said"):
        renderer("{{ messages[-1].content }}")
    with pytest.raises(UserError, match="no chat template, and agents speak in messages"):
        ChatRenderer(plain)


@pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="no data beside the repository")
def test_published_templates_of_qwen():
    tokenizer = load_tokenizer(TOKENIZERS / "qwen2.5")
    renderer = ChatRenderer(tokenizer)
    assert ([*renderer.terminators.values()], renderer.note) == (["<|im_end|>"], "")
    results = "\n<tool_response>\n1\n</tool_response>" * 2
    assert renderer.after([RESULT, RESULT], {"tools": TOOLS}) == (
        f"<|im_end|>\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    )
    config = json.loads((TOKENIZERS / "qwen3/tokenizer_config.json").read_text())
    template = ChatTemplate(
        config["chat_template"], origin="Qwen3", special_tokens=tokenizer.special_tokens
    )
    renderer = ChatRenderer(dataclasses.replace(tokenizer, chat_template=template))
    assert renderer.rewrites == ("drops earlier reasoning",)
    assert renderer.after([QUESTION], {"enable_thinking": False}).endswith(
        "<think>\n\n</think>\n\n"
    )


def test_calls_of_glm_end_otherwise_than_its_texts():
    tokenizer = chat_tokenizer(GLM)
    renderer = ChatRenderer(tokenizer)
    assert [*renderer.terminators.values()] == ["<|user|>", "<|observation|>"]
    results = renderer.after([RESULT, RESULT], {"tools": TOOLS})
    shown = "\n<tool_response>\n1\n</tool_response>"
    assert results == f"<|observation|>{shown}{shown}<|assistant|>\n"
    question = renderer.after([QUESTION], {"tools": TOOLS})
    assert question == "<|user|>\nx<|assistant|>\n"
    # Whatever ended the turn is not there twice.
    for text in (results, question):
        name = text[: text.index(">") + 1]
        ended, cut = (tokenizer.encode(f"4{end}") for end in (name, ""))
        assert np.array_equal(renderer.encode_after(text, cut), tokenizer.encode(text))
        rest = renderer.encode_after(text, ended)
        assert np.array_equal(rest, tokenizer.encode(text)[1:])


def test_a_result_names_its_call_where_the_template_does():
    tokenizer = chat_tokenizer(HARMONY)
    renderer = ChatRenderer(tokenizer)
    # A text ends with <|end|> there, which the model does not sample.
    assert [*renderer.terminators.values()] == ["<|call|>"]
    text = renderer.after([RESULT], {"tools": TOOLS}, called="add")
    result = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>1<|end|>"
    assert text == f"<|call|>{result}<|start|>assistant"
    said = "<|channel|>commentary to=functions.add<|message|>{}<|call|>"
    rest = renderer.encode_after(text, tokenizer.encode(said))
    assert np.array_equal(rest, tokenizer.encode(f"{result}<|start|>assistant"))
