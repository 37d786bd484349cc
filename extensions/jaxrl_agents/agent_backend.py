"""Samples with agents: each sample is a program that asks the policy as often as it likes.

    prompts -> sessions, one a sample -> workers run agent(client, problem)
                                             |  requests over HTTP, on loopback
                                       endpoint -> conversation -> live loop, turned here
    completions <- groups whose sessions have all ended

The first process has the workers, the endpoint and the conversations. It sends what an ended session leaves
to the other processes, which turn the same live loop. Of open sessions it sends their number and ages.

`generate` runs agents to their end. `resume` and `continuous` leave some open, which go on with the weights
of the next step.

N prompts   G samples of each
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import More, OnGroup, SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.group_loop import FinishedGroup
from jaxrl.rollout.live_loop import LiveLoop, Order
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.types import Completions, Prompts
from jaxrl_agents.agent_groups import AgentGroup, new_group, restored_group
from jaxrl_agents.agent_rows import Talk, Tally, group_of
from jaxrl_agents.conversation import ChatModel
from jaxrl_agents.endpoint import Endpoint
from jaxrl_agents.sessions import Session

_LOG = logging.getLogger(__name__)

# Longest wait in a turn of the loop without requests: sessions end without one, too.
_LOOK_EVERY_S = 0.05


class AgentBackend:
    """A rollout backend around another one; `backend.RolloutBackend` documents the methods.

    Attributes:
      mesh, dtype, weights_dtype, metrics: see `RolloutBackend`.
      lasting: groups that outlive a call, by number, until they are taken.
      finished: numbers of those of them that have ended.
      order: order in which requests start; None for that in which they come.
    """

    order: Order | None = None

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
        self.samplers = tuple(range(hosts.num_processes()))
        self._settings = settings
        # The names of the weights of the roles, and the roles that learn.
        self._weights = settings.weights_of_roles
        self._roles = settings.learning_roles or ("",)
        self._frozen: dict[str, Params] = {}
        self._tokenizer = tokenizer
        self._model = ChatModel(tokenizer)
        # Errors that were logged.
        self._told: set[str] = set()
        if self._model.renderer.note and hosts.is_first():
            _LOG.warning("%s", self._model.renderer.note)
        self._live: LiveLoop | None = None
        self._endpoint: Endpoint | None = None
        # All groups that were not taken yet.
        self._groups: dict[int, AgentGroup] = {}
        self.lasting: dict[int, AgentGroup] = {}
        self.finished: list[int] = []
        self._numbers = itertools.count()
        # Sessions that no worker may take yet.
        self._unopened: list[Session] = []
        # The version of the weights, whether newer ones were loaded, and whether they have their own devices.
        self._version, self._is_new, self._keeps_slots = 0, False, False
        self._tally = Tally()
        # Prompt tokens, and those of known pages, when the metrics were last taken.
        self._counted = 0, 0
        # Whether any agent has come to an end.
        self._any_ended = False

    def load(self, params: Params) -> None:
        self.inner.load(params)
        self._is_new = True

    def freeze(self, name: str, params: Params) -> None:
        """Takes the weights of frozen roles, in the generation layout, before the first prompts."""
        engine = self.inner.engine
        self._frozen[name] = engine.stored(params) if self.weights_dtype else params

    def unload(self) -> Params | None:
        """Returns the weights and releases them; None if none are loaded.

        Releases the cache too, unless sampling goes on while the weights change.
        """
        if self._live is not None and not self._keeps_slots:
            self._live.pause()
        return self.inner.unload()

    def close(self) -> None:
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
        # Groups that outlive a call go on during this one. The step of an evaluation is no version of theirs.
        self._renew(self._version + self._is_new if self.lasting else options.step)
        own = self._open(prompts, options)
        missing = set(own)
        while missing:
            for n in self._turn():
                if n in missing:
                    missing.remove(n)
                    if on_group is not None:
                        for group in self._groups[n].completions:
                            on_group(group)
        completions = Completions.concatenate([self._groups.pop(n).whole for n in own])
        self.metrics = self.take_metrics()
        return completions

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        more: More | None = None,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
    ) -> Rollout:
        """Runs agents until `on_group` returns True. The others stay open for the next call.

        Slots do not limit the number of agents: `more` says how many there are at the same time.

        Raises:
          UserError: as `generate`.
        """
        self.keep(unfinished, options)
        self.lasting |= {n: self._groups[n] for n in self._open(prompts, options)}
        taken: list[Completions] = []
        enough = False
        while not enough and self.advance(options, more):
            for group in self.take_finished():
                taken.append(group.whole)
                enough |= on_group is not None and bool(on_group(taken[-1]))
        self.metrics = self.take_metrics()
        return Rollout(
            Completions.concatenate(taken),
            tuple(range(len(taken) * len(self._roles))),
            self.unfinished(options),
        )

    def continuous(
        self,
        options: SamplingOptions,
        unfinished: UnfinishedGroups | None = None,
        *,
        members: Sequence[int] | None = None,
    ) -> AgentRollout:
        """Sampling that outlives changes of the weights; see `OfflineBackend.continuous`."""
        del members  # all processes sample the sessions together
        self._keeps_slots = True
        self.keep(unfinished, options)
        return AgentRollout(self, options)

    # Groups that outlive a call

    def keep(self, unfinished: UnfinishedGroups | None, options: SamplingOptions) -> None:
        """Keeps these groups and drops all others. Agents of an earlier run begin again."""
        known = {group.prompt_id: n for n, group in self.lasting.items()}
        wanted = [] if unfinished is None else unfinished.prompts.ids_N.tolist()
        for prompt_id in known.keys() - set(wanted):
            self.drop(known[prompt_id])
        for i, prompt_id in enumerate(wanted):
            if prompt_id in known:
                continue
            assert unfinished is not None, "there are wanted ones"
            n, saved = next(self._numbers), unfinished.take([i])
            history, roles = self._settings.history, self._weights
            group = restored_group(n, saved, options, self._model, history, roles)
            self._groups[n] = self.lasting[n] = group
            self._unopened += group.sessions.values()
            # All of its samples had ended before the restart.
            if not group.sessions:
                self._complete(n)

    def advance(self, options: SamplingOptions, more: More | None) -> bool:
        """Draws prompts, and decodes once unless groups have finished; returns whether there is any group."""
        self._renew(options.step)
        if more is not None:
            groups = self.lasting.values()
            unfinished = hosts.on_first(lambda: sum(g.num_samples - len(g.talks) for g in groups))
            # Agents wait for tools besides slots, so slots do not limit their number.
            opened = self._open(more(sys.maxsize, unfinished), options)
            self.lasting |= {n: self._groups[n] for n in opened}
        if self.lasting and not self.finished:
            self._turn()
        return bool(self.lasting)

    def take_finished(self) -> list[AgentGroup]:
        """The groups that have finished since the last call, in that order."""
        taken, self.finished = self.finished, []
        for n in taken:
            del self.lasting[n]
        return [self._groups.pop(n) for n in taken]

    def drop(self, n: int) -> None:
        """Drops a group, and ends its sessions."""
        group = self._groups.pop(n)
        del self.lasting[n]
        self._unopened = [session for session in self._unopened if session.prompt != n]
        if n in self.finished:
            self.finished.remove(n)
        if self._endpoint is not None:
            for session in group.sessions.values():
                self._endpoint.sessions.stop(session, "was dropped")

    def unfinished(self, options: SamplingOptions) -> UnfinishedGroups:
        """A copy of the groups that were not taken yet; other processes than the first have ages alone."""
        none = UnfinishedGroups(Prompts.concatenate([]), options.num_samples, ())
        copy = UnfinishedGroups.concatenate(
            [none, *(group.saved() for group in self.lasting.values())]
        )
        ages = hosts.on_first(lambda: [sample.oldest_version for sample in copy.samples])
        for sample, age in zip(copy.samples, ages, strict=True):
            assert sample.session is not None, "all samples are of agents"
            sample.session["oldest"] = age
        return copy

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the sessions that have ended since the last call. Stops the clock of open sessions.

        Raises:
          UserError: all of them have failed, and no agent has ever ended.
        """
        if self._live is None:
            return {}  # all groups are of an earlier run
        counts, (prompt, known) = self._live.counts, self._counted
        self._counted = counts.prompt, counts.known
        metrics = hosts.on_first(self._metrics_of_first)
        metrics["prompt_share_from_pages"] = (counts.known - known) / max(counts.prompt - prompt, 1)
        return {f"agent/{name}": float(value) for name, value in metrics.items()}

    def _metrics_of_first(self) -> dict[str, float]:
        assert self._endpoint is not None, "the first process has it"
        tally, self._tally = self._tally, Tally()
        self._endpoint.sessions.hold()
        for error, _ in tally.errors.most_common(1):
            if error not in self._told:
                self._told.add(error)
                text = "\n".join(filter(None, [error, tally.tracebacks[error].rstrip()]))
                _LOG.warning("%d agents failed, most of them so: %s", tally.errors.total(), text)
        self._any_ended |= tally.failed < tally.total
        # Only before any agent has ended: later a whole batch may fail because a tool is away.
        if tally.total and not self._any_ended:
            raise UserError(
                f"all {tally.total} samples of {self._settings.agent!r} have failed: "
                f"{tally.errors.most_common(1)[0][0]}; there is nothing to train before the agent works"
            )
        return tally.metrics()

    # The loop

    def _open(self, prompts: Prompts, options: SamplingOptions) -> list[int]:
        """Makes a group for each prompt, whose sessions open with the next turn; returns their numbers."""
        made = []
        for i in range(len(prompts)):
            n, prompt = next(self._numbers), prompts.take([i])
            history, roles = self._settings.history, self._weights
            group = new_group(n, prompt, options, self._model, history, roles)
            self._groups[n] = group
            self._unopened += group.sessions.values()
            made.append(n)
        return made

    def _renew(self, version: int) -> None:
        """Makes the live loop decode with the loaded weights."""
        if self._live is None:
            self._live = self.inner.live(version=version, frozen=self._frozen)
        # Also for equal weights: a batch that reused pages of the one before it would round differently.
        elif self._is_new or version != self._version or not self.lasting:
            self._live.renew(self.inner.params, version)
        if hosts.is_first():
            self._live.order = self.order
        self._version, self._is_new = version, False

    def _turn(self) -> list[int]:
        """Decodes up to W tokens in every slot; returns the groups that have ended."""
        assert self._live is not None, "`_renew` comes first"
        if hosts.is_first():
            if self._endpoint is None:
                sizes = self.inner.engine.config
                self._endpoint = Endpoint(self._live, self._settings, self._model, sizes)
            self._endpoint.go_on(self._unopened, self._version)
        self._unopened = []
        self._live.turn(wait_s=_LOOK_EVERY_S)
        # Only the first process has sessions; all complete the same groups, in the same order.
        ended = hosts.on_first(self._ended)
        for n, talks in ended:
            self._groups[n].talks = {
                g: tuple(map(Talk.of_plain, of_roles)) for g, of_roles in enumerate(talks)
            }
            self._complete(n)
        return [n for n, _ in ended]

    def _ended(self) -> list[tuple[int, list[list[dict[str, Any]]]]]:
        """Groups of which the last session has ended, as plain data for all processes."""
        assert self._endpoint is not None, "only the first process is asked"
        numbers = []
        for session in self._endpoint.take_done():
            group = self._groups.get(session.prompt)
            if group is None:
                continue  # it was dropped
            talks = group.talks[session.sample] = Talk.all_of(session)
            self._tally.add(session, talks)
            if len(group.talks) == group.num_samples:
                numbers.append(session.prompt)
        found = [(n, self._groups[n].talks) for n in numbers]
        return [(n, [[x.to_plain() for x in some[g]] for g in sorted(some)]) for n, some in found]

    def _complete(self, n: int) -> None:
        """Makes the completions of a group whose sessions have all ended."""
        group = self._groups[n]
        # By sample, not by the order in which the agents have ended.
        talks = [group.talks[g] for g in sorted(group.talks)]
        decode = self._tokenizer.decode_batch
        group.completions = tuple(
            group_of(group.prompts, of_role, group.step, decode, role)
            for role, of_role in zip(self._roles, zip(*talks, strict=True), strict=True)
        )
        if n in self.lasting:
            self.finished.append(n)


class AgentRollout:
    """Agents that go on while the weights change; the interface of `group_loop.GroupLoop`."""

    members = ()

    def __init__(self, backend: AgentBackend, options: SamplingOptions):
        """Args: the backend, and any sampling options of the run."""
        self._backend = backend
        self._options = options

    @property
    def num_unfinished(self) -> int:
        return len(self._backend.lasting) - len(self._backend.finished)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the sessions that have ended since they were last read."""
        return self._backend.take_metrics()

    def dispatch(self, options: SamplingOptions, more: More) -> bool:
        """Decodes once; returns False if there is no group and none was drawn."""
        return self._backend.advance(options, more)

    def take_finished(self) -> list[FinishedGroup]:
        """The groups that have finished since the last call, in that order."""
        return [FinishedGroup(g.whole, g.saved()) for g in self._backend.take_finished()]

    def drop_older(self, version: int) -> int:
        """Drops unfinished groups with a token of a version before `version`; returns their number."""
        old = [n for n, oldest in self.oldest_versions().items() if oldest < version]
        for n in old:
            self._backend.drop(n)
        return len(old)

    def oldest_versions(self) -> dict[int, int]:
        """The policy version of the oldest token of each unfinished group, by number."""
        groups, finished = self._backend.lasting, self._backend.finished
        found = [(n, group) for n, group in groups.items() if n not in finished]
        ages = hosts.on_first(lambda: [group.oldest_version for _, group in found])
        return {n: age for (n, _), age in zip(found, ages, strict=True)}

    def unfinished(self) -> UnfinishedGroups:
        """A copy of the groups in progress."""
        return self._backend.unfinished(self._options)

    def finish(self) -> None:
        """Does nothing: agents leave no dispatch in progress."""
