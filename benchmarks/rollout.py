"""Tokens per second of jaxrl's rollout, of Transformers' `generate` and of Tunix's sampler, on one problem.

    python benchmarks/rollout.py [--tunix-python PATH] [--rounds 3] [--case even|ragged|lm]

    even        no response stops before the limit
    ragged      each token is a stop with probability 10 / 512: responses of 50 tokens on average
    lm          16 samples of a model of SmolLM2-135M's shape, in float32, bfloat16 and 8 bits

All systems are alive at once, each in a process of its own (`--system NAME SHAPE`), and take turns, so that
all see one machine; the median of the rounds counts. Each round has prompts of its own. Before the first one
the peers run once, which compiles what they compile; jaxrl runs every round once, since other lengths ask for
programs of other sizes: what is timed is a run that has gone on for a while. A peer that is not installed is
left out with a line that says so. The floor is what the matmuls and the reads of the cache would take by
themselves, at the rates that this machine reaches in the same run.

Weights are random; a response ends with any of `stops` ids, so a random model stops with about the
probability stops / vocabulary per token.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

# Of the rest each process imports what its system needs: Tunix's interpreter has no jaxrl.
import jax
import numpy as np

PADDING = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The problem. `stops` of the `vocab` ids end a response.

    `devices` is the number of simulated devices that a run of jaxrl with this model has by default on a CPU.
    """

    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1024
    vocab: int = 512
    prompt: int = 64
    response: int = 192
    prompts: int = 16
    samples: int = 8
    stops: int = 0
    devices: int = 2

    @property
    def model(self):
        from jaxrl.models.model_config import ModelConfig

        return ModelConfig(
            vocab_size=self.vocab,
            num_layers=self.layers,
            d_model=self.width,
            d_ff=self.ffn,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.width // self.heads,
            qkv_bias=False,
            qk_norm=True,
        )

    @property
    def stop_ids(self):
        return list(range(1, 1 + self.stops))

    def prompts_of(self, seed):
        rng = np.random.default_rng(seed)
        # Neither padding nor a stop.
        return rng.integers(1 + self.stops, self.vocab, (self.prompts, self.prompt))


LM = Shape(
    layers=30,
    width=576,
    heads=9,
    kv_heads=3,
    ffn=1536,
    vocab=49_152,
    prompt=32,
    response=96,
    prompts=16,
    samples=1,
    devices=1,
)


# The systems


def jaxrl_system(shape, kv_dtype, dtype="float32", weights_dtype=""):
    from jaxrl.mesh.devices import build_mesh, simulate
    from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
    from jaxrl.models.decoder import decoder_graph, init_params
    from jaxrl.rollout.backend import SamplingOptions
    from jaxrl.rollout.driver import OfflineBackend
    from jaxrl.rollout.engine import Engine
    from jaxrl.rollout.settings import EngineConfig
    from jaxrl.types import Prompts

    model = shape.model
    simulate(shape.devices)
    layout = ParallelLayout.from_config(LayoutConfig(train=f"1-1-{shape.devices}"))
    mesh = build_mesh(layout, jax.devices())
    config = EngineConfig(
        slots=shape.prompts * shape.samples,
        prefill_prompts=shape.prompts,
        max_prompt_tokens=shape.prompt,
        max_response_tokens=shape.response,
        tokens_per_dispatch=16,
        stop_ids=tuple(shape.stop_ids),
        kv_dtype=kv_dtype,
        dtype=dtype,
        weights_dtype=weights_dtype,
    )
    engine = Engine(model, decoder_graph(model)[0], mesh, config)
    backend = OfflineBackend(engine, functools.partial(map, lambda _: ""))
    params = init_params(model, jax.random.key(0))
    backend.load(jax.tree.map(lambda weight: weight.astype(dtype), params))

    def run(seed):
        tokens = tuple(row.astype(np.int32) for row in shape.prompts_of(seed))
        blank = ("",) * len(tokens)
        prompts = Prompts(np.arange(len(tokens)), tokens, blank, blank, blank)
        options = SamplingOptions(shape.samples, seed=seed, step=0, temperature=1.0)
        return backend.generate(prompts, options).lengths_B

    return run, lambda: engine.generate._cache_size()


def transformers_system(shape, cache, dtype="float32"):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width // shape.heads,
        max_position_embeddings=shape.prompt + shape.response,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PADDING,
    )
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()

    def run(seed):
        ids = torch.from_numpy(np.repeat(shape.prompts_of(seed), shape.samples, axis=0))
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=shape.response,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=PADDING,
                eos_token_id=shape.stop_ids or None,
                cache_implementation=cache,
            )
        tokens = out[:, shape.prompt :].numpy()
        stopped = np.isin(tokens, shape.stop_ids)
        return np.where(stopped.any(1), stopped.argmax(1) + 1, tokens.shape[1])

    return run, lambda: 0


class _Numbers:
    """A tokenizer for which text is token ids."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self):
        return 0

    def eos_id(self):
        return 1

    def pad_id(self):
        return PADDING


def tunix_system(shape):
    import jax.numpy as jnp
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen3 import model as qwen3

    head_dim = shape.width // shape.heads
    config = qwen3.ModelConfig(
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        embed_dim=shape.width,
        hidden_dim=shape.ffn,
        num_heads=shape.heads,
        head_dim=head_dim,
        num_kv_heads=shape.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    cache = CacheConfig(shape.prompt + shape.response, shape.layers, shape.kv_heads, head_dim)
    sampler = Sampler(qwen3.Qwen3(config, rngs=nnx.Rngs(0)), _Numbers(), cache)

    def run(seed):
        rows = shape.prompts_of(seed).repeat(shape.samples, axis=0)
        out = sampler(
            [" ".join(map(str, row)) for row in rows],
            max_generation_steps=shape.response,
            max_prompt_length=shape.prompt,
            # No id at all is no choice: one beyond the vocabulary never comes.
            eos_tokens=shape.stop_ids or [shape.vocab],
            temperature=1.0,
            top_p=1.0,
            seed=seed,
        )
        return [len(tokens) for tokens in out.tokens]

    return run, lambda: 0


SYSTEMS = {
    "jaxrl": lambda shape: jaxrl_system(shape, "float32"),
    "jaxrl, bfloat16 cache": lambda shape: jaxrl_system(shape, "bfloat16"),
    "jaxrl, int8 cache": lambda shape: jaxrl_system(shape, "int8"),
    "jaxrl, bfloat16": lambda shape: jaxrl_system(shape, "", "bfloat16"),
    "jaxrl, int8 weights": lambda shape: jaxrl_system(shape, "", "bfloat16", "int8"),
    "Transformers": lambda shape: transformers_system(shape, None),
    "Transformers, static cache": lambda shape: transformers_system(shape, "static"),
    "Transformers, bfloat16": lambda shape: transformers_system(shape, None, "bfloat16"),
    "Tunix": tunix_system,
}
CASES = {
    "even": (Shape(), [*SYSTEMS][:3] + [*SYSTEMS][5:7] + ["Tunix"]),
    "ragged": (Shape(stops=10), [*SYSTEMS][:3] + [*SYSTEMS][5:7] + ["Tunix"]),
    "lm": (LM, ["jaxrl", *[*SYSTEMS][3:6], "Transformers, bfloat16"]),
}


def serve(name, shape):
    """Samples once for each seed on stdin, and answers with a line of JSON."""
    # What libraries print goes to stderr; the answers have stdout to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, programs = SYSTEMS[name](shape)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        found = run(int(line))
        answer = {
            "tokens": int(sum(found)),
            "mean_length": float(sum(found) / len(found)),
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "programs": programs(),
        }
        print(json.dumps(answer), file=answers, flush=True)


class System:
    """A child process that samples once whenever it is asked.

    `answers` are those of the timed rounds.
    """

    def __init__(self, name, shape, python):
        self.name = name
        self.first_s = float("nan")
        self.answers = []
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        self._child = subprocess.Popen(
            [python, __file__, "--system", name, json.dumps(dataclasses.asdict(shape))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def run(self, seed):
        """Samples once; None where the system cannot."""
        try:
            self._child.stdin.write(f"{seed}\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._child.stdout.readline()
        return json.loads(line) if line else None

    def warm_up(self, rounds):
        """Compiles; False where the system cannot run."""
        found = [self.run(seed) for seed in range(rounds if self.name.startswith("jaxrl") else 1)]
        if found[-1] is not None:
            self.first_s = found[0]["wall_s"]
        return found[-1] is not None

    def median(self, seconds):
        return statistics.median(r["tokens"] / r[seconds] for r in self.answers)

    def close(self):
        self._child.stdin.close()
        self._child.wait()


# The floor


def rates(shape, rows):
    """(FLOP/s of the matmuls, bytes/s read by attention) that this machine reaches now, on these shapes."""
    x, up, down = (
        jax.numpy.ones((rows, shape.width)),
        jax.numpy.ones((shape.width, shape.ffn)),
        jax.numpy.ones((shape.ffn, shape.width)),
    )
    matmuls = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, x: (x @ up @ down) * 1e-6, x))
    flops = 40 * 4 * rows * shape.width * shape.ffn
    # More than any cache of the processor holds.
    big, weights = jax.numpy.ones((64, 1 << 20)), jax.numpy.ones(64)
    mixed = jax.jit(lambda big: weights @ big)
    return flops / fastest(matmuls, x), big.nbytes / fastest(mixed, big)


def fastest(function, *args):
    """Seconds of the fastest of a few calls."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def floor_s(shape, mean_length, num_tokens):
    """Least seconds for so many tokens, prompts included, and the rates it follows from."""
    model = shape.model
    per_token = 2 * (model.num_params - shape.vocab * shape.width) + 2 * shape.vocab * shape.width
    flops = per_token * (num_tokens + shape.prompts * shape.prompt)
    # On average a token sees the prompt and half of its response; over geometric lengths that is little less
    # than the mean length, over equal ones half of it.
    seen = shape.prompt + (mean_length if shape.stops else mean_length / 2)
    read = num_tokens * seen * model.kv_bytes_per_token(4)
    flop_rate, byte_rate = rates(shape, shape.prompts * shape.samples)
    return flops / flop_rate + read / byte_rate, flop_rate, byte_rate


def started(case, args):
    """The systems of a case that can run here; says which cannot."""
    shape, names = CASES[case]
    there = all(map(importlib.util.find_spec, ("transformers", "torch")))
    systems = []
    for name in names:
        if name == "Tunix" and not args.tunix_python:
            print("Tunix is left out: give an interpreter that has google-tunix, --tunix-python")
        elif name.startswith("Transformers") and not there:
            print(f"{name} is left out: pip install torch transformers")
        else:
            python = args.tunix_python if name == "Tunix" else sys.executable
            systems.append(System(name, shape, python))
    for system in list(systems):
        if not system.warm_up(args.rounds):
            print(f"{system.name} is left out: it ended; run it by itself to see why")
            systems.remove(system)
    return shape, systems


def compare(case, args):
    shape, systems = started(case, args)
    for seed in range(args.rounds):
        for system in systems:
            system.answers.append(system.run(seed))
    ours = next(system for system in systems if system.name == "jaxrl")
    tokens, mean = (
        statistics.mean(r[key] for r in ours.answers) for key in ("tokens", "mean_length")
    )
    least, flop_rate, byte_rate = floor_s(shape, mean, tokens)
    peers = [s.median("wall_s") for s in systems if s.name in [*SYSTEMS][5:7]]
    base = max(peers, default=float("nan"))
    print(f"{case}: {shape}\n")
    print("| system | tokens/s | of the floor | x Transformers | tokens per CPU second ", end="")
    print("| mean length | first call, s | programs |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for system in systems:
        rate = system.median("wall_s")
        print(
            f"| {system.name} | {rate:,.0f} | {rate / (tokens / least):.0%} | {rate / base:.2f} "
            f"| {system.median('cpu_s'):,.0f} "
            f"| {statistics.mean(r['mean_length'] for r in system.answers):.1f} "
            f"| {system.first_s:.1f} | {system.answers[-1]['programs'] or ''} |"
        )
        system.close()
    print(
        f"\nfloor {tokens / least:,.0f} tokens/s: {flop_rate / 1e9:.0f} GFLOP/s of matmuls, "
        f"{byte_rate / 1e9:.1f} GB/s of reads; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tunix-python", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, nargs="*", default=[*CASES])
    parser.add_argument("--system", nargs=2, metavar=("NAME", "SHAPE"))
    args = parser.parse_args()
    if args.system:
        name, shape = args.system
        serve(name, Shape(**json.loads(shape)))
    else:
        for case in args.case:
            compare(case, args)


if __name__ == "__main__":
    main()
