import json
import re

import numpy as np
import pytest
from chats import assistant, user

from jaxrl.data import Preference
from jaxrl.data.chat import ChatTemplate
from jaxrl.data.messages import PromptFormat
from jaxrl.data.preferences import PreferenceStream, read_preferences
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError

CHAT = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}",
    origin="this test",
    special_tokens={},
)
TOKENIZER = train_tokenizer(["1 + 1 = 2"], vocab_size=258)
CHAT_TOKENIZER = type(TOKENIZER)(**{**vars(TOKENIZER), "chat_template": CHAT})
# Six pairs; a character is a token.
PAIRS = [Preference(f"{a}+{a}=", f"{2 * a}", f"{3 * a}!", "sums", a / 2, -1, 1) for a in range(6)]


def stream(pairs=PAIRS, tokenizer=TOKENIZER, **settings):
    defaults = {"pairs_per_batch": 4, "seed": 3, "max_tokens": 100}
    return PreferenceStream(pairs, tokenizer, **{**defaults, **settings})


def write(tmp_path, *rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def read(tmp_path, *rows, **settings):
    return read_preferences(write(tmp_path, *rows), source="s", **settings)


def texts(batch) -> list[tuple[str, str, str, str]]:
    decode = TOKENIZER.decode
    return [(*map(decode, pair.chosen), *map(decode, pair.rejected)) for pair in batch]


# Files.


def test_rows_with_texts(tmp_path):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "other": None}
    assert read(tmp_path, row, "", row) == (Preference("1+1=", "2", "3", "s"),) * 2


def test_margins_and_harms_have_fields_with_names(tmp_path):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 1}
    row |= {"chosen_harms": False, "rejected_harms": None}
    pairs = read(tmp_path, row)
    assert pairs == (Preference("1+1=", "2", "3", "s", 1.0, -1, 0),)


@pytest.mark.parametrize(
    ("row", "context"),
    [
        # The answers alone, after a question or a conversation.
        ({"prompt": "1+1=", "chosen": [assistant("2")], "rejected": [assistant("3")]}, "1+1="),
        (
            {"prompt": [user("1+1=")], "chosen": [assistant("2")], "rejected": [assistant("3")]},
            (user("1+1="),),
        ),
        ({"prompt": [user("1+1=")], "chosen": "2", "rejected": "3"}, (user("1+1="),)),
        # Whole conversations; the prompt beside them is not read.
        (
            {
                "prompt": 7,
                "chosen": [user("1+1="), assistant("2")],
                "rejected": [user("1+1="), assistant("3")],
            },
            (user("1+1="),),
        ),
        # Conversations that go on after the prompt.
        (
            {
                "prompt": "1+1=",
                "chosen": [assistant("?"), user("sum"), assistant("2")],
                "rejected": [assistant("?"), user("sum"), assistant("3")],
            },
            (user("1+1="), assistant("?"), user("sum")),
        ),
    ],
)
def test_rows_with_messages(tmp_path, row, context):
    assert read(tmp_path, row) == (Preference(context, "2", "3", "s"),)


MESSAGES = {"chosen": [user("?"), assistant("2")], "rejected": [user("?"), assistant("3")]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "no valid JSON"),
        ({"chosen": "2", "rejected": "3"}, "no field 'prompt'; the row has 'chosen', 'rejected'"),
        ({"prompt": "?", "chosen": "2"}, "no field 'rejected'"),
        ({"prompt": "?", "chosen": "2", "rejected": " "}, "field 'rejected' is \" \"; it must be"),
        ({"prompt": "?", "chosen": 2, "rejected": "3"}, "field 'chosen' is 2; it must be text"),
        ({**MESSAGES, "rejected": "3"}, "one is a list of messages and the other is not"),
        ({**MESSAGES, "chosen": [user("?")]}, "the last message of field 'chosen' is by 'user'"),
        ({**MESSAGES, "chosen": [user("!"), assistant("2")]}, "part before their last message"),
        ({**MESSAGES, "chosen_harms": "yes"}, "'yes'"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, row, message):
    good = {"prompt": "?", "chosen": "2", "rejected": "3", "margin": 0, "chosen_harms": True}
    path = write(tmp_path, good, "", row)
    with pytest.raises(UserError, match=re.escape(f"{path}:3: ") + f".*{re.escape(message)}"):
        read_preferences(path, source="s")


# The stream.


def test_both_answers_have_the_prompt_and_an_end():
    batch = next(stream(prompt_format=PromptFormat("{prompt} "), pairs_per_batch=6))
    for pair, words in zip(batch, texts(batch), strict=True):
        a = int(2 * pair.margin)
        prompt = f"{a}+{a}= "
        assert words == (prompt, f"{2 * a}", prompt, f"{3 * a}!")
        assert pair.chosen[1][-1] == pair.rejected[1][-1] == TOKENIZER.eos_id
        assert (pair.chosen_harm, pair.rejected_harm) == (-1, 1)
        assert {x.dtype for x in (*pair.chosen, *pair.rejected)} == {np.dtype(np.int32)}


def test_questions_and_conversations_go_through_the_chat_template():
    pairs = [
        Preference("1+1=", "2", "3", "s"),
        Preference((user("1"), assistant("2"), user("3")), "4", "5", "s"),
    ]
    (prompts, *_) = zip(
        *texts(next(stream(pairs, CHAT_TOKENIZER, prompt_format=PromptFormat(chat=True)))),
        strict=True,
    )
    assert set(prompts) == {"u:1+1=|a:", "u:1|a:2|u:3|a:"}
    # A question is a question with or without; a conversation needs the template.
    (prompts, *_) = zip(*texts(next(stream(pairs, CHAT_TOKENIZER))), strict=True)
    assert set(prompts) == {"1+1=", "u:1|a:2|u:3|a:"}
    with pytest.raises(UserError, match="no chat template"):
        stream(pairs)


@pytest.mark.parametrize(
    "other",
    [
        lambda: stream(PAIRS[:5]),
        lambda: stream(seed=4),
        lambda: stream([*PAIRS[:5], Preference("5+5=", "10", "15!", "sums", 9.0, -1, 1)]),
        lambda: stream([*PAIRS[:5], Preference("5+5=", "10", "15?", "sums", 2.5, -1, 1)]),
    ],
)
def test_a_state_of_other_pairs_is_refused(other):
    with pytest.raises(UserError, match="in other data"):
        other().restore(stream().state())


def test_pairs_that_prefer_nothing_or_are_too_long_are_dropped_and_counted(caplog):
    same = Preference("1+1=", "2", "2", "s")
    long_chosen, long_rejected = (
        Preference("1+1=", "2" * n, "3" * m, "s") for n, m in [(9, 1), (1, 9)]
    )
    pairs = stream([*PAIRS, same, long_chosen, long_rejected], max_tokens=8)

    assert pairs.state()["num_rows"] == 6
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 9 pairs dropped: the chosen answer is the rejected one",
        "2 of 8 pairs dropped: longer than max_tokens 8 (the longest has 14 tokens)",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": [Preference("?", "2", "2", "s")]}, "in all 1 pairs the chosen answer is the"),
        ({"max_tokens": 6}, "all 6 pairs are longer than max_tokens 6, the shortest has 7 tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        stream(**settings)
