import json
import sys

import pytest

from jaxrl.data import Record, disjoint, reasoning_gym_records
from jaxrl.errors import UserError

SUMS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2}


def test_same_seed_same_rows_and_neighbouring_seeds_share_no_run():
    rows = reasoning_gym_records("chain_sum", size=100, seed=3, **SUMS)

    assert list(rows) == list(reasoning_gym_records("chain_sum", size=100, seed=3, **SUMS))
    # What reasoning-gym itself would do: seed 4 is seed 3 from its second item on.
    following = reasoning_gym_records("chain_sum", size=99, seed=4, **SUMS)
    assert not set(rows[1:]) & set(following[:98])


def test_tasks_without_worked_solutions_have_none():
    assert reasoning_gym_records("gcd", size=2, seed=0)[0].solution is None


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chain_sums", {}, "no task 'chain_sums'.*did you mean chain_sum"),
        ("chain_sum", {"max_term": 4}, "no setting 'max_term'.*did you mean max_terms"),
        ("chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
        ("chain_sum", {"size": 0}, "size 0 and seed 0"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(task, config, message):
    with pytest.raises(UserError, match=message):
        reasoning_gym_records(task, **{"size": 5, "seed": 0, **config})


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install reasoning-gym"):
        reasoning_gym_records("chain_sum", size=5, seed=0)


# Evaluation data.


def test_no_evaluation_question_is_trained_on(caplog):
    # 2,000 possible sums of three digits: many questions fall into both sets.
    small = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    everything = reasoning_gym_records("chain_sum", size=2000, seed=0, **small)
    evaluation = reasoning_gym_records("chain_sum", size=100, seed=1, **small)
    questions = {row.prompt for row in evaluation}
    assert questions & {row.prompt for row in everything}

    train = disjoint(everything, evaluation)

    assert not questions & {row.prompt for row in train}
    assert list(train) == [row for row in everything if row.prompt not in questions]
    assert f"{2000 - len(train)} of 2000 training rows dropped" in caplog.text


def test_case_and_spacing_do_not_hide_an_evaluation_question():
    rows = [Record("What is 1 + 1?", "2", "s"), Record("What is 1 + 2?", "3", "s")]
    assert disjoint(rows, [Record("what is  1 + 1?\n", "2", "t")]) == (rows[1],)


def test_holding_out_everything_is_refused():
    rows = [Record("?", "2", "s")]
    with pytest.raises(UserError, match="all 1 training prompts"):
        disjoint(rows, rows)


def test_a_conversation_is_held_out_by_what_is_said():
    talk = ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "of what?"})
    rows = [Record(talk, "2", "s"), Record("1 + 1?", "2", "s")]
    assert disjoint(rows, [Record("1 + 1?\nOf what?", "2", "t")]) == (rows[1],)


def test_what_a_scorer_looks_at_comes_along():
    for row in reasoning_gym_records("countdown", size=3, seed=0):
        metadata = row.extra["metadata"]
        assert metadata["source_dataset"] == "countdown"
        assert str(metadata["target"]) in str(row.prompt)
        assert json.loads(json.dumps(metadata)) == metadata
