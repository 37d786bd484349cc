"""The contract between a policy and whatever samples from it.

    load       weights in the generation layout; the backend holds them until `unload` gives them back
    generate   prompts -> completions, every sample to its end
    resume     prompts and unfinished groups -> finished groups and those that are still not

What holds for a whole run is given when a backend is built: the model, its devices, how tokens become text.
How a batch is sampled travels as one `SamplingOptions` from the caller to the decoder; what belongs to a
single call is an argument. Backends are named in `rollout.drivers`; one to test with is in `jaxrl.testing`.

A backend is used from one thread at a time, which `roles.policy.Actor` sees to.

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
# Called with each group as it is finished, as completions of one prompt, while the others are sampled. It may
# do with it what it likes, and to `resume` it may say True: the others may be left.
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
      environment: what answers a finished turn; None ends every sample at its first stop.
      budget_tokens: most tokens that `resume` adds to a sample; 0 is no such limit.
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
        """Where it wants weights, laid out by `mesh.rules.GENERATE_RULES`."""
        ...

    @property
    def dtype(self) -> Any:
        """In which type it wants them."""
        ...

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout, in the place of those it has."""
        ...

    def unload(self) -> Params | None:
        """Gives back the arrays that `load` was given, unchanged and unused from now on; None without any."""
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
          options: how, without a budget.
          on_group: called with each group, on this thread and in an order that every process has alike; what
            it says changes nothing.
          expected_tokens_N: how long responses are thought to become, from earlier steps say; the longest
            start first. By default the length of the prompt is all there is to go by.

        Returns:
          Completions with B = N * G samples, in the order of the prompts.

        Raises:
          UserError: a prompt is empty or too long, or the options ask for something this backend cannot do.
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

        An unfinished sample goes on under the weights there are now, with the keys of the step that began
        it: if the weights are the same, so are its tokens.

        Args:
          prompts, options: as of `generate`; a budget ends each sample after so many tokens more.
          unfinished: groups that an earlier call has left; they come before `prompts`.
          on_group: as of `generate`; once it says True nothing more is sampled.
          expected_tokens_N: for each of `prompts`.

        Returns:
          The finished groups, and the others.

        Raises:
          UserError: as of `generate`, or the unfinished groups are of another size.
        """
        ...

    def close(self) -> None:
        """Ends what the backend has started, such as threads and processes."""
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
    """How long responses are thought to become, or where nobody knows how long the prompts are."""
    if expected_tokens_N is None:
        return np.array([len(tokens) for tokens in prompts.tokens])
    return expected_tokens_N
