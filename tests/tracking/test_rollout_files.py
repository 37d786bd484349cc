"""Rows of samples and their files."""

import json
import logging
import math

import numpy as np
import pytest
from beside import of_extension

from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.rewards.score import Term, weighted_sum
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.packing import RowLimits
from jaxrl.tracking.kept_rollouts import RolloutFiles
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.sample_rows import (
    TOKEN_STRINGS,
    TokenStrings,
    logprobs_by_response,
    sample_rows,
    to_lines,
)
from jaxrl.types import AgentRows, Branch, Completions, GraderFailure, Prompts, Scored, TurnText

tokens_of = of_extension("jaxrl_browse.browse_app:tokens_of")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three", "two and one"] * 4, vocab_size=280)


def scored_of(tokenizer, texts, **changes) -> Scored:
    """One prompt with a response per text; the last response is truncated."""
    eos = np.array([tokenizer.eos_id], np.int32)
    tokens = [tokenizer.encode(text) for text in texts]
    tokens = [*(np.concatenate([t, eos]) for t in tokens[:-1]), tokens[-1]]
    prompts = Prompts(np.array([7]), (tokenizer.encode("one?"),), ("one?",), ("1",), ("numbers",))
    completions = Completions(
        prompts=prompts,
        num_samples=len(texts),
        tokens=tuple(tokens),
        rollout_logprob=tuple(-np.arange(len(t), dtype=np.float32) / 8 for t in tokens),
        entropy=tuple(np.full(len(t), 0.5, np.float32) for t in tokens),
        truncated_B=np.arange(len(texts)) == len(texts) - 1,
        texts=tuple(map(tokenizer.decode, tokens)),
        mask=changes.pop("mask", ()),
        version=changes.pop("version", ()),
        turns=changes.pop("turns", ()),
        of_agents=changes.pop("of_agents", None),
    )
    B = len(texts)
    return Scored(
        completions=completions,
        correct_B=np.arange(B) == 0,
        score_B=np.where(np.arange(B) == 0, 1, -1).astype(np.float32),
        shaping_B=np.full(B, -0.25, np.float32),
        predictions=("1", *[None] * (B - 1)),
        **changes,
    )


def rows_of(tokenizer, scored, **options) -> list[dict]:
    rows = sample_rows(scored, TokenStrings(tokenizer), stop_ids=tokenizer.stop_ids, **options)
    return [json.loads(to_lines([row])) for row in rows]


def test_a_reward_that_abstained_is_null(tokenizer):
    scored = scored_of(tokenizer, ["two", "three"])
    terms = [Term("mine", 2.0, [None, 1.0]), Term("other", 1.0, [None, None])]
    rows = rows_of(tokenizer, weighted_sum(scored, terms)[0], terms=["mine", "other"])
    assert [(row["score"], row["reward"]) for row in rows] == [(None, None), (2.0, 1.75)]
    assert [row["reward_parts"] for row in rows] == [
        {"mine": None, "other": None},
        {"mine": 1.0, "other": None},
    ]


def test_a_grader_failure_is_in_the_row(tokenizer):
    failure = GraderFailure("timeout", "it has not answered within 4 s")
    scored = scored_of(tokenizer, ["two", "three"], failures=(None, failure))
    expected = [None, {"kind": "timeout", "message": "it has not answered within 4 s"}]
    assert [row["failure"] for row in rows_of(tokenizer, scored)] == expected
    both = Scored.concatenate([scored, scored.take([0])])
    assert [row["failure"] for row in rows_of(tokenizer, both)] == expected * 2


def test_the_fields_of_a_row(tokenizer):
    first, last = rows_of(tokenizer, scored_of(tokenizer, ["two", "three"]), step=20)
    pieces = first.pop(TOKEN_STRINGS)
    assert first == {
        "step": 20,
        "source": "numbers",
        "prompt_id": 7,
        # The beginning of the SHA-256 of ["one?", "1", {}].
        "problem_key": "1948f9a96571b582",
        "sample": 0,
        "prompt": "one?",
        "answer": "1",
        "completion": "two",
        "prediction": "1",
        "correct": True,
        "failure": None,
        "score": 1.0,
        "shaping": -0.25,
        "reward": 0.75,
        "reward_parts": {"grader": 1.0},
        "length": len(pieces["text"]),
        "truncated": False,
        "stop_reason": "stop_token",
        "entropy": 0.5,
    }
    assert "".join(pieces["text"]) == "two<eos>"
    assert pieces["rollout_logprob"][:2] == [0.0, -0.125]
    assert "old_logprob" not in pieces and "given" not in pieces
    assert (last["prediction"], last["correct"], last["truncated"]) == (None, False, True)
    assert last["stop_reason"] == "length"


def test_reward_parts_have_their_names(tokenizer):
    scored = scored_of(tokenizer, ["two", "three"])
    scored = scored.replace(term_BK=np.array([[1, 0.5], [-1, np.nan]], np.float32))
    parts = [row["reward_parts"] for row in rows_of(tokenizer, scored, terms=("grader", "short"))]
    assert parts == [{"grader": 1.0, "short": 0.5}, {"grader": -1.0, "short": None}]


@pytest.mark.parametrize("text", ["naïve 東京 🦜 ok", "\x00\u202e<script>", "two 🦜", "   two  "])
def test_token_strings_join_to_the_text(tokenizer, text):
    tokens = tokenizer.encode(text)
    pieces = TokenStrings(tokenizer)(tokens, tokenizer.decode(tokens))
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_an_incomplete_character_at_the_end_is_shown(tokenizer):
    tokens = tokenizer.encode("a 🦜")[:-1]
    pieces = TokenStrings(tokenizer)(tokens, tokenizer.decode(tokens))
    assert "".join(pieces) == tokenizer.decode(tokens)


def test_conversations_show_what_was_not_sampled(tokenizer):
    text = "two 🦜"
    mask = np.ones(len(tokenizer.encode(text)), np.float32)
    mask[1] = 0
    turns = ((TurnText(True, "t"), TurnText(False, "w"), TurnText(True, "o 🦜")),)
    thread = tokenizer.encode("two")
    nothing = np.zeros(len(thread))
    branch = Branch(thread, nothing, nothing, 0, 0 * mask[: len(thread)])
    agents = AgentRows(np.array([np.nan]), (None,), ((branch,),))
    scored = scored_of(tokenizer, [text], mask=(mask,), turns=turns, of_agents=agents)
    (row,) = rows_of(tokenizer, scored)
    assert row[TOKEN_STRINGS]["given"] == [1]
    (further,) = row[TOKEN_STRINGS]["branches"]
    assert "".join(further["text"]) == "two" and further["given"] == list(range(len(thread)))
    assert "version" not in row[TOKEN_STRINGS]
    shown = tokens_of(row)
    assert "".join(token["text"] for token in shown) == f"{text}\n\n[conversation 2]\ntwo"
    assert [i for i, token in enumerate(shown) if not token["given"]] == np.flatnonzero(
        mask
    ).tolist()


def test_a_row_has_versions_where_its_weights_are_not_the_newest(tokenizer):
    old, new, last = np.int32([3, 4, 4, 4]), np.int32([4, 4, 4, 4]), np.int32([4])
    versions = tuple(x[: len(tokenizer.encode("two")) + 1] for x in (old, new))
    scored = scored_of(tokenizer, ["two", "two", "one"], version=(*versions, last))
    pieces = [row[TOKEN_STRINGS] for row in rows_of(tokenizer, scored)]
    assert pieces[0]["version"] == versions[0].tolist()
    assert all("version" not in each for each in pieces[1:])
    assert tokens_of({TOKEN_STRINGS: pieces[0]})[0]["version"] == 3


def test_the_trainers_logprobs_find_their_tokens(make_scored):
    completions = make_scored([5, 6, 3], num_samples=2).completions
    longest = max(len(t) for t in completions.tokens) + 3
    shape = RowLimits(2, 2 * longest, longest).shape(6, minibatches=2)
    packed, packing = pack_completions(completions, shape)
    # A number for each token that says which it is: those of a response are its own tokens.
    rows = np.asarray(packed.tokens)[packing.rows(packing.starts[:4])].astype(np.float32)
    found = logprobs_by_response(packing, rows, completions.lengths_B[:4].tolist())
    assert list(found) == [0, 1, 2, 3]
    for b, value in found.items():
        np.testing.assert_array_equal(value, completions.tokens[b].astype(np.float32))


def test_nan_and_infinity_are_null(tokenizer):
    scored = scored_of(tokenizer, ["two"])
    scored.completions.rollout_logprob[0][0] = -math.inf
    (row,) = rows_of(tokenizer, scored)
    assert row[TOKEN_STRINGS]["rollout_logprob"][0] is None


# Files


def files_of(folder, **changes) -> RolloutFiles:
    return RolloutFiles(RunFolder(folder).rollouts, **({"every": 10} | changes))


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_the_first_step_and_every_tenth_are_kept(tmp_path):
    files = files_of(tmp_path)
    assert [step for step in range(1, 31) if files.is_due(step)] == [1, 10, 20, 30]
    assert not any(files_of(tmp_path, every=0).is_due(step) for step in range(31))
    assert list(tmp_path.iterdir()) == []


def test_a_repeated_step_is_written_once(tmp_path):
    for _ in range(2):
        files = files_of(tmp_path)
        files.remove_after(0)
        files.write(10, lambda: [{"a": 1}, {"a": "\ud800"}])
        files.write(20, lambda: [{"a": 2}])
        files.close()
    assert names(tmp_path) == ["step_10.jsonl", "step_20.jsonl"]
    assert (tmp_path / "rollouts" / "step_10.jsonl").read_bytes() == b'{"a":1}\n{"a":"\\ud800"}\n'


def test_files_of_repeated_steps_are_removed_first(tmp_path):
    files = files_of(tmp_path)
    for step in (1, 10, 20):
        files.write(step, lambda: [{}])
    files.close()
    (tmp_path / "rollouts" / "step_x.jsonl").touch()
    (tmp_path / "rollouts" / "step_020.jsonl").touch()
    files_of(tmp_path).remove_after(10)
    assert names(tmp_path) == ["step_020.jsonl", "step_1.jsonl", "step_10.jsonl", "step_x.jsonl"]
    assert list(RunFolder(tmp_path).rollouts.steps()) == [1, 10]


def test_a_full_disk_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("in the way")
    files = files_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        files.write(10, lambda: [{}])
        files.close()
    (record,) = caplog.records
    assert "training goes on without them" in record.getMessage()


def test_other_errors_are_raised(tmp_path):
    files = files_of(tmp_path)
    files.write(10, lambda: [{"x": object()}])
    with pytest.raises(TypeError):
        files.close()
