"""Sessions of agents: what a dead worker costs, and what ends only once."""

import time
from typing import Any

from jaxrl_agents.sessions import Session, Sessions

NOTHING: Any = None


def opened(count: int, seconds: float = 100.0) -> tuple[Sessions, list[Session]]:
    sessions = Sessions(seconds)
    some = [Session(0, n, 7, {}, {"": NOTHING}) for n in range(count)]
    sessions.open(some)
    return sessions, some


def test_workers_share_the_sessions():
    sessions, some = opened(5)
    assert sessions.take("a", 3) == some[:3]
    assert sessions.take("a", 3) == []
    assert sessions.take("b", 3) == some[3:]


def test_what_died_with_a_worker_starts_again_with_few_others_and_then_alone():
    sessions, some = opened(6)
    assert sessions.take("a", 99) == some
    sessions.lost("a")
    assert sessions.take("a", 99) == []
    assert len(sessions.take("b", 99)) == 4
    assert len(sessions.take("c", 99)) == 2
    sessions.lost("c")
    # Each of these two has seen two workers die.
    assert len(sessions.take("d", 99)) == 1
    assert len(sessions.take("e", 99)) == 1
    sessions.lost("e")
    (failed,) = sessions.take_done()
    assert failed.ended and "ended its process" in failed.error
    # All others go on, whoever runs them.
    assert len([s for s in some if not s.ended]) == 5


def test_a_session_ends_once():
    sessions, (one, two) = opened(2)
    sessions.take("a", 9)
    sessions.end(one.key, 1.0)
    sessions.end(one.key, 0.0, "too late")
    sessions.end("a wrong key", 1.0)
    sessions.lost("a")
    assert sessions.take_done() == [one]
    assert (one.score, one.error) == (1.0, "")
    assert sessions.find(one.key) is None and sessions.find(two.key) is two


def test_late_sessions_end_and_waiting_ones_have_their_time():
    sessions, (one, two) = opened(2, seconds=0.01)
    sessions.take("a", 1)
    time.sleep(0.02)
    sessions.end_late()
    assert sessions.take_done() == [one] and "0.01 s" in one.error
    assert not two.ended


def test_closing_fails_what_is_open():
    sessions, some = opened(2)
    sessions.close()
    assert sessions.closed and sessions.take_done() == some
    assert sessions.take("a", 9) == []


def test_the_clock_stops_while_nobody_answers():
    sessions, (one,) = opened(1, seconds=0.05)
    sessions.take("a", 1)
    sessions.hold()
    time.sleep(0.1)
    sessions.go_on()
    sessions.end_late()
    assert sessions.take_done() == []
    time.sleep(0.1)
    sessions.end_late()
    assert sessions.take_done() == [one] and sessions.take_stopped("a") == [one.key]


def test_a_worker_is_told_once_of_a_session_that_was_dropped():
    sessions, (one, two, three) = opened(3)
    sessions.take("a", 2)
    for session in (one, three):
        sessions.stop(session, "was dropped")
    # Nobody runs the third.
    assert sessions.take_stopped("a") == [one.key] and sessions.take_stopped("a") == []
    assert sessions.take_done() == [one, three] and sessions.find(two.key) is two


def test_waiting_workers_hear_of_what_they_may_take_or_have_to_end():
    (sessions, (one, two, _)), news = opened(3), []
    sessions.on_news = lambda: news.append(1)
    sessions.open([])
    sessions.take("a", 2)
    assert not news
    # Its place is free for the third.
    sessions.end(one.key, 1.0)
    sessions.take("a", 2)
    for happens in (
        lambda: sessions.stop(two, "was dropped"),
        lambda: sessions.open([Session(0, 4, 7, {}, {"": NOTHING})]),
        lambda: sessions.lost("a"),
        sessions.close,
    ):
        assert news
        news.clear()
        happens()
    assert news
