"""The contract between a policy and the backends that sample from it.

    load       weights in the generation layout -> held until `unload` gives them back
    generate   prompts -> completions, every sample to its end
    resume     prompts, unfinished groups -> finished groups, unfinished groups

A backend is built with what holds for a whole run: the model, its devices, how tokens become text. One
`SamplingOptions` says how a batch is sampled. `rollout.drivers` names the backends, `jaxrl.testing` has one
without a model.

A backend is used from one thread at a time; `roles.policy.Actor` ensures that.

N prompts   G samples of each   B = N * G
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.models.decoder import Params
from jaxrl.rollout.environment import Environment
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.rollout.sampling import Truncation, untruncated
from jaxrl.types import Completions, Prompts

# Token ids to text.
DecodeText: TypeAlias = Callable[[np.ndarray], str]
# Called with each finished group, as completions of one prompt, while the others are sampled. If it returns
# True, `resume` leaves the other groups unfinished.
OnGroup: TypeAlias = Callable[[Completions], bool | None]


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How a batch is sampled.

    Attributes:
      num_samples: G.
      seed, step: with a prompt's id and the sample's index they determine the noise of each sample.
      temperature: 0 is greedy.
      truncation: which tokens may be drawn, as scalars.
      stop_strings: texts that end a response as a stop id does; tokens after one are cut off.
      environment: answers a finished turn; None ends every sample at its first stop.
      budget_tokens: most tokens that `resume` adds to a sample; 0 is no limit.
    """

    num_samples: int
    seed: int
    step: int
    temperature: float
    truncation: Truncation = dataclasses.field(default_factory=untruncated)
    stop_strings: tuple[str, ...] = ()
    environment: Environment | None = None
    budget_tokens: int = 0

    def replace(self, **changes: Any) -> SamplingOptions:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)


class RolloutBackend(Protocol):
    """Samples from a policy."""

    @property
    def mesh(self) -> Mesh:
        """The devices of its weights, laid out by `mesh.rules.GENERATE_RULES`."""
        ...

    @property
    def dtype(self) -> Any:
        """The type of its weights."""
        ...

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout and drops those it had."""
        ...

    def unload(self) -> Params | None:
        """Gives back the arrays of `load`, unchanged, and uses them no more; None if there are none."""
        ...

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Samples G responses to each prompt, all to their end.

        Args:
          prompts: N prompts.
          options: how to sample them, without a budget.
          on_group: called with each group, on this thread and in the same order on every process. Its result
            is ignored.
          expected_tokens_N: expected lengths of the responses, for example from earlier steps. The longest
            start first; by default those of the longest prompts.

        Returns:
          Completions with B = N * G samples, in the order of the prompts.

        Raises:
          UserError: a prompt is empty or too long, or this backend does not support an option.
        """
        ...

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Rollout:
        """Goes on with the groups of an earlier call, samples `prompts`, and may leave groups unfinished.

        An unfinished sample goes on under the present weights, with the keys of the step that began it. If
        the weights are the same, its tokens are those of an uninterrupted sample.

        Args:
          prompts, options: as in `generate`; a budget ends each sample after that many tokens more.
          unfinished: unfinished groups of an earlier call; they come before `prompts`.
          on_group: as in `generate`, but once it returns True nothing more is sampled.
          expected_tokens_N: as in `generate`, for `prompts` alone.

        Returns:
          The finished groups, and the others.

        Raises:
          UserError: as in `generate`, or the unfinished groups have another size.
        """
        ...

    def close(self) -> None:
        """Ends the threads and processes of the backend."""
        ...


def check_lengths(prompts: Prompts, limit: int) -> None:
    """Raises UserError for a prompt that is empty or longer than `limit` tokens."""
    for prompt_id, tokens in zip(prompts.ids_N, prompts.tokens, strict=True):
        if not 0 < len(tokens) <= limit:
            raise UserError(
                f"prompt {prompt_id} has {len(tokens)} tokens; the engine takes 1 to {limit}: "
                "raise data.max_prompt_tokens or drop the prompt"
            )


def expected_or_prompt_lengths(
    prompts: Prompts, expected_tokens_N: np.ndarray | None
) -> np.ndarray:
    """The expected lengths of responses; if they are not given, the lengths of the prompts."""
    if expected_tokens_N is None:
        return np.array([len(tokens) for tokens in prompts.tokens])
    return expected_tokens_N
