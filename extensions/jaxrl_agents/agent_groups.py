"""Groups of agents' samples that a step may leave unfinished: in memory, and as a checkpoint holds them.

    in memory       a session per sample; its agent goes on in its worker
    a checkpoint    the answers of an open session, by the keys of their turns; what an ended one has left

After a restart the agent of an open session begins again. Its requests have the same keys, so it gets the
answers of the checkpoint, with the versions of the weights that sampled them, until it is where it was. A
turn that was being sampled is sampled anew.

N prompts   G samples of each
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl.rollout.samples import Sample, UnfinishedGroups
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl.types import Completions, Prompts, Stretch
from jaxrl_agents.agent_rows import Talk
from jaxrl_agents.conversation import ChatModel, Conversation, History
from jaxrl_agents.sessions import Session
from jaxrl_serving.online_driver import Delta

_NO_VERSION = int(np.iinfo(np.int64).max)


@dataclasses.dataclass(eq=False)
class AgentGroup:
    """The samples of one prompt.

    Attributes:
      prompts: the prompt.
      num_samples: G.
      step: training step that started it; its sampling keys use this step until it ends.
      sessions: its G sessions; none for samples that had ended in an earlier run.
      talks: what ended sessions have left, by sample, of each role that learns.
      completions: the whole group of each of these roles, once all have ended.
    """

    prompts: Prompts
    num_samples: int
    step: int
    sessions: dict[int, Session]
    talks: dict[int, tuple[Talk, ...]]
    completions: tuple[Completions, ...] = ()

    @property
    def prompt_id(self) -> int:
        return int(self.prompts.ids_N[0])

    @property
    def whole(self) -> Completions:
        """The completions of all of these roles."""
        return Completions.concatenate(self.completions)

    @property
    def oldest_version(self) -> int:
        """That of `saved`, without copies: a step that waits asks after every dispatch."""
        found: list[int] = []
        for g in range(self.num_samples):
            if g in self.talks:
                branches = (x for talk in self.talks[g] for x in talk.branches)
                versions = [x.version[x.mask > 0] for x in branches]
                found += [int(each.min()) for each in versions if len(each)]
                continue
            session = self.sessions[g]
            with session.lock:
                deltas = [delta for deltas in session.deltas.values() for delta in deltas]
                found += session.asked.values()
            found += [int(delta.version[0]) for delta in deltas if len(delta)]
        return min(found, default=_NO_VERSION)

    def saved(self) -> UnfinishedGroups:
        """The group for a checkpoint, finished or not."""
        samples = []
        for g in range(self.num_samples):
            sample, asked = Sample(0, g, self.step), []
            sample.finished = g in self.talks
            if sample.finished:
                talks = self.talks[g]
                parts = [x[x.mask > 0] for talk in talks for x in talk.branches]
                left: dict[str, Any] = {"talks": [talk.to_plain() for talk in talks]}
            else:
                session = self.sessions[g]
                with session.lock:
                    # Copied under the lock: the server's threads go on answering.
                    answers, asked = dict(session.deltas), list(session.asked.values())
                parts = [delta for deltas in answers.values() for delta in deltas]
                left = {
                    "turns": [
                        (key, [len(delta.tokens) for delta in deltas], deltas[-1].finish)
                        for key, deltas in answers.items()
                    ]
                }
            sample.add(Stretch.concatenate(parts))
            # A request that is not answered yet counts with the version that it was asked under.
            left["oldest"] = min([*sample.sampled.version.tolist(), *asked], default=_NO_VERSION)
            sample.session = left
            samples.append(sample)
        return UnfinishedGroups(self.prompts, self.num_samples, tuple(samples))


def new_group(
    number: int,
    prompts: Prompts,
    options: SamplingOptions,
    model: ChatModel,
    history: History,
    roles: Mapping[str, str] = MappingProxyType({"": ""}),
) -> AgentGroup:
    """A group whose sessions are not open yet.

    Args:
      number: number of the group, `Session.prompt`.
      prompts: the prompt.
      options: how answers are drawn; `step` is that of the group.
      model, history: of the conversations.
      roles: roles of the agent with the names of their weights (`RolloutConfig.weights_of_roles`).
    """
    problem = {
        "prompt": prompts.texts[0],
        "answer": prompts.answers[0],
        "source": prompts.sources[0],
        "extra": dict(prompts.extras[0]),
        # Of the prompt alone, so that all samples of a group play the same game, and a resumed run too.
        "seed": zlib.crc32(f"{prompts.sources[0]} {prompts.ids_N[0]}".encode()),
    }
    sessions = {
        g: Session(
            prompt=number,
            sample=g,
            prompt_id=int(prompts.ids_N[0]),
            problem={**problem, "sample": g},
            conversations={
                role: Conversation(model, history=history, name=role, weights=weights)
                for role, weights in roles.items()
            },
            options=options,
        )
        for g in range(options.num_samples)
    }
    return AgentGroup(prompts, options.num_samples, options.step, sessions, {})


def restored_group(
    number: int,
    saved: UnfinishedGroups,
    options: SamplingOptions,
    model: ChatModel,
    history: History,
    roles: Mapping[str, str],
) -> AgentGroup:
    """A group of an earlier run, of which `saved` holds no other; its open agents begin again."""
    options = options.replace(step=saved.samples[0].step)
    group = new_group(number, saved.prompts, options, model, history, roles)
    for g, sample in enumerate(saved.samples):
        assert sample.session is not None, "a run with agents has left the group"
        if sample.finished:
            group.talks[g] = tuple(map(Talk.of_plain, sample.session["talks"]))
            del group.sessions[g]
        else:
            group.sessions[g].deltas = _deltas_of(sample)
    return group


def _deltas_of(sample: Sample) -> dict[str, tuple[Delta, ...]]:
    """The answers of an open session, by the keys of their turns."""
    sampled, at, found = sample.sampled, 0, {}
    assert sample.session is not None, "only sessions have turns"
    for key, lengths, finish in sample.session["turns"]:
        deltas = []
        for length in lengths:
            part = sampled[at : at + length]
            deltas.append(Delta(*part.arrays, 0, ("",) * length, "", ""))
            at += length
        found[key] = (*deltas[:-1], dataclasses.replace(deltas[-1], finish=finish))
    return found
