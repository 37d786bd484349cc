"""The decode loop by itself: samples come, go and end as their caller likes, each as if it were alone."""

import collections

import pytest
from byte_engine import CONFIG, OPTIONS, PROMPTS, decode, engine_of, loaded, weights

from jaxrl.rollout.decode_loop import DecodeLoop, End
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.slots import Slots
from jaxrl.rollout.stop_strings import StopSearch

G = 3


def samples_of(prompt, **changes) -> list[Sample]:
    start, options = Start(PROMPTS.tokens[prompt]), OPTIONS.replace(**changes)
    return [
        Sample(prompt, k, OPTIONS.step).request(
            start, int(PROMPTS.ids_N[prompt]), options, CONFIG.max_response_tokens
        )
        for k in range(G)
    ]


def new_loop(decode_text=decode) -> DecodeLoop:
    return DecodeLoop(engine_of(), weights(), StopSearch(decode_text), version=4, streams=True)


def drain(loop, results):
    while loop.scheduler.num_unfinished:
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
    samples = [sample for prompt in range(5) for sample in samples_of(prompt)]
    loop, results = new_loop(), []
    assert loop.dispatch() == [] and not loop.scheduler.num_unfinished
    for start in range(0, len(samples), 4):
        loop.add(samples[start : start + 4])
        results += loop.dispatch()
    drain(loop, results)
    expected = offline()
    added = collections.defaultdict(list)
    for result in results:
        added[result.sample] += result.tokens.tolist()
    for sample in samples:
        assert sample.tokens.tolist() == added[sample] == expected[sample.prompt, sample.index]
        assert set(sample.sampled.version.tolist()) == {4}
    ends = [(r.sample, r.end) for r in results if r.end is not None]
    assert len(ends) == len(samples)
    for sample, end in ends:
        stopped = int(sample.tokens[-1]) in CONFIG.stop_ids
        assert end is (End.STOP_ID if stopped else End.FULL)
        assert sample.finished and sample.truncated != stopped


def test_dropped_samples_leave_their_slots_to_others():
    batches = [samples_of(prompt) for prompt in range(5)]
    loop = new_loop()
    for samples in batches:
        loop.add(samples)
    results = loop.dispatch()
    # The first are in slots, the last wait: there are eight slots for fifteen samples.
    running = {result.sample for result in results if result.end is None}
    waiting = batches[3] + batches[4]
    gone = [sample for sample in batches[0] if sample in running] + waiting
    assert running & set(gone) and set(gone) - running
    loop.drop(gone)
    later = drain(loop, [])
    assert not {result.sample for result in later} & set(gone)
    expected = offline()
    for sample in (sample for samples in batches[1:3] for sample in samples):
        assert sample.finished
        assert sample.tokens.tolist() == expected[sample.prompt, sample.index]


def test_a_sample_at_its_budget_is_left_unfinished():
    loop, samples = new_loop(), samples_of(1, budget_tokens=5)
    loop.add(samples)
    last = {r.sample: r.end for r in drain(loop, [])}
    for sample in samples:
        stopped = int(sample.tokens[-1]) in CONFIG.stop_ids
        assert last[sample] is (End.STOP_ID if stopped else End.PAUSED)
        assert sample.finished == stopped and len(sample) <= 5
    assert End.PAUSED in last.values()


def test_stop_strings_serve_whoever_feeds_the_loop():
    """Samples with stop strings beside others that came before and come after them."""
    # Characters that are said in the middle of many samples, and so of dispatches.
    said = collections.Counter(c for tokens in offline().values() for c in decode(tokens[:8]))
    del said["\N{REPLACEMENT CHARACTER}"]  # a part of a character is no text yet
    stops = tuple(char for char, _ in said.most_common(8))
    expected = offline(stop_strings=stops)
    stopping = [sample for n in range(5) for sample in samples_of(n, stop_strings=stops)]
    loop = new_loop()
    loop.add(samples_of(2))
    results = loop.dispatch()
    loop.add(stopping)
    results += loop.dispatch()
    loop.add(samples_of(0))
    drain(loop, results)
    added = collections.defaultdict(list)
    for result in results:
        added[result.sample] += result.tokens.tolist()
    for sample in stopping:
        assert sample.tokens.tolist() == added[sample] == expected[sample.prompt, sample.index]
    assert {End.STOP_ID, End.STOP_STRING} <= {result.end for result in results}


@pytest.mark.parametrize("strings", [(), ("\N{NULL}never",)])
def test_ids_of_a_request_end_its_samples_and_stay_in_them(strings):
    """Beside samples that have none, and for continued samples."""
    said = collections.Counter(t for tokens in offline().values() for t in set(tokens[1:]))
    stop_ids = tuple(token for token, _ in said.most_common(4) if token not in CONFIG.stop_ids)
    stopping = samples_of(1, stop_ids=(*stop_ids, 10**6), stop_strings=strings)
    free = samples_of(1)
    loop = new_loop()
    loop.add([*free, *stopping])
    last = {r.sample: r.end for r in drain(loop, [])}
    cut = 0
    for sample, other in zip(stopping, free, strict=True):
        whole = other.tokens.tolist()
        at = next((i for i, token in enumerate(whole) if token in stop_ids), len(whole) - 1)
        assert sample.tokens.tolist() == whole[: at + 1]
        assert sample.sampled.logprob.tolist() == other.sampled.logprob.tolist()[: at + 1]
        stopped = whole[at] in (*stop_ids, *CONFIG.stop_ids)
        assert last[sample] is (End.STOP_ID if stopped else End.FULL)
        assert sample.truncated == (not stopped)
        cut += at + 1 < len(whole)
    assert cut


def test_the_first_of_a_stop_string_and_a_stop_id_ends_a_sample():
    loop, whole = new_loop(), offline()
    # A sample with two characters of one byte, whose token is their number.
    spoken = {key: [t for t in dict.fromkeys(x) if 31 < t < 128] for key, x in whole.items()}
    (n, g), (first, second, *_) = next(x for x in spoken.items() if len(x[1]) > 1)
    for string, token, end in (
        (chr(first), second, End.STOP_STRING),
        (chr(second), first, End.STOP_ID),
    ):
        sample = samples_of(n, stop_strings=(string,), stop_ids=(token,))[g]
        loop.add([sample])
        assert drain(loop, [])[-1].end is end
        assert sample.tokens.tolist() == whole[n, g][: whole[n, g].index(first) + 1]


def test_text_is_decoded_only_where_a_stop_string_can_have_ended():
    decoded = []

    def counted(tokens):
        decoded.append(len(tokens))
        return decode(tokens)

    loop = new_loop(counted)
    loop.add(sample for n in range(5) for sample in samples_of(n, stop_strings=("never said",)))
    results = drain(loop, [])
    # Each token by itself, and once more twice. Half of them are bytes that are no characters.
    kinds = 2 * len({token for result in results for token in result.tokens.tolist()} | {0})
    assert kinds <= len(decoded) < kinds + len(results)
    # The newest tokens and as many as the stop string has bytes, however long the sample is.
    assert 2 < max(decoded) <= CONFIG.tokens_per_dispatch + len("never said")


def test_ended_samples_get_their_tokens_while_the_devices_work_on():
    """Not between two dispatches, where the devices would wait; and none is lost when slots move."""
    samples = [sample for prompt in range(5) for sample in samples_of(prompt)]
    loop = DecodeLoop(engine_of(), weights(), StopSearch(decode), version=4)
    loop.add(samples)
    ended = []
    while loop.scheduler.num_unfinished:
        loop.begin()
        assert all(len(sample) for sample in ended)
        ended = [result.sample for result in loop.finish()]
        assert all(sample.finished and not len(sample) for sample in ended)
    assert ended
    loop.give_tokens()
    found = {(t.prompt, t.index): t.tokens.tolist() for t in samples}
    expected = offline()
    assert found == {key: expected[key] for key in found}
