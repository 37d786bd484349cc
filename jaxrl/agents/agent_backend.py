"""Samples with agents: each sample is a program that asks the policy as often as it likes.

    prompts -> sessions, one a sample -> workers run agent(client, problem)
                                             |  requests over HTTP, on loopback
                                       endpoint -> conversation -> live loop, turned here
    completions <- groups whose sessions have all ended

The first process has the workers, the endpoint and the conversations. What a session leaves it sends to the
other processes, which turn the same live loop.

N prompts   G samples of each
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents.agent_rows import Talk, group_of
from jaxrl.agents.endpoint import Endpoint
from jaxrl.agents.runner import Runner
from jaxrl.agents.sessions import Session, Sessions
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import OnGroup, SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.types import Branch, Completions, Prompts

# Seconds between two looks at the sessions while no request waits or decodes.
_LOOK_EVERY_S = 0.05


class AgentBackend:
    """A rollout backend around another one; `backend.RolloutBackend` documents the methods.

    Attributes:
      mesh, dtype, weights_dtype, metrics: see `RolloutBackend`.
    """

    def __init__(self, inner: OfflineBackend, settings: RolloutConfig, tokenizer: Tokenizer):
        """Starts nothing yet: processes and endpoint come with the first prompts.

        Args:
          inner: backend whose engine answers the requests.
          settings: settings of sampling, with an agent.
          tokenizer: tokenizer of the policy.

        Raises:
          UserError: the tokenizer has no chat template.
        """
        self.inner = inner
        self.mesh, self.dtype, self.weights_dtype = inner.mesh, inner.dtype, inner.weights_dtype
        self.metrics: Mapping[str, float] = {}
        self._settings = settings
        self._tokenizer = tokenizer
        self._running = contextlib.ExitStack()
        self._endpoint: Endpoint | None = None

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout."""
        self.inner.load(params)

    def unload(self) -> Params | None:
        """Returns the weights and releases them; None if none are loaded."""
        return self.inner.unload()

    def close(self) -> None:
        """Ends workers and endpoint."""
        self._running.close()
        self.inner.close()

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Runs G agents for each prompt, all at once, until all have ended."""
        del expected_tokens_N
        live = self.inner.live(options)
        found: dict[int, Completions] = {}
        if hosts.is_first():
            self._started().begin(live, options, prompts)
        while len(found) < len(prompts):
            live.turn(wait_s=_LOOK_EVERY_S)
            for n, talks in hosts.on_first(self._ended):
                group = group_of(
                    prompts.take([n]),
                    [_from_plain(talk) for talk in talks],
                    options.step,
                    self._tokenizer.decode_batch,
                )
                found[n] = group
                if on_group is not None:
                    on_group(group)
        if self._endpoint is not None:
            self.metrics = self._endpoint.finish()
        live.close()
        return Completions.concatenate([found[n] for n in range(len(prompts))])
