"""What rollout costs the host, at the number of slots of a large run: everything but the device.

    python benchmarks/rollout_host.py [--slots 64 1024 4096] [--part PART ...]

dispatch     seconds of the host for each dispatch, around an engine that returns its arrays at once
hosts        the same for sampling that outlives a step, on one of some hosts with 1,024 slots each
stops        the same with a stop string, which is looked for in the text of every slot
texts        turning 2 million tokens into text, one response at a time and in batches
packing      packing long responses into rows on one of some hosts, as in the first step and as in later ones
pages        the pages of 4,096 slots: a dispatch, and samples that start
unfinished   saving 1,000 unfinished groups, and reading them back

The engine decodes W tokens in every active slot. Response lengths are log-normal, as in reasoning: most are a
thousand tokens, and a few are ten times as long. So slots fall free and are filled again all the time. Two
times are told for each dispatch: what the device waits for, from its results to the next call of `generate`;
and what the host does while the device works, such as text and groups. Dispatches with all slots busy are
told apart from all of them, which include the first admissions and the end of the batch. Seconds are those of
the processor, so that other work on the machine does not count.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import resource
import statistics
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fake_engine import FakeEngine, lognormal_lengths

from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.mesh import hosts
from jaxrl.mesh.replica_groups import ReplicaGroups
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.packing import RowLimits
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.continuous import ContinuousRollout
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.decode_loops import DecodeLoops
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine_sizes import PageSizes
from jaxrl.rollout.sample_groups import GroupLoop, SampleGroups
from jaxrl.rollout.samples import Sample, UnfinishedGroups
from jaxrl.rollout.settings import EngineConfig
from jaxrl.rollout.slot_pages import SlotPages
from jaxrl.rollout.slots import Slots
from jaxrl.rollout.stop_strings import StopSearch
from jaxrl.tracking.checkpoints import Checkpoints
from jaxrl.types import Completions, Prompts

# Ids of the fake model; 1 would end a response, and is never drawn before its end.
VOCABULARY, STOP = 32_000, 1
PROMPT_TOKENS = 16
# Mean response length; the longest have ten times as many. A reasoning model has about 4,000.
MEAN_TOKENS = 2000


def host_seconds(
    slots: int, *, tokens_per_dispatch: int, mean_tokens: int, stop_strings: tuple[str, ...] = ()
) -> tuple["HostTimes", int, dict[str, int]]:
    """Host seconds of each dispatch, tokens decoded, and how often tokens were turned into text."""
    config = EngineConfig(
        slots=slots,
        prefill_prompts=32,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=10 * mean_tokens,
        tokens_per_dispatch=tokens_per_dispatch,
        stop_ids=(STOP,),
        # One program, as on accelerators.
        smallest_bucket=slots,
    )
    engine = FakeEngine(config, lognormal_lengths(mean_tokens), vocabulary=VOCABULARY)
    asked = {"texts": 0, "tokens": 0}
    words = words_of(VOCABULARY)

    def decode_text(tokens: np.ndarray) -> str:
        asked["texts"] += 1
        asked["tokens"] += len(tokens)
        return "".join([words[token] for token in tokens])

    backend: Any = OfflineBackend(engine, functools.partial(map, decode_text))  # pyright: ignore[reportArgumentType]
    backend.load({})
    G = 16
    prompts = prompts_of(max(4, 3 * slots // G))
    options = SamplingOptions(G, seed=0, step=0, temperature=1.0, stop_strings=stop_strings)
    fetches: list[tuple[float, float]] = []
    with timed_fetches(fetches):
        completions = backend.generate(prompts, options)
    calls, fetched = np.array([call[:2] for call in engine.calls]), np.array(fetches)
    active = np.array([call.active for call in engine.calls])
    times = HostTimes(
        waited=calls[1:, 0] - fetched[:-1, 1],
        overlapped=fetched[:-1, 0] - calls[:-1, 1],
        busy=active[1:] > 0.8 * slots,
    )
    return times, int(completions.lengths_B.sum()), asked


def words_of(vocabulary: int) -> list[str]:
    """The text of each token: words and parts of words, and one punctuation mark in twenty."""
    rng = random.Random(0)

    def word() -> str:
        if rng.random() < 0.05:
            return rng.choice(".,:;?!\n")
        letters = rng.choices("etaoinshrdlcumwfgypbvk", k=rng.randint(1, 8))
        return rng.choice((" ", "")) + "".join(letters)

    return [word() for _ in range(vocabulary)]


class HostTimes(NamedTuple):
    """Seconds of the host for each dispatch but the first.

    Attributes:
      waited: seconds that the device waits.
      overlapped: seconds of work while the device decodes.
      busy: whether most slots were active.
    """

    waited: np.ndarray
    overlapped: np.ndarray
    busy: np.ndarray


@contextlib.contextmanager
def timed_fetches(fetches: list[tuple[float, float]]) -> Iterator[None]:
    """Notes start and end of every `Slots.decoded`."""
    fetch = Slots.decoded

    def timed(self: Slots) -> Any:
        begin = time.thread_time()
        result = fetch(self)
        fetches.append((begin, time.thread_time()))
        return result

    Slots.decoded = timed  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Slots.decoded = fetch  # pyright: ignore[reportAttributeAccessIssue]


def prompts_of(count: int) -> Prompts:
    """Prompts of a fixed length."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(2, VOCABULARY, (count, PROMPT_TOKENS)).astype(np.int32)
    return Prompts(np.arange(count), tuple(tokens), ("",) * count, ("",) * count, ("",) * count)


def completions_of(count: int, mean_tokens: int, most_tokens: int) -> Completions:
    """Sampled groups of 16 with log-normal lengths."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(mean_tokens) - 0.4, 0.9, count), most_tokens)
    tokens = tuple(rng.integers(2, VOCABULARY, int(n) + 1).astype(np.int32) for n in lengths)
    # Numbers of full precision, as a policy has: equal ones would compress to nothing.
    floats = tuple(-rng.exponential(0.5, len(t)).astype(np.float32) for t in tokens)
    return Completions(
        prompts=prompts_of(count // 16),
        num_samples=16,
        tokens=tokens,
        rollout_logprob=floats,
        entropy=tuple(np.abs(f)[::-1].copy() for f in floats),
        truncated_B=np.zeros(count, bool),
        texts=("",) * count,
    )


def report_dispatch(slots: list[int], stop_strings: tuple[str, ...] = ()) -> Iterator[str]:
    """One row of a table per number of slots."""
    yield (
        "| slots | W | dispatches | busy: waited ms, median | 99% | all: waited ms, mean | "
        "overlapped ms, mean | decodes |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for n in slots:
        for W in (16, 64):
            times, _, asked = host_seconds(
                n, tokens_per_dispatch=W, mean_tokens=MEAN_TOKENS, stop_strings=stop_strings
            )
            median, most = np.percentile(times.waited[times.busy], [50, 99]) * 1e3
            yield (
                f"| {n:,} | {W} | {len(times.waited)} | {median:.2f} | {most:.1f} | "
                f"{times.waited.mean() * 1e3:.2f} | {times.overlapped.mean() * 1e3:.2f} | "
                f"{asked['texts']:,} |"
            )


def report_hosts() -> Iterator[str]:
    """One row of a table per number of hosts, of which this process is one."""
    yield "| hosts | dispatches | waited ms, median | 99% | overlapped ms, mean |"
    yield "|---|---|---|---|---|"
    for num_hosts in (1, 16, 64, 121):
        waited, overlapped = free_seconds(num_hosts, slots=1024)
        median, most = np.percentile(waited, [50, 99]) * 1e3
        mean = overlapped.mean() * 1e3
        yield f"| {num_hosts} | {len(waited)} | {median:.2f} | {most:.1f} | {mean:.2f} |"


def free_seconds(num_hosts: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that the devices wait for the host in a dispatch with most slots in use, and of other work."""
    config = EngineConfig(
        slots=slots,
        prefill_prompts=32,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=10 * MEAN_TOKENS,
        stop_ids=(STOP,),
        smallest_bucket=slots,
        cache="paged",
    )
    engine: Any = FakeEngine(config, lognormal_lengths(MEAN_TOKENS), shards=2)
    replicas = None
    if num_hosts > 1:
        alone: Any = [types.SimpleNamespace(size=8)] * num_hosts
        processes = tuple((g,) for g in range(num_hosts))
        replicas = ReplicaGroups(processes, tuple(alone), tuple(range(num_hosts)), (0,))
    decode = functools.partial(map, lambda tokens: "")
    options = SamplingOptions(16, seed=0, step=0, temperature=1.0)
    loop = DecodeLoop(engine, {}, StopSearch(str))
    loops = DecodeLoops({0: loop}, replicas, version=0)
    others = OtherHosts(loops, num_hosts)
    made = GroupLoop(loops, SampleGroups(options, decode), options, engine)
    rollout = ContinuousRollout(made.groups, lambda *_: made, dict)
    drawn = itertools.count()
    prompt = prompts_of(1)

    def draw(places: int, unfinished: int) -> Prompts:
        some = [
            dataclasses.replace(prompt, ids_N=np.array([next(drawn)])) for _ in range(0, places, 16)
        ]
        return Prompts.concatenate(some)

    fetches: list[tuple[float, float]] = []
    beside = []
    with timed_fetches(fetches), others.told():
        for _ in range(600):
            before = others.seconds
            rollout.dispatch(options, draw)
            rollout.take_finished()
            beside.append(others.seconds - before)
        rollout.collect()
    calls, fetched = np.array([call[:2] for call in engine.calls]), np.array(fetches)
    waited = calls[1:, 0] - fetched[:-1, 1]
    overlapped = fetched[:, 0] - calls[:, 1] - np.array(beside)
    # Without the first ones, in which all slots begin.
    return waited[200:], overlapped[200:]


class OtherHosts:
    """Hosts that do what this one does: as many of their samples begin and end.

    Attributes:
      seconds: seconds that it took to make up what they tell.
    """

    def __init__(self, loops: DecodeLoops, num_hosts: int):
        self.seconds = 0.0
        self._loops, self._num_hosts = loops, num_hosts
        self._seen = 0
        self._waiting, self._running = (
            [collections.deque[int]() for _ in range(num_hosts)] for _ in range(2)
        )

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        gather = hosts.gather
        hosts.gather = self._gather  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            hosts.gather = gather  # pyright: ignore[reportAttributeAccessIssue]

    def _gather(self, function: Any) -> list[Any]:
        own = function()
        before = time.thread_time()
        for number in range(self._seen, max(self._loops._sample_of, default=-1) + 1):
            if number in self._loops._sample_of:
                self._waiting[self._loops._sample_of[number].holder].append(number)
            self._seen = number + 1
        ((_, report),) = own
        places, _, _, begun, *_ = report
        ended = report[4 + 2 * begun :]
        reports = [own]
        for g in range(1, self._num_hosts):
            told = [places, 0, 0, 0]
            for _ in range(min(begun, len(self._waiting[g]))):
                number = self._waiting[g].popleft()
                told += [number, 0]
                told[3] += 1
                self._running[g].append(number)
            # Each of one version, five integers.
            for i in range(0, min(len(ended), 5 * len(self._running[g])), 5):
                told += [self._running[g].popleft(), *ended[i + 1 : i + 5]]
            reports.append([(g, told)])
        sent = json.dumps(reports)
        self.seconds += time.thread_time() - before
        return json.loads(sent)


def report_texts() -> Iterator[str]:
    """Seconds that text takes, and those in which no other thread runs Python."""
    words = [word.strip() for word in words_of(VOCABULARY)]
    tokenizer = train_tokenizer([" ".join(words)], vocab_size=8_000)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(2, tokenizer.vocab_size, 4_000) for _ in range(512)]
    ways = {
        "one by one": lambda: list(map(tokenizer.decode, sequences)),
        "in batches of 16": lambda: [
            tokenizer.decode_batch(sequences[i : i + 16]) for i in range(0, 512, 16)
        ],
    }
    for name, decode in ways.items():
        start, of_thread = time.perf_counter(), time.thread_time()
        decode()
        seconds = [time.perf_counter() - start, time.thread_time() - of_thread]
        clock, thread = (s * 1e8 / sum(map(len, sequences)) for s in seconds)
        yield f"100 million tokens {name}: {clock:.0f} s, {thread:.0f} s of them Python in its thread"


def report_packing() -> Iterator[str]:
    """Seconds and memory of packing 512 responses for each of some hosts, on one of them."""
    for num_hosts in (1, 4, 16):
        completions = completions_of(512 * num_hosts, 4000, 20_000)
        shape = RowLimits(num_hosts, 22_528, 20_016 + 1).shape(512 * num_hosts, minibatches=16)
        for name, own_R in (
            ("own rows", np.arange(num_hosts) == 0),
            ("all rows", np.ones(num_hosts, bool)),
        ):
            seconds, gb = [], 0.0
            for _ in range(3):
                before, start = resident_gb(), time.thread_time()
                packed = pack_completions(completions, shape, own_R=own_R, shards=num_hosts)
                seconds.append(time.thread_time() - start)
                gb = resident_gb() - before
                del packed
            yield (
                f"{num_hosts} hosts, {completions.lengths_B.sum():,} tokens, {name}: {seconds[0]:.2f} s, "
                f"later {min(seconds):.2f} s, {gb:.2f} GB"
            )


def report_pages() -> Iterator[str]:
    """Milliseconds that the pages of 4,096 slots on 16 replicas cost a dispatch, and those of starts."""
    n, page, W, longest = 4096, 128, 16, 20_480
    per_slot = -(-(2048 + longest + W) // page)
    sizes = PageSizes(16, page, 1 + n // 16 * per_slot, per_slot)
    pages = SlotPages(sizes, num_slots=n, tokens_per_dispatch=W, most_response_tokens=longest)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(2, VOCABULARY, size).astype(np.int32) for size in rng.integers(200, 2048, 256)
    ]

    def start(slots: list[int]) -> float:
        before = time.process_time()
        for slot in slots:
            tokens = prompts[slot % 256]
            assert pages.take(slot, tokens, len(tokens) + longest, 0), "every sample has memory"
        return time.process_time() - before

    first, starts, dispatches = start(list(range(n))), [], []
    for _ in range(50):
        ended = rng.choice(n, 64, replace=False).tolist()
        before = time.process_time()
        pages.grow()
        pages.advance(np.full(n, W))
        dispatches.append(time.process_time() - before)
        pages.end(ended)
        starts.append(start(ended))
    yield (
        f"pages of 4,096 slots: {np.median(dispatches) * 1e3:.1f} ms a dispatch, and for 64 samples that "
        f"start {np.median(starts) * 1e3:.1f} ms more; to fill all slots {first:.2f} s"
    )


def report_unfinished() -> Iterator[str]:
    """Seconds and size of a record of unfinished groups."""
    groups = unfinished_groups(1000)
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            size = save_and_read(groups, Path(folder))
            times.append(time.perf_counter() - start)
    yield f"1,000 unfinished groups: {statistics.median(times):.1f} s to save and read, {size / 1e6:.0f} MB"


def unfinished_groups(count: int) -> UnfinishedGroups:
    """Groups of 16 samples of 2,000 tokens on average."""
    completions = completions_of(16 * count, 2000, 20_000)
    samples = []
    for i, tokens in enumerate(completions.tokens):
        sample = Sample(i // 16, i % 16, 0)
        sample.add_decoded(tokens, completions.rollout_logprob[i], completions.entropy[i], 0)
        samples.append(sample)
    return UnfinishedGroups(completions.prompts, 16, tuple(samples))


def save_and_read(groups: UnfinishedGroups, folder: Path) -> int:
    """Writes groups into a checkpoint, and reads them; returns the bytes."""
    path = folder / str(len(list(folder.iterdir())))
    checkpoints = Checkpoints(path, keep=1)
    checkpoints.prepare(None)
    checkpoints.save(1, {}, {"unfinished": groups})
    checkpoints.commit()
    checkpoints.wait()
    UnfinishedGroups.of_record(checkpoints.read_record(1)["unfinished"])
    checkpoints.close()
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def resident_gb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9


def main() -> None:
    """Prints the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 1024, 4096])
    parts = ("dispatch", "hosts", "stops", "texts", "packing", "pages", "unfinished")
    parser.add_argument("--part", choices=parts, nargs="+", default=parts)
    args = parser.parse_args()
    reports = {
        "dispatch": lambda: report_dispatch(args.slots),
        "hosts": report_hosts,
        "stops": lambda: report_dispatch(args.slots, ("\n\nQuestion:",)),
        "texts": report_texts,
        "packing": report_packing,
        "pages": report_pages,
        "unfinished": report_unfinished,
    }
    for part in args.part:
        print(f"\n## {part}\n")
        for line in reports[part]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
