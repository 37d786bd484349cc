"""Agents that never work are told before a run trains on nothing."""

import dataclasses

import numpy as np
import pytest
from byte_engine import CONFIG, MODEL
from chats import chat_tokenizer
from extras import import_extra

for package in ("pydantic", "starlette", "uvicorn", "openai"):
    import_extra("dev", package)

import jax  # noqa: E402

from jaxrl.agents.agent_backend import AgentBackend  # noqa: E402
from jaxrl.errors import UserError  # noqa: E402
from jaxrl.mesh.devices import build_mesh  # noqa: E402
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout  # noqa: E402
from jaxrl.models.decoder import decoder_graph  # noqa: E402
from jaxrl.rollout.backend import SamplingOptions  # noqa: E402
from jaxrl.rollout.driver import OfflineBackend  # noqa: E402
from jaxrl.rollout.engine import Engine  # noqa: E402
from jaxrl.rollout.rollout_config import RolloutConfig  # noqa: E402
from jaxrl.types import Prompts  # noqa: E402

AGENT = """\
def agent(client, problem):
    raise KeyError(f"no tool for {problem.prompt}")
"""


def test_agents_that_all_fail_end_the_run_with_the_reason(tmp_path, caplog):
    (tmp_path / "agents.py").write_text(AGENT)
    tokenizer = chat_tokenizer()
    model = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size, num_tokens=0)
    layout = ParallelLayout.from_config(LayoutConfig())
    engine = Engine(model, decoder_graph(model)[0], build_mesh(layout, jax.devices()[:1]), CONFIG)
    backend = AgentBackend(
        OfflineBackend(engine, tokenizer.decode_batch),
        RolloutConfig(agent=f"{tmp_path}/agents.py:agent", agent_seconds=60.0),
        tokenizer,
    )
    _, shapes, _ = decoder_graph(model)
    backend.load(jax.tree.map(lambda s: np.zeros(s.shape, np.float32), shapes))
    blank = ("",)
    prompts = Prompts(np.array([3]), (tokenizer.encode("x"),), ("sums",), blank, ("test",))
    try:
        with pytest.raises(UserError, match=r"all 2 samples of .*: KeyError: 'no tool for sums'"):
            backend.generate(prompts, SamplingOptions(num_samples=2))
        assert [r.getMessage() for r in caplog.records if "agent" in r.name] == [
            "an agent has failed: KeyError: 'no tool for sums'"
        ]
    finally:
        backend.close()
