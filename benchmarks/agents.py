"""Agents that sample for a training run: busy slots, host time of a request, prompt tokens from pages.

    python benchmarks/agents.py --agents 256 --slots 32 --turns 5 --tools_ms 500

A tiny model with random weights answers over HTTP, as in training (`jaxrl.agents`). Each agent speaks for
some turns, with a tool between two of them that takes a random time. The first batches compile; the last of
the lines counts.

    busy       slots in use over all slots, mean over the dispatches before which requests waited
    useful     tokens kept over tokens that the dispatches had room for, over the same dispatches
    host       processor time of the trainer's Python threads over requests; devices' threads and the calls
               of compiled programs do not count
    pages      prompt tokens that known pages held over all prompt tokens
    turn       time of a request, from sending to the answer, measured by the agent

With `--killed 1` every tenth agent ends its process in its third turn; `lost` are others that failed in the
first batch.
`--profile PREFIX` writes cProfile's statistics of the HTTP thread and of the main thread.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import cProfile
import dataclasses
import functools
import json
import os
import pathlib
import random
import statistics
import threading
import time
from typing import Any

TEXT = "the tool has looked and found some of it here but not all so look again at the next one"
WORDS = TEXT.split()
TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


async def agent(client, problem):
    """Some turns with tools; the score is the mean seconds of a request."""
    choose = random.Random(problem.seed * 1000 + problem.sample)
    messages = [{"role": "user", "content": problem.prompt}]
    taken = []
    number = problem.extra["number"] + problem.sample
    for turn in range(problem.extra["turns"]):
        if turn == 2 and problem.extra["killed"] and number % 10 == 3:
            os._exit(1)
        begun = time.monotonic()
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=problem.extra["tokens"]
        )
        taken.append(time.monotonic() - begun)
        await asyncio.sleep(choose.random() * problem.extra["tools_ms"] / 1000)
        said = " ".join(choose.choices(WORDS, k=problem.extra["words"]))
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": said},
        ]
    return statistics.mean(taken)


def chat_tokenizer():
    """A token for each byte or frequent pair."""
    import tokenizers

    from jaxrl.data.chat import ChatTemplate
    from jaxrl.data.tokenizer import train_tokenizer

    plain = train_tokenizer([" ".join(WORDS)] * 2, vocab_size=310)
    backend = tokenizers.Tokenizer.from_str(plain.backend.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    end = backend.token_to_id("<|im_end|>")
    return dataclasses.replace(
        plain,
        backend=backend,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        eos_id=end,
        stop_ids=(end,),
        special_tokens={"eos_token": "<|im_end|>"},
        chat_template=ChatTemplate(TEMPLATE, origin="this benchmark", special_tokens={}),
    )


class Watch:
    """Counts dispatches, and the processor time of the main thread inside compiled programs."""

    def __init__(self, live, engine):
        self.live, self.slots = live, engine.config.slots
        self.room = self.slots * engine.config.tokens_per_dispatch
        self.reset()
        loop = live._loop
        begin, finish = loop.begin, loop.finish
        full = False

        def begun():
            nonlocal full
            # What arrives while the devices work is not waiting yet.
            waiting, inside = live.load
            begin()
            busy = len(loop.scheduler.busy_slots)
            full = waiting + inside > busy
            if full:
                self.busy.append(busy / self.slots)

        def finished():
            results = finish()
            if full:
                self.useful.append(sum(len(r.tokens) for r in results) / self.room)
            self.dispatches += 1
            self.samples += sum(r.end is not None for r in results)
            return results

        loop.begin, loop.finish = begun, finished
        names = (
            "prefill extend widen reuse insert release resize with_pages generate init_decode_state"
        )
        for name in names.split():
            setattr(engine, name, self._timed(getattr(engine, name)))
        decoded = loop._slots.decoded
        loop._slots.decoded = self._timed(decoded)

    def reset(self):
        self.busy, self.useful = [], []
        self.dispatches = self.samples = 0
        self.programs_s = 0.0

    def _timed(self, function):
        @functools.wraps(function)
        def timed(*args, **options):
            before = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.programs_s += time.thread_time() - before

        return timed


def thread_seconds() -> dict[str, float]:
    """Processor time of each Python thread of this process, by its name without a number."""
    tick, found = os.sysconf("SC_CLK_TCK"), collections.defaultdict(float)
    for thread in threading.enumerate():
        # Nanoseconds, where the kernel has them; else ticks.
        path = pathlib.Path(f"/proc/self/task/{thread.native_id}")
        with contextlib.suppress(FileNotFoundError):
            try:
                seconds = int((path / "schedstat").read_text().split()[0]) / 1e9
            except (FileNotFoundError, IndexError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                seconds = (int(fields[11]) + int(fields[12])) / tick
            found[thread.name.rpartition("_")[0] or thread.name] += seconds
    return dict(found)


def main() -> None:
    """Runs the benchmark and prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("agents", 256), ("slots", 32), ("turns", 5), ("tools_ms", 500), ("tokens", 16), ("words", 12),
        ("tokens_per_dispatch", 8), ("batches", 3), ("killed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", default="")
    args = parser.parse_args()

    import jax
    import numpy as np
    import uvicorn

    if args.profile:
        serve = uvicorn.Server.run

        def profiled(*given, **options):
            profile = cProfile.Profile(time.thread_time)
            profile.runcall(serve, *given, **options)
            profile.dump_stats(f"{args.profile}-http.prof")

        uvicorn.Server.run = profiled

    from jaxrl.agents.agent_backend import AgentBackend
    from jaxrl.mesh.devices import build_mesh
    from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
    from jaxrl.models.decoder import decoder_graph
    from jaxrl.models.model_config import ModelConfig
    from jaxrl.rollout.backend import SamplingOptions
    from jaxrl.rollout.driver import OfflineBackend
    from jaxrl.rollout.engine import Engine
    from jaxrl.rollout.rollout_config import RolloutConfig
    from jaxrl.rollout.settings import EngineConfig
    from jaxrl.types import Prompts

    tokenizer = chat_tokenizer()
    model = ModelConfig(
        vocab_size=320, num_tokens=tokenizer.vocab_size, num_layers=2, d_model=64, d_ff=128,
        num_heads=4, num_kv_heads=2, head_dim=16,
    )  # fmt: skip
    graph, shapes, _ = decoder_graph(model)
    mesh = build_mesh(ParallelLayout.from_config(LayoutConfig(train="1-1-1")), jax.devices()[:1])
    sizes = EngineConfig(
        slots=args.slots, prefill_prompts=min(32, args.slots), smallest_bucket=args.slots,
        tokens_per_dispatch=args.tokens_per_dispatch, cache="paged", max_prompt_tokens=511,
        # Whole conversations stay known while tools run.
        cache_tokens=384 * args.agents,
        max_response_tokens=args.tokens, context_tokens=512, stop_ids=tokenizer.stop_ids,
    )  # fmt: skip
    engine = Engine(model, graph, mesh, sizes)
    settings = RolloutConfig(agent=f"{pathlib.Path(__file__).resolve()}:agent")
    backend = AgentBackend(OfflineBackend(engine, tokenizer.decode_batch), settings, tokenizer)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda s: (0.05 * rng.normal(size=s.shape)).astype(np.float32), shapes)
    backend.load(jax.device_put(weights, jax.devices()[0]))

    num_samples = 8
    N = args.agents // num_samples
    texts = [" ".join(rng.choice(WORDS, 40)) for _ in range(N)]
    names = ("turns", "tools_ms", "tokens", "words", "killed")
    prompts = Prompts(
        np.arange(N), (np.zeros(1, np.int32),) * N, tuple(texts), ("",) * N, ("benchmark",) * N,
        tuple({"number": n * num_samples, **{k: getattr(args, k) for k in names}} for n in range(N)),
    )  # fmt: skip
    killed_B = np.arange(args.agents) % 10 == 3 if args.killed else np.zeros(args.agents, bool)
    options = SamplingOptions(num_samples=num_samples, seed=1)
    with contextlib.closing(backend):
        begun = time.monotonic()
        first: Any = backend.generate(prompts, options)
        lost = {
            "killed": int(killed_B.sum()),
            "lost": int((first.of_agents.failed_B & ~killed_B).sum()),
        }
        print(json.dumps({"first_s": round(time.monotonic() - begun, 1), **lost}), flush=True)
        watch = Watch(backend._live, engine)
        for batch in range(args.batches):
            watch.reset()
            before, cpu = thread_seconds(), time.process_time()
            profile = cProfile.Profile(time.thread_time)
            begun = time.monotonic()
            with profile if args.profile else contextlib.nullcontext():
                done: Any = backend.generate(prompts, options.replace(step=batch + 1))
            wall = time.monotonic() - begun
            cpu = time.process_time() - cpu
            spent = {k: v - before.get(k, 0.0) for k, v in thread_seconds().items()}
            if args.profile:
                profile.dump_stats(f"{args.profile}-main.prof")
            main_s = spent.pop("MainThread") - watch.programs_s
            # asyncio's threads read requests; no other Python thread does anything.
            host = {"main": main_s, **spent}
            requests = args.agents * args.turns
            load = os.getloadavg()[0]
            print(
                json.dumps(
                    {
                        "agents": args.agents,
                        "slots": args.slots,
                        "turns": args.turns,
                        "tools_ms": args.tools_ms,
                        "wall_s": round(wall, 2),
                        "requests_per_s": round(requests / wall, 1),
                        "dispatches": watch.dispatches,
                        "dispatches_with_waiting": len(watch.busy),
                        "busy": round(statistics.mean(watch.busy or [0]), 3),
                        "useful": round(statistics.mean(watch.useful or [0]), 3),
                        "host_ms_per_request": round(1000 * sum(host.values()) / requests, 3),
                        "host_ms": {
                            k: round(1000 * v / requests, 3) for k, v in host.items() if v > 1e-3
                        },
                        "programs_ms_per_request": round(1000 * watch.programs_s / requests, 3),
                        "process_ms_per_request": round(1000 * cpu / requests, 3),
                        "pages": round(backend.metrics["agent/prompt_share_from_pages"], 3),
                        "turn_s": round(float(np.nanmean(done.of_agents.score_B)), 3),
                        "load": load,
                    }
                )
            )


if __name__ == "__main__":
    main()
