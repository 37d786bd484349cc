"""One sampling system, ready to be timed: reads a seed, samples once, answers with a line of JSON.

    python benchmarks/rollout_systems.py SYSTEM SHAPE      (SHAPE: JSON of `rollout.py`'s Shape)

Started by `rollout.py`, which lets all systems take turns. Every system has random weights; a response ends
with any of `stops` ids, so a random model stops with about the probability stops / vocabulary per token.
"""

import functools
import json
import os
import sys
import time

PADDING = 0


def prompts_of(shape, seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    # Neither padding nor a stop.
    return rng.integers(1 + shape["stops"], shape["vocab"], (shape["prompts"], shape["prompt"]))


def stop_ids(shape):
    return list(range(1, 1 + shape["stops"]))


def jaxrl_system(shape, kv_dtype, dtype="float32", weights_dtype=""):
    import jax
    import numpy as np

    from jaxrl.mesh.devices import build_mesh, simulate
    from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
    from jaxrl.models.decoder import decoder_graph, init_params
    from jaxrl.models.model_config import ModelConfig
    from jaxrl.rollout.backend import SamplingOptions
    from jaxrl.rollout.driver import OfflineBackend
    from jaxrl.rollout.engine import Engine
    from jaxrl.rollout.settings import EngineConfig
    from jaxrl.types import Prompts

    model = ModelConfig(
        vocab_size=shape["vocab"],
        num_layers=shape["layers"],
        d_model=shape["width"],
        d_ff=shape["ffn"],
        num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["width"] // shape["heads"],
        qkv_bias=False,
        qk_norm=True,
    )
    devices = shape["devices"]
    simulate(devices)
    layout = ParallelLayout.from_config(LayoutConfig(train=f"1-1-{devices}"))
    mesh = build_mesh(layout, jax.devices())
    config = EngineConfig(
        slots=shape["prompts"] * shape["samples"],
        prefill_prompts=shape["prompts"],
        max_prompt_tokens=shape["prompt"],
        max_response_tokens=shape["response"],
        tokens_per_dispatch=16,
        stop_ids=tuple(stop_ids(shape)),
        kv_dtype=kv_dtype,
        dtype=dtype,
        weights_dtype=weights_dtype,
    )
    engine = Engine(model, decoder_graph(model)[0], mesh, config)
    backend = OfflineBackend(engine, functools.partial(map, lambda _: ""))
    params = init_params(model, jax.random.key(0))
    backend.load(jax.tree.map(lambda weight: weight.astype(dtype), params))

    def run(seed):
        tokens = tuple(row.astype(np.int32) for row in prompts_of(shape, seed))
        blank = ("",) * len(tokens)
        prompts = Prompts(np.arange(len(tokens)), tokens, blank, blank, blank)
        options = SamplingOptions(shape["samples"], seed=seed, step=0, temperature=1.0)
        return backend.generate(prompts, options).lengths_B

    def programs():
        return engine.generate._cache_size()

    return run, programs


def transformers_system(shape, cache, dtype="float32"):
    import numpy as np
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["width"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["width"] // shape["heads"],
        max_position_embeddings=shape["prompt"] + shape["response"],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PADDING,
    )
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()
    stops = stop_ids(shape)

    def run(seed):
        ids = torch.from_numpy(np.repeat(prompts_of(shape, seed), shape["samples"], axis=0))
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=shape["response"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=PADDING,
                eos_token_id=stops or None,
                cache_implementation=cache,
            )
        return lengths(out[:, shape["prompt"] :].numpy(), stops)

    return run, lambda: 0


def lengths(tokens, stops):
    import numpy as np

    stopped = np.isin(tokens, stops)
    return np.where(stopped.any(1), stopped.argmax(1) + 1, tokens.shape[1])


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

    head_dim = shape["width"] // shape["heads"]
    config = qwen3.ModelConfig(
        num_layers=shape["layers"],
        vocab_size=shape["vocab"],
        embed_dim=shape["width"],
        hidden_dim=shape["ffn"],
        num_heads=shape["heads"],
        head_dim=head_dim,
        num_kv_heads=shape["kv_heads"],
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    cache = CacheConfig(
        shape["prompt"] + shape["response"], shape["layers"], shape["kv_heads"], head_dim
    )
    sampler = Sampler(qwen3.Qwen3(config, rngs=nnx.Rngs(0)), _Numbers(), cache)

    def run(seed):
        rows = prompts_of(shape, seed).repeat(shape["samples"], axis=0)
        out = sampler(
            [" ".join(map(str, row)) for row in rows],
            max_generation_steps=shape["response"],
            max_prompt_length=shape["prompt"],
            # No id at all is no choice: one beyond the vocabulary never comes.
            eos_tokens=stop_ids(shape) or [shape["vocab"]],
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


def main():
    # What libraries print goes to stderr; the answers have stdout to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shape = json.loads(sys.argv[2])
    run, programs = SYSTEMS[sys.argv[1]](shape)
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


if __name__ == "__main__":
    main()
