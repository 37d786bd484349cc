"""The order of agents' requests: what a run notes makes another one start the same requests together."""

import logging

import pytest

from jaxrl.dataflows import schedule
from jaxrl.dataflows.schedule import RequestOrder, VersionRow
from jaxrl.errors import UserError

# Step 4: requests 7 and 8 start together, a dispatch later none, then 9; a second batch asks 5.
ASKED = ((0, (7, 8)), (2, (9,)), (3, (5,)))


def noted() -> list[VersionRow]:
    rows: list[VersionRow] = []
    order = RequestOrder(rows.append)
    order.note([1])  # an evaluation before the step
    for batch in (([7, 8], [], [9]), ([5],)):
        order.begin(4)
        for seeds in batch:
            assert order.starting(seeds) == seeds
            order.note(seeds)
        order.end()
    return rows


def test_a_step_notes_each_dispatch_and_nothing_beside_it():
    rows = noted()
    # The last row of a version counts: it has all batches of the step.
    assert rows[-1] == VersionRow(4, 4, (), asked=ASKED)
    assert rows[0] == VersionRow(4, 3, (), asked=ASKED[:2])


def repeating() -> RequestOrder:
    order = RequestOrder(lambda row: None, {4: noted()[-1]})
    order.begin(4)
    return order


def test_requests_start_with_those_of_the_recorded_run():
    order = repeating()
    assert order.starting([]) is None
    assert order.starting([8]) is None
    # In the recorded order, and without one that is early.
    assert order.starting([9, 8, 7]) == [7, 8]
    order.note([7, 8])
    assert order.starting([9]) == []
    order.note([])
    assert order.starting([9]) == [9]
    order.note([9])
    order.end()
    assert order.starting([3, 4]) == [3, 4]  # an evaluation


def test_a_request_that_is_made_twice_is_neither_held_nor_waited_for():
    rows: list[VersionRow] = []
    order = RequestOrder(rows.append)
    order.begin(0)
    for seeds in ([7], [7, 8], [9]):
        order.note(seeds)
    order.end()
    again = RequestOrder(lambda row: None, {0: rows[0]})
    again.begin(0)
    assert again.starting([7, 7]) == [7]
    again.note([7, 7])
    # The second one came with the first, and is there no more; 7 comes once more.
    assert again.starting([8]) == [7, 8]
    again.note([8])
    assert again.starting([7]) is None
    assert again.starting([7, 9]) == [9, 7]


@pytest.mark.parametrize("slow", [False, True])
def test_agents_that_ask_something_else_are_not_waited_for(slow, caplog, monkeypatch):
    order = repeating()
    assert order.starting([8]) is None
    if slow:
        monkeypatch.setattr(schedule, "_PATIENCE_S", 0.0)
    with caplog.at_level(logging.WARNING):
        waiting = [8] if slow else [8, 6]
        assert order.starting(waiting) == waiting
    assert "step 5: agents do not ask what they asked in the recorded run" in caplog.text
    order.note(waiting)
    assert order.starting([9]) == [9]


def test_a_recorded_run_that_ends_before_is_named():
    with pytest.raises(UserError, match="has 1 steps, and this is step 6"):
        RequestOrder(lambda row: None, {4: noted()[-1]}).begin(5)
