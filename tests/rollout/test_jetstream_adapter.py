"""Our engine through JetStream's own contract, and JetStream's package without what comes with it."""

import importlib
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
from byte_engine import CONFIG, OPTIONS, PROMPTS, decode, encode, engine_of, loaded, weights
from extras import import_extra

import_extra("dev", "jetstream")

from jaxrl.jetstream.engine_adapter import (  # noqa: E402
    JetStreamEngine,
    JetstreamTokenizer,
)
from jaxrl.rollout.driver import OfflineBackend  # noqa: E402
from jaxrl.rollout.sampling import SamplingOptions  # noqa: E402

# Importable since our module is.
engine_api = importlib.import_module("jetstream.engine.engine_api")

ROOT = pathlib.Path(__file__).parents[2]


def test_the_contract_by_hand():
    """As any orchestrator of the contract would call it, with a padded array and no word of ours."""
    tokenizer = JetstreamTokenizer(encode, decode, CONFIG.stop_ids)
    adapter = JetStreamEngine(engine_of(), weights(), tokenizer, SamplingOptions(temperature=0.0))
    assert isinstance(adapter, engine_api.Engine)
    prompt = PROMPTS.tokens[2]
    padded = np.zeros(16, np.int32)
    padded[: len(prompt)] = prompt
    params = adapter.load_params()
    prefix = adapter.prefill(params=params, padded_tokens=padded, true_length=len(prompt))
    prefix = jax.device_put(prefix, adapter.get_prefix_destination_sharding())
    state = adapter.insert(prefix, adapter.init_decode_state(), slot=5)
    tokens = []
    for _ in range(6):
        state, result = adapter.generate(params, state)
        result.copy_to_host_async()
        slot = result.convert_to_numpy().get_result_at_slot(5)
        tokens += slot.tokens[slot.valid == 1].tolist()
        assert slot.lengths.tolist() == [len(tokens)]
        assert not result.convert_to_numpy().get_result_at_slot(4).valid.any()
    one = PROMPTS.take([2])
    ours = loaded(OfflineBackend).generate(one, OPTIONS.replace(temperature=0.0))
    assert tokens == ours.tokens[0].tolist()
    assert adapter.max_concurrent_decodes == 8
    assert adapter.build_tokenizer(adapter.get_tokenizer()).encode("ab")[1] == 2


def test_importing_it_leaves_logging_alone_and_tensorflow_away():
    code = """
import logging, sys
before = logging.getLogger().level, list(logging.getLogger().handlers)
from jaxrl.jetstream import jetstream_backend
assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before
assert not {"tensorflow", "seqio", "tensorflow_datasets"} & sys.modules.keys()
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
