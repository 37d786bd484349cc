"""The offline backend: samples batches of prompts, for training and evaluation.

It feeds prompts to a `GroupLoop`. `generate` samples one batch to its end, those with the longest expected
responses first. `resume` also draws prompts as slots fall free, so that all slots stay busy, and
`continuous` keeps sampling while the weights are updated. After each dispatch the groups that have
just finished are handed out. `live` decodes requests that arrive while it runs.

Every decision depends only on the arguments and on tokens, which are the same on all processes of a run. So
all processes take the same decisions. In `generate` and `continuous` each group of processes that holds whole
replicas decides for its own part of the prompts (`decode_loops`).

N prompts   G samples of each   B = N * G
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

from jaxrl.mesh import hosts
from jaxrl.mesh.replica_groups import ReplicaGroups, replica_groups
from jaxrl.models.decoder import Params
from jaxrl.rollout.backend import DecodeTexts, More, OnGroup, SamplingOptions
from jaxrl.rollout.decode_loop import DecodeLoop
from jaxrl.rollout.decode_loops import DecodeLoops
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.group_loop import GroupLoop
from jaxrl.rollout.live_loop import LiveLoop
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.rollout.speculation import AnswerTexts
from jaxrl.rollout.stop_strings import StopSearch
from jaxrl.types import Completions, Prompts


class EngineBackend:
    """An engine with its weights. Base class of all backends that use our engine.

    Attributes:
      mesh, dtype, weights_dtype, metrics, samplers: see `RolloutBackend`.
    """

    def __init__(self, engine: Engine, decode_texts: DecodeTexts):
        """Args: the compiled programs; a function from token ids to texts. `load` brings the weights."""
        self.engine = engine
        self.mesh, self.dtype = engine.mesh, jnp.dtype(engine.config.dtype)
        self.weights_dtype: str = engine.config.weights_dtype
        self.metrics: Mapping[str, float] = {}
        self.samplers = tuple(range(hosts.num_processes()))
        self._decode_texts = decode_texts
        # A function and no method, which would keep the weights until Python's cycle collection.
        self._decode_text = lambda tokens: "".join(decode_texts([tokens]))
        self._stops = StopSearch(self._decode_text)
        self._params: Params | None = None

    @property
    def params(self) -> Params:
        assert self._params is not None, "load() comes first"
        return self._params

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout and drops any earlier ones.

        If `weights_dtype` is set, projections that are not in 8 bits yet are rounded to it.
        """
        self._params = self.engine.stored(params) if self.weights_dtype else params

    def unload(self) -> Params | None:
        """Returns the weights and releases them; None if none are loaded."""
        params, self._params = self._params, None
        return params

    def close(self) -> None:
        """Stateless: there is nothing to close."""


class OfflineBackend(EngineBackend):
    """Samples with our engine; `backend.RolloutBackend` documents the methods.

    With `speculate` its metrics are the tokens that a round keeps, and the fraction decoded in rounds.
    """

    def __init__(
        self,
        engine: Engine,
        decode_texts: DecodeTexts,
        groups: ReplicaGroups | None = None,
    ):
        """Args.

        engine, decode_texts: those of `EngineBackend`.
        groups: groups of processes that sample without each other; None if all sample together.
        """
        super().__init__(engine, decode_texts)
        self._groups = groups
        if groups is not None:
            self.samplers = groups.processes[groups.here[0]] if groups.here else ()
        # Engines of parts of the mesh.
        self._engine_of = functools.cache(lambda mesh: engine.of_part(mesh))
        # Answers of all calls, by group: a prompt of an earlier epoch has some.
        self._texts_of = self._no_texts()
        # Sampling that outlives a call.
        self._lasting: GroupLoop | LiveLoop | None = None

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Samples G responses to each prompt until all are finished."""
        assert not options.budget_tokens, "a budget leaves samples unfinished: call `resume`"

        running = self._loop(options, replicas=self._groups, agrees=False)
        running.add(prompts, expected_tokens_N)
        self._sample(running, on_group and (lambda group: on_group(group) and False))
        running.loops.agree(on_devices=True)
        return running.groups.rollout().completions

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        more: More | None = None,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
    ) -> Rollout:
        """Continues unfinished groups and samples prompts until `on_group` returns True.

        The prompt and the tokens of an unfinished sample are prefilled under the current weights.
        """
        running = self._loop(options, unfinished)
        running.go_on()
        running.add(prompts)
        self._sample(running, on_group, more)
        return running.groups.rollout()

    def continuous(
        self,
        options: SamplingOptions,
        unfinished: UnfinishedGroups | None = None,
        *,
        members: Sequence[int] | None = None,
    ) -> GroupLoop:
        """Sampling that outlives changes of the weights. `generate` and `resume` pause it.

        Args:
          options: sampling options.
          unfinished: groups of an earlier run; finished ones are handed out first.
          members: group of each replica in a run that is repeated (`ReplicaGroups.members`), () if it had
            none; None makes groups of this run's processes.
        """
        replicas = self._groups
        if members is not None:
            replicas = replica_groups(self.mesh, members=members) if members else None
        # Its drafts depend on its own groups alone, so that a recorded run is repeated.
        texts_of = self._no_texts()
        self._lasting = rollout = self._loop(
            options, unfinished, replicas=replicas, texts_of=texts_of
        )
        return rollout

    def live(
        self, *, version: int = 0, frozen: Mapping[str, Params] = MappingProxyType({})
    ) -> LiveLoop:
        """Sampling for requests that arrive while it runs. `generate` and `resume` pause it.

        After `unload` and `load` it goes on with `LiveLoop.renew`.

        Args:
          version: version of the weights that are loaded.
          frozen: see `LiveLoop`.
        """
        engine, params = self.engine, self.params
        self._lasting = live = LiveLoop(engine, params, self._stops, version=version, frozen=frozen)
        return live

    def close(self) -> None:
        """Ends sampling that outlives a call."""
        self._lasting = None

    def unload(self) -> Params | None:
        """Returns the weights and releases them; None if none are loaded."""
        if self._lasting is not None:
            self._lasting.release_weights()
        return super().unload()

    def _no_texts(self) -> Callable[[int], AnswerTexts]:
        """Function from a group to the texts of its answers, which are none yet."""
        longest = self.engine.config.max_response_tokens
        return functools.cache(lambda g: AnswerTexts(longest))

    def _loop(
        self,
        options: SamplingOptions,
        unfinished: UnfinishedGroups | None = None,
        *,
        replicas: ReplicaGroups | None = None,
        texts_of: Callable[[int], AnswerTexts] | None = None,
        agrees: bool = True,
    ) -> GroupLoop:
        """A loop for the unfinished groups; pauses other sampling, which has slots on the same devices."""
        if self._lasting is not None:
            self._lasting.pause()
        return GroupLoop(
            SampleGroups(options, self._decode_texts, unfinished),
            options,
            functools.partial(self._decode_loops, replicas, texts_of or self._texts_of),
            lambda: self.params,
            self.engine.config,
            agrees=agrees,
        )

    def _decode_loops(
        self, replicas: ReplicaGroups | None, texts_of: Callable[[int], AnswerTexts]
    ) -> DecodeLoops:
        """Empty decode loops, which get the weights later."""
        engines = {0: self.engine}
        if replicas is not None:
            engines = {g: self._engine_of(replicas.meshes[g]) for g in replicas.here}
        loops = {
            g: DecodeLoop(engine, None, self._stops, texts=texts_of(g))
            for g, engine in engines.items()
        }
        return DecodeLoops(loops, replicas)

    def _sample(
        self, running: GroupLoop, on_group: OnGroup | None, more: More | None = None
    ) -> None:
        """Samples until `on_group` returns True, or until nothing is left and `more` draws nothing."""
        groups, enough = running.groups, False

        def meanwhile() -> None:
            # The text of finished groups is made, and then prompts are drawn for the next free slots.
            nonlocal enough
            enough = groups.hand_out(groups.take_ended(), on_group)
            if not enough:
                running.draw(more)

        running.draw(more)
        while not enough and running.step(running.options, meanwhile):
            pass
        running.finish()
        groups.hand_out(groups.take_ended(), on_group)
        if self.engine.num_drafted:
            self.metrics = running.metrics
