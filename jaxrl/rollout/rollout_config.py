"""Settings of sampling training data. `settings.py` has those of the engine."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

from jaxrl.checks import (
    MAX_VOCABULARY,
    NAME,
    PATH,
    PROSE,
    at_least,
    between,
    count,
    positive,
    settings,
    token_count,
)
from jaxrl.errors import UserError
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.sampling import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Truncation,
    truncation_of,
)
from jaxrl.rollout.settings import EngineSettings

START, FROZEN_ROLE = "start", "rollout.frozen_roles."
"""Name of the weights that a run starts from, and the beginning of the settings that may have it."""

_ROLE = re.compile(r"[\w-]+", re.ASCII)


@settings
class RolloutConfig(EngineSettings):
    """Sampling of training data."""

    # Adds "auto" to the engine's type. It is resolved to a number before the engine is built.
    slots: Annotated[int, count(1)] | Literal["auto"] = 256  # pyright: ignore
    """Maximum number of samples decoded at the same time; the engine has no more than a
    generation batch has samples. "auto" chooses as many as fit into `memory_fraction`.
    """
    memory_fraction: Annotated[float, positive(at_most=1)] = 0.9
    """Fraction of a device's memory available to sampling, including the weights of all roles."""
    num_prompts: Annotated[int, count(1)] = 32
    """Number of prompts per step."""
    num_samples: Annotated[int, count(1)] = 8
    """Number of answers per prompt, G."""
    generation_prompts: Annotated[int, count(1)] = 48
    """Number of prompts per generation batch; more than `num_prompts` over-samples."""
    max_generation_batches: Annotated[int, between(0, 10_000)] = 10
    """Maximum number of generation batches per step to find enough groups; 0 means no limit."""
    keep_groups: Literal["correctness", "score"] = "correctness"
    """Group filter of dynamic sampling. "correctness" keeps groups with both right and wrong
    answers; "score" keeps groups whose scores differ, for rewards without right and wrong.
    """
    on_shortage: Literal["error", "fill"] = "error"
    """What happens if the last generation batch leaves too few groups. "error" ends the run;
    "fill" completes the step with groups that the filter dropped.
    """
    max_response_tokens: Annotated[int, token_count(1)] = 64
    """Maximum length of a response, end-of-sequence included."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """Divisor of the logits, in sampling and in training."""
    top_k: Annotated[int, TOP_K] = 0
    top_p: Annotated[float, TOP_P] = 1.0
    min_p: Annotated[float, MIN_P] = 0.0
    min_response_tokens: Annotated[int, token_count(0)] = 0
    """Limits on the tokens that can be drawn, as in `algos.truncation.Truncation`.
    `algorithm.truncated_logprobs` says what training makes of the first three.
    """
    stop_ids: tuple[Annotated[int, at_least(0, at_most=MAX_VOCABULARY)], ...] = ()
    """Token ids that end a response, in addition to the tokenizer's own."""
    stop_strings: tuple[Annotated[str, PROSE], ...] = ()
    """Texts that end a response."""
    agent: Annotated[str, PATH] = ""
    """Function that answers a prompt by as many requests to the policy as it likes,
    "path/to/file.py:agent" or "package.module:agent" (docs/agents.md). `max_response_tokens` then
    limits a conversation after its first prompt, and the cache is paged. "" samples one response.
    """
    agent_roles: tuple[Annotated[str, NAME], ...] = ()
    """Roles of an agent in which the policy speaks, such as ("solver", "checker"), each with a
    conversation and a score of its own. Every problem gives a group for each of them that learns,
    and `num_prompts` counts groups.
    """
    frozen_roles: dict[str, Annotated[str, PATH]] = dataclasses.field(default_factory=dict)
    """Those of `agent_roles` that do not learn, with the weights that speak them: "start" for those
    that the run starts from, or a Hugging Face directory of the same model and tokenizer.
    """
    agent_host: Annotated[str, NAME] = "127.0.0.1"
    """Address at which the policy answers agents. A program in a container reaches this machine by
    another one, such as 172.17.0.1 (Docker's bridge); "0.0.0.0" is every address (docs/harnesses.md).
    """
    agent_turns: Annotated[int, count(1)] = 32
    """Maximum number of sampled turns of an agent's sample; further requests are refused."""
    agent_seconds: Annotated[float, positive(at_most=86_400)] = 600.0
    """Seconds after which an agent is late, and its sample left out."""
    history: Literal["kept", "as_template"] = "kept"
    """What a turn of an agent sees of earlier ones. "kept" is every sampled token. "as_template" is
    what the chat template makes of them, such as no earlier thinking; a turn is then a
    conversation of its own if the template changes something.
    """
    max_staleness: Annotated[int, between(0, 1000)] = 0
    """Maximum number of steps between the weights that sampled a token and the step that trains
    on it. With 0 every step samples its groups to their end. Above 0 all slots are kept busy
    (partial rollout): prompts are drawn as slots fall free, a step ends as soon as its buffer of
    groups is full, and unfinished samples continue in the next step; a group with older tokens
    is dropped. At most as many samples as a generation batch has are decoded at the same time.
    If the role "rollout" has a pool of its own, sampling goes on while the step learns.
    """
    schedule: Annotated[str, PATH] = ""
    """Folder of a run with `max_staleness` and a pool of its own for sampling, or of one with an agent
    and without `max_staleness`; this run repeats its recorded schedule. It must have the same settings,
    and gets the same samples and metrics. "" goes by the clock.
    """
    driver: Annotated[str, PATH] = "offline"
    """Backend that samples: "offline"; "jetstream" for the JetStream orchestrator (extra
    `jetstream`, one process only); or "package.module:function", a function that builds a
    backend.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.min_response_tokens >= self.max_response_tokens:
            raise ValueError(
                f"min_response_tokens {self.min_response_tokens} leaves no room below max_response_tokens "
                f"{self.max_response_tokens}, and every response would be cut; make it smaller"
            )
        if not self.max_generation_batches and self.on_shortage == "fill":
            raise ValueError(
                "on_shortage 'fill' completes a step after its last generation batch, and "
                "max_generation_batches 0 says that there is no last one; set it to 1 or more, or "
                "on_shortage to error"
            )
        if self.agent and self.schedule and self.max_staleness:
            raise ValueError(
                f"schedule {self.schedule!r} repeats steps that end with their agents, and those of agent "
                f"{self.agent!r} outlive a step (max_staleness); leave schedule out"
            )
        if roles := self.agent_roles or tuple(self.frozen_roles):
            self._check_roles(roles)
        if "" in self.stop_strings:
            raise ValueError(
                "a stop string is empty, which would end every response at once; drop it"
            )

    def _check_roles(self, roles: tuple[str, ...]) -> None:
        named = f"agent_roles {', '.join(roles)}"
        if not self.agent:
            raise ValueError(f"{named} are those of an agent, and agent is empty; set agent")
        if len({*roles}) < len(roles) or not all(map(_ROLE.fullmatch, roles)):
            raise ValueError(
                f"{named} are to be different names of letters, digits, - and _; rename one"
            )
        if unknown := ", ".join(sorted(self.frozen_roles.keys() - {*self.agent_roles})):
            raise ValueError(
                f"frozen_roles names {unknown}, and agent_roles are "
                f"{', '.join(self.agent_roles) or 'empty'}; add it there, or take it out"
            )
        if not self.learning_roles:
            raise ValueError(
                f"frozen_roles has all {named}, so nothing would learn; take one of them out"
            )

    @property
    def learning_roles(self) -> tuple[str, ...]:
        """The roles of the agent that learn; () for an agent without roles."""
        return tuple(role for role in self.agent_roles if role not in self.frozen_roles)

    @property
    def weights_of_roles(self) -> dict[str, str]:
        """Names of the weights by role, "" for one that learns. An agent without roles has the role ""."""
        return {role: self.frozen_roles.get(role, "") for role in self.agent_roles or ("",)}

    @property
    def partial(self) -> bool:
        """Whether samples may stay unfinished at the end of a step."""
        return self.max_staleness > 0

    def truncation(self, *, renormalized: bool = False) -> Truncation:
        return truncation_of(
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            min_tokens=self.min_response_tokens,
            renormalized=renormalized,
        )

    def sampling(self, seed: int, *, renormalized: bool = False) -> SamplingOptions:
        """Options of sampling training data. The step is set for each call.

        Args:
          seed: seed of the run.
          renormalized: whether log-probabilities are those of the kept tokens.
        """
        return SamplingOptions(
            num_samples=self.num_samples,
            seed=seed,
            step=0,
            temperature=self.temperature,
            truncation=self.truncation(renormalized=renormalized),
            stop_strings=tuple(self.stop_strings),
        )

    def check_roles(self, prompts_per_batch: int, sampler: str) -> None:
        """Raises UserError if a generation batch cannot have a group for each role of a problem.

        Args:
          prompts_per_batch: number of groups of a generation batch.
          sampler: `data.sampler`.
        """
        many = len(self.learning_roles)
        if many and prompts_per_batch % many:
            raise UserError(
                f"a generation batch has {prompts_per_batch} groups (rollout.num_prompts, or "
                f"generation_prompts with dynamic sampling), and every problem gives {many}, one for each "
                f"of rollout.agent_roles that learns; take a multiple of {many}"
            )
        if many and sampler:
            raise UserError(
                f"data.sampler {sampler!r} is told the groups of each problem, and rollout.agent_roles make "
                "several of one; leave one of the two out"
            )

    def check_partial(self, dataflow: str, *, dynamic_sampling: bool, runs_free: bool) -> None:
        """Raises UserError if partial rollout cannot work with the dataflow or the other settings.

        Args:
          dataflow: name of the dataflow.
          dynamic_sampling: whether a step is full once enough groups pass the filter.
          runs_free: whether sampling goes on while the step learns (`partial` with a pool of its own).
        """
        if self.partial and not dynamic_sampling and not runs_free:
            raise UserError(
                f"rollout.max_staleness ends a step when it has enough groups, and dataflow {dataflow!r} "
                "takes what it gets; use dataflow dapo, give the role rollout a pool of its own in "
                "`placement`, or set rollout.max_staleness=0"
            )
        if self.schedule and not runs_free and not self.agent:
            raise UserError(
                f"rollout.schedule {self.schedule!r} repeats a run that samples while it learns, and this "
                "run does not; leave rollout.schedule out, or set rollout.max_staleness and give the role "
                "rollout a pool of its own in `placement`"
            )

    def check_runs_free(self) -> None:
        """Raises UserError if sampling cannot go on while a step learns."""
        if self.driver != "offline":
            raise UserError(
                "rollout.max_staleness with a pool of its own for the role rollout keeps samples in their "
                f"slots while the weights change, which rollout.driver {self.driver!r} cannot; use "
                "rollout.driver='offline'"
            )
