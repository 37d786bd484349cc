"""Time to the first token of a request whose system prompt an earlier request had, with and without reuse.

    python benchmarks/prefix_reuse.py [--width 512] [--layers 8] [--system 512] [--question 24]

Two decode loops on one engine with a paged cache, as the server has them, one with reuse and one without.
Each answers the same requests, in turns, one at a time: the same system prompt and another question. Both
have answered two such requests before, so nothing is compiled. Seconds are those of a clock.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.decoder import decoder_graph, init_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sample_task import SampleTask, StartSequence
from jaxrl.rollout.samples import Sample
from jaxrl.rollout.settings import EngineConfig
from jaxrl.rollout.slots import DrawSettings
from jaxrl.rollout.stop_strings import StopSearch

VOCABULARY = 8_192


def loops_of(layers: int, width: int, prompt_tokens: int) -> dict[str, DecodeLoop]:
    """A loop without and one with reuse, over the same weights."""
    model = ModelConfig(
        vocab_size=VOCABULARY,
        num_layers=layers,
        d_model=width,
        d_ff=3 * width,
        num_heads=width // 64,
        num_kv_heads=max(1, width // 256),
        head_dim=64,
    )
    # Matrices five times as large as at the start of training: attention then decides on the token.
    params = jax.tree.map(
        lambda w: w * (5 if w.ndim > 2 else 1), init_params(model, jax.random.key(0))
    )
    config = EngineConfig(
        slots=8,
        prefill_prompts=4,
        max_prompt_tokens=prompt_tokens,
        max_response_tokens=64,
        tokens_per_dispatch=16,
        stop_ids=(1,),
        cache="paged",
    )
    mesh = build_mesh(ParallelLayout.from_config(LayoutConfig(train="1-1-1")), jax.devices()[:1])
    engine = Engine(model, decoder_graph(model)[0], mesh, config)
    return {
        name: DecodeLoop(engine, params, StopSearch(str), reuse_prefixes=reuse)
        for name, reuse in (("without", False), ("with", True))
    }


def seconds_to_first_token(loop: DecodeLoop, prompt: np.ndarray) -> tuple[float, float]:
    """Seconds of one request, and the log-probability of its token."""
    sample, settings = Sample(0, 0, 0), DrawSettings()
    task = SampleTask(sample, StartSequence(prompt), 0, settings, max_tokens=1)
    began = time.perf_counter()
    loop.add([task])
    loop.dispatch()
    seconds = time.perf_counter() - began
    assert sample.finished
    return seconds, float(sample.logprob[0])


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (
        ("layers", 8), ("width", 512), ("system", 512), ("question", 24), ("requests", 20)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    loops = loops_of(given.layers, given.width, given.system + given.question)
    rng = np.random.default_rng(1)
    system = rng.integers(2, VOCABULARY, given.system)
    seconds = {name: [] for name in loops}
    largest, found, prompt = 0.0, {}, np.zeros(0, np.int32)
    for i in range(2 + given.requests):
        question = rng.integers(2, VOCABULARY, given.question)
        prompt = np.concatenate([system, question]).astype(np.int32)
        found = {name: seconds_to_first_token(loop, prompt) for name, loop in loops.items()}
        if i < 2:
            continue
        for name, (each, _) in found.items():
            seconds[name].append(each)
        largest = max(largest, abs(found["with"][1] - found["without"][1]))
    ms = {name: 1000 * statistics.median(each) for name, each in seconds.items()}
    ratios = sorted(a / b for a, b in zip(seconds["without"], seconds["with"], strict=True))
    print(f"{given.layers} layers of width {given.width}, {given.system} + {given.question} tokens")
    for name, median in ms.items():
        print(f"{name:8} {median:7.1f} ms to the first token (median of {given.requests})")
    print(
        f"ratio {statistics.median(ratios):.1f} (median of pairs; {ratios[0]:.1f} to {ratios[-1]:.1f})"
    )
    # Would the difference show if the system prompt were ignored?
    prompt[: given.system] = np.roll(prompt[: given.system], 1)
    other = seconds_to_first_token(loops["without"], prompt)[1] - found["without"][1]
    print(f"another system prompt changes the last log-probability by {abs(other):.1e}")
    print(f"largest difference of log-probabilities {largest:.1e}")


if __name__ == "__main__":
    main()
