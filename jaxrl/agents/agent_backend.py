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

import collections
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.agents.agent_rows import Talk, Tally, group_of
from jaxrl.agents.conversation import ChatModel
from jaxrl.agents.endpoint import Endpoint
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import OnGroup, SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.live_loop import LiveLoop
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.types import Completions, Prompts

_LOG = logging.getLogger(__name__)

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
        self._model = ChatModel(tokenizer)
        # Errors that were logged.
        self._told: set[str] = set()
        if self._model.renderer.note and hosts.is_first():
            _LOG.warning("%s", self._model.renderer.note)
        self._live: LiveLoop | None = None
        self._endpoint: Endpoint | None = None
        # Whether any agent has come to an end.
        self._any_ended = False

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout."""
        self.inner.load(params)

    def unload(self) -> Params | None:
        """Returns the weights and releases them with the cache; None if none are loaded."""
        if self._live is not None:
            self._live.pause()
        return self.inner.unload()

    def close(self) -> None:
        """Ends workers and endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()
        self.inner.close()

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Runs G agents for each prompt, all at once, until all have ended.

        Raises:
          UserError: all agents have failed, and no agent has ever ended.
        """
        del expected_tokens_N
        live = self._turned(options.step)
        endpoint = self._started(live) if hosts.is_first() else None
        if endpoint is not None:
            endpoint.begin(options, prompts)
        # What the samples of each prompt have left, in the first process.
        left: dict[int, dict[int, Talk]] = collections.defaultdict(dict)
        tally = Tally()
        before = live.counts

        def ended() -> list[tuple[int, list[dict[str, Any]]]]:
            """Prompts of which the last sample has ended, as plain data for all processes."""
            assert endpoint is not None, "only the first process is asked"
            numbers = []
            for session in endpoint.take_done():
                tally.add(session)
                talks = left[session.prompt]
                talks[session.sample] = Talk.of(session)
                if len(talks) == options.num_samples:
                    numbers.append(session.prompt)
            return [(n, [left[n][g].to_plain() for g in sorted(left[n])]) for n in numbers]

        groups: dict[int, Completions] = {}
        while len(groups) < len(prompts):
            live.turn(wait_s=_LOOK_EVERY_S)
            for n, talks in hosts.on_first(ended):
                groups[n] = group_of(
                    prompts.take([n]),
                    [Talk.of_plain(talk) for talk in talks],
                    options.step,
                    self._tokenizer.decode_batch,
                )
                if on_group is not None:
                    on_group(groups[n])
        counts = live.counts
        share = (counts.known - before.known) / max(counts.prompt - before.prompt, 1)
        metrics = {**hosts.on_first(tally.metrics), "prompt_share_from_pages": share}
        self.metrics = {f"agent/{name}": float(value) for name, value in metrics.items()}
        self._tell(tally)
        completions = Completions.concatenate([groups[n] for n in range(len(prompts))])
        self._check(completions, tally)
        return completions

    def _check(self, completions: Completions, tally: Tally) -> None:
        """Raises UserError if no agent has ever ended. Later a whole batch may fail for want of a tool."""
        assert completions.of_agents is not None, "these are of agents"
        failed_B = completions.of_agents.failed_B
        self._any_ended |= not failed_B.all()
        if not self._any_ended:
            reasons = hosts.on_first(lambda: [error for error, _ in tally.errors.most_common(1)])
            raise UserError(
                f"all {len(failed_B)} samples of {self._settings.agent!r} have failed: {reasons[0]}; there "
                "is nothing to train before the agent works"
            )

    def _tell(self, tally: Tally) -> None:
        """Logs the most frequent error, unless it was logged before."""
        for error, _ in tally.errors.most_common(1):
            if error not in self._told:
                self._told.add(error)
                _LOG.warning("%d agents failed, most of them so: %s", tally.errors.total(), error)

    def _turned(self, version: int) -> LiveLoop:
        """The live loop, with the weights that are loaded."""
        if self._live is None:
            self._live = self.inner.live(version=version)
        else:
            self._live.renew(self.inner.params, version)
        return self._live

    def _started(self, live: LiveLoop) -> Endpoint:
        """The endpoint, which starts with the first batch."""
        if self._endpoint is None:
            sizes = self.inner.engine.config
            self._endpoint = Endpoint(live, self._settings, self._model, sizes)
        return self._endpoint
