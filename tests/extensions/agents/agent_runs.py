"""A backend of scripted agents around a tiny engine with a chat tokenizer."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from byte_engine import MODEL, engine_of, random_weights
from chats import chat_tokenizer

from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Prompts
from jaxrl_agents.agent_backend import AgentBackend

AGENT = f"{pathlib.Path(__file__).with_name('scripted_agents.py')}:agent"
SIZES = EngineConfig(
    slots=8,
    prefill_prompts=4,
    tokens_per_dispatch=4,
    cache="paged",
    max_prompt_tokens=255,
    max_response_tokens=64,
    context_tokens=256,
    smallest_bucket=8,
    stop_ids=(),
)
OPTIONS = SamplingOptions(num_samples=2, seed=7, step=3)


def agent_backend(seconds: float = 60.0, agent: str = AGENT, **settings) -> AgentBackend:
    """Weights are the same for all."""
    tokenizer = chat_tokenizer()
    model = dataclasses.replace(MODEL, num_tokens=tokenizer.vocab_size)
    config = RolloutConfig(agent=agent, agent_turns=8, agent_seconds=seconds, **settings)
    engine = engine_of(base=SIZES, model=model, stop_ids=tokenizer.stop_ids)
    backend = AgentBackend(OfflineBackend(engine, tokenizer.decode_batch), config, tokenizer)
    backend.load(jax.device_put(random_weights(model), jax.devices()[0]))
    return backend


def problems(kinds: Sequence[str], nap_s: float = 0.0) -> Prompts:
    """A prompt for each kind of agent, with naps of up to so many seconds between its requests."""
    N = len(kinds)
    texts = tuple(f"problem {n}" for n in range(N))
    return Prompts(
        np.arange(N) + 10,
        (np.zeros(1, np.int32),) * N,
        texts,
        ("4",) * N,
        ("tests",) * N,
        tuple({"kind": kind, "nap_s": nap_s} for kind in kinds),
    )
