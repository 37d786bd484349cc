"""Futures: one result per key, fetched as often as asked, gone when told so."""

import asyncio
import json
import threading

import pytest

from jaxrl.errors import UserError
from jaxrl_tinker.futures import Futures, Gone, Result


def submit(futures, key="k", body=b"{}", start=lambda future: None, **options):
    return futures.submit("route", key, body, start, **{"session_id": "s", **options})


def retrieve(futures, future, timeout_s=0.0):
    return asyncio.run(futures.retrieve(future.request_id, timeout_s))


def test_a_repeated_submission_runs_once_and_gets_the_same_id():
    futures, started = Futures(), []
    first, again = (submit(futures, start=started.append) for _ in range(2))
    assert first is again and started == [first]
    assert submit(futures, "other").request_id != first.request_id
    with pytest.raises(UserError, match="another body"):
        submit(futures, body=b'{"x": 1}')


def test_a_save_that_is_repeated_may_have_another_number_for_its_sampler():
    """As tinker 0.38 sends it if the answer to the first was lost."""
    futures, route = Futures(), "save_weights_for_sampler"
    bodies = [b'{"kind": "%s", "sampling_session_seq_id": %d}' % x for x in ((b"a", 1), (b"a", 2))]
    first, again = (
        futures.submit(route, "k", x, lambda future: None, session_id="s") for x in bodies
    )
    assert first is again
    with pytest.raises(UserError, match="another body"):
        futures.submit(route, "k", b'{"kind": "b"}', print, session_id="s")


def test_a_result_is_the_same_as_often_as_it_is_fetched():
    futures = Futures()
    future = submit(futures)
    assert retrieve(futures, future) is None
    futures.run(future, lambda: {"loss": 1})
    futures.finish(future, Result(b"later"))
    assert retrieve(futures, future) == retrieve(futures, future) == Result(b'{"loss": 1}')


def test_a_waiting_client_gets_the_result_of_another_thread():
    futures = Futures()
    future = submit(futures)
    threading.Timer(0.05, futures.run, (future, lambda: b"\x08")).start()
    found = retrieve(futures, future, timeout_s=20)
    assert found == Result(b"\x08", is_protobuf=True)


@pytest.mark.parametrize(
    ("error", "category"), [(UserError("too long; cut it"), "user"), (MemoryError("no"), "server")]
)
def test_an_error_is_a_result_that_says_whose_it_is(error, category):
    def fail(*_):
        raise error

    futures = Futures()
    at_work, at_start = submit(futures), None
    futures.run(at_work, fail)
    if category == "user":
        at_start = submit(futures, "second", start=fail)
    for future in filter(None, (at_work, at_start)):
        found = json.loads(retrieve(futures, future).body)
        assert found["category"] == category and str(error) in found["error"]


def test_what_is_unknown_is_gone():
    futures = Futures()
    future = submit(futures)
    futures.end_session("s")
    with pytest.raises(Gone, match=future.request_id):
        retrieve(futures, future)
    assert submit(futures) is not future, "its id is free again"


def test_too_many_results_drop_the_oldest_that_were_fetched():
    futures = Futures(max_bytes=10)
    kept, fetched, newest = (submit(futures, key) for key in "abc")
    for future in (kept, fetched):
        futures.finish(future, Result(b"12345"))
    retrieve(futures, fetched)
    futures.finish(newest, Result(b"12345"))
    assert retrieve(futures, kept) == retrieve(futures, newest) == Result(b"12345")
    with pytest.raises(Gone):
        retrieve(futures, fetched)


def test_a_session_that_fetches_nothing_is_refused_before_it_fills_the_memory():
    futures = Futures(max_bytes=10)
    for key in "abc":
        futures.finish(submit(futures, key), Result(b"12345"))
    with pytest.raises(UserError, match="15 bytes of results of session s wait to be fetched"):
        submit(futures, "d")
    # Not others, nor what was submitted before.
    submit(futures, "e", session_id="t")
    retrieve(futures, submit(futures, "a"))
    retrieve(futures, submit(futures, "b"))
    retrieve(futures, submit(futures, "c"))
    submit(futures, "d")


def test_many_sessions_that_fetch_nothing_are_refused():
    futures = Futures(max_bytes=10)
    for key in "abcdef":
        futures.finish(submit(futures, key, session_id=key), Result(b"12"))
    with pytest.raises(UserError, match="2 bytes of results of session a"):
        submit(futures, "g", session_id="a")


def test_a_cursor_runs_over_the_finished_requests_of_a_channel():
    async def finished(cursor, timeout_s=0.0):
        return await futures.finished_of("sampler", cursor, timeout_s)

    futures = Futures()
    one, two, _ = (
        submit(futures, key, channel=c)
        for key, c in zip("abc", ("sampler", "sampler", ""), strict=True)
    )
    assert asyncio.run(finished(0)) == ([], 0)
    futures.finish(two, Result(b"12"))
    threading.Timer(0.05, futures.finish, (one, Result(b"1", failed=True))).start()
    assert asyncio.run(finished(0)) == ([(two.request_id, False, 2)], 1)
    assert asyncio.run(finished(1, 20)) == ([(one.request_id, True, 1)], 2)
