"""The decode loop by itself: samples come, go and end as their caller likes, each as if it were alone."""

import collections

import numpy as np
import pytest
from byte_engine import CONFIG, OPTIONS, PROMPTS, decode, engine_of, loaded, weights

from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.sample_task import End, SampleTask, StartSequence
from jaxrl.rollout.samples import Sample
from jaxrl.rollout.slots import DrawSettings, Slots
from jaxrl.rollout.stop_strings import StopSearch

G = 3
SETTINGS = DrawSettings(OPTIONS.seed, OPTIONS.step, OPTIONS.temperature, OPTIONS.truncation)


def tasks_of(prompt, **changes) -> list[SampleTask]:
    start = StartSequence(PROMPTS.tokens[prompt])
    return [
        SampleTask(
            Sample(prompt, k, OPTIONS.step),
            start,
            int(PROMPTS.ids_N[prompt]),
            SETTINGS,
            CONFIG.max_response_tokens,
            **changes,
        )
        for k in range(G)
    ]


def new_loop(decode_text=decode) -> DecodeLoop:
    return DecodeLoop(engine_of(), weights(), StopSearch(decode_text), version=4, streams=True)


def drain(loop, results):
    while loop.unfinished:
        results += loop.dispatch()
    return results


@pytest.fixture(autouse=True)
def no_slot_decodes_for_nobody(monkeypatch):
    """After every dispatch: slots that decoded something are those of running samples."""
    fetch, dispatch, busy = Slots.decoded, DecodeLoop.dispatch, []

    def watched_fetch(self):
        active, decoded = fetch(self)
        busy.append(int((decoded.count > 0).sum()))
        return active, decoded

    def watched_dispatch(self):
        results = dispatch(self)
        assert not results or len(results) == busy[-1]
        return results

    monkeypatch.setattr(Slots, "decoded", watched_fetch)
    monkeypatch.setattr(DecodeLoop, "dispatch", watched_dispatch)


def offline(**changes):
    """Tokens of all samples, by prompt and index, from the offline backend."""
    options = OPTIONS.replace(num_samples=G, **changes)
    completions = loaded(OfflineBackend).generate(PROMPTS, options)
    return {divmod(b, G): tokens.tolist() for b, tokens in enumerate(completions.tokens)}


def test_samples_that_come_while_others_run_are_the_same():
    tasks = [task for prompt in range(5) for task in tasks_of(prompt)]
    loop, results = new_loop(), []
    assert loop.dispatch() == [] and not loop.unfinished
    for start in range(0, len(tasks), 4):
        loop.add(tasks[start : start + 4])
        results += loop.dispatch()
    drain(loop, results)
    expected = offline()
    added = collections.defaultdict(list)
    for result in results:
        added[result.task] += result.tokens.tolist()
    for task in tasks:
        sample = task.sample
        assert sample.tokens.tolist() == added[task] == expected[sample.prompt, sample.index]
        assert set(sample.version.tolist()) == {4}
    ends = [(r.task, r.end) for r in results if r.end is not None]
    assert len(ends) == len(tasks)
    for task, end in ends:
        stopped = int(task.sample.tokens[-1]) in CONFIG.stop_ids
        assert end is (End.STOP_ID if stopped else End.FULL)
        assert task.sample.finished and task.sample.truncated != stopped


def test_dropped_samples_leave_their_slots_to_others():
    batches = [tasks_of(prompt) for prompt in range(5)]
    loop = new_loop()
    for tasks in batches:
        loop.add(tasks)
    results = loop.dispatch()
    # The first are in slots, the last wait: there are eight slots for fifteen samples.
    running = {result.task for result in results if result.end is None}
    waiting = batches[3] + batches[4]
    gone = [task for task in batches[0] if task in running] + waiting
    assert running & set(gone) and set(gone) - running
    loop.drop(gone)
    later = drain(loop, [])
    assert not {result.task for result in later} & set(gone)
    expected = offline()
    for task in (task for tasks in batches[1:3] for task in tasks):
        assert task.sample.finished
        assert task.sample.tokens.tolist() == expected[task.sample.prompt, task.sample.index]


def test_a_sample_at_its_budget_is_left_unfinished():
    loop, tasks = new_loop(), tasks_of(1, budget_tokens=5)
    loop.add(tasks)
    last = {r.task: r.end for r in drain(loop, [])}
    for task in tasks:
        stopped = int(task.sample.tokens[-1]) in CONFIG.stop_ids
        assert last[task] is (End.STOP_ID if stopped else End.PAUSED)
        assert task.sample.finished == stopped and len(task.sample) <= 5
    assert End.PAUSED in last.values()


def test_environments_and_stop_strings_serve_whoever_feeds_the_loop():
    """A conversation beside samples that came before and come after it."""
    answer = np.array([5, 6, 7], np.int32)

    def environment(turn):
        return answer if len(turn.response) < 12 else None

    # Characters that are said in the middle of many samples, and so of dispatches.
    said = collections.Counter(c for tokens in offline().values() for c in decode(tokens[:8]))
    del said["\N{REPLACEMENT CHARACTER}"]  # a part of a character is no text yet
    stops = tuple(char for char, _ in said.most_common(8))
    expected = offline(environment=environment, stop_strings=stops)
    talks = [t for n in range(5) for t in tasks_of(n, environment=environment, stop_strings=stops)]
    loop = new_loop()
    loop.add(tasks_of(2))
    results = loop.dispatch()
    loop.add(talks)
    results += loop.dispatch()
    loop.add(tasks_of(0))
    drain(loop, results)
    for task in talks:
        assert task.sample.tokens.tolist() == expected[task.sample.prompt, task.sample.index]
    assert any(not task.sample.mask.all() for task in talks)
    assert {End.STOP_ID, End.STOP_STRING} <= {result.end for result in results}
    # What a dispatch reports is what the model said; answers are in the sample alone.
    said = collections.Counter()
    for result in results:
        said[result.task] += len(result.tokens)
    assert all(said[task] == task.sample.mask.sum() for task in talks)


def test_text_is_decoded_only_where_a_stop_string_can_have_ended():
    decoded = []

    def counted(tokens):
        decoded.append(len(tokens))
        return decode(tokens)

    loop = new_loop(counted)
    loop.add(task for n in range(5) for task in tasks_of(n, stop_strings=("never said",)))
    results = drain(loop, [])
    # Each token by itself, and once more twice. Half of them are bytes that are no characters.
    kinds = 2 * len({token for result in results for token in result.tokens.tolist()} | {0})
    assert kinds <= len(decoded) < kinds + len(results)
    # The newest tokens and as many as the stop string has bytes, however long the sample is.
    assert 2 < max(decoded) <= CONFIG.tokens_per_dispatch + len("never said")


def test_ended_samples_get_their_tokens_while_the_devices_work_on():
    """Not between two dispatches, where the devices would wait; and none is lost when slots move."""
    tasks = [task for prompt in range(5) for task in tasks_of(prompt)]
    loop = DecodeLoop(engine_of(), weights(), StopSearch(decode), version=4)
    loop.add(tasks)
    ended = []
    while loop.unfinished:
        loop.begin()
        assert all(len(task.sample) for task in ended)
        ended = [result.task for result in loop.finish()]
        assert all(task.sample.finished and not len(task.sample) for task in ended)
    assert ended
    loop.give_tokens()
    found = {(t.sample.prompt, t.sample.index): t.sample.tokens.tolist() for t in tasks}
    expected = offline()
    assert found == {key: expected[key] for key in found}
