"""The contract between a policy and the backends that sample from it.

    load       holds weights in the generation layout until `unload` returns them
    generate   prompts -> completions; every sample is finished
    resume     prompts, unfinished groups -> finished groups, unfinished groups; draws more prompts meanwhile

A backend is built once per run from the model, its devices and the tokenizer. `SamplingOptions` are given
with each call. `rollout.drivers` lists the backends. `tests/arithmetic_backend.py` is one without a model.

A backend is not thread-safe: only one thread may use it at a time. `roles.policy.Actor` ensures that.

N prompts   G samples of each   B = N * G
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.rollout.samples import Rollout, UnfinishedGroups
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl.types import Completions, Prompts

if TYPE_CHECKING:
    # Settings import this file, and the first error for a wrong setting does not wait for flax.
    from jaxrl.models.decoder import Params

# int32 [T] arrays of token ids to their texts. Any thread may call it.
DecodeTexts: TypeAlias = Callable[[Sequence[np.ndarray]], Iterable[str]]
# Called with each finished group, as the completions of one prompt, while other groups are still sampled. In
# `resume` an agent's groups of a prompt, one for each role that learns, come together.
# `resume` stops after the call that returns True and leaves the other groups unfinished.
OnGroup: TypeAlias = Callable[[Completions], bool | None]
# (places, unfinished) -> new prompts, possibly none. `places` is the number of samples that are missing to
# keep all slots busy; `unfinished` is the number of samples that wait or decode.
More: TypeAlias = Callable[[int, int], Prompts]


class RolloutBackend(Protocol):
    """Samples from a policy.

    Attributes:
      mesh: devices of the weights, laid out by `mesh.rules.GENERATE_RULES`.
      dtype: data type of the weights.
      weights_dtype: 8-bit type of the weights of projections, see `weight_types`; "" if it is `dtype`.
      metrics: metrics of the last call of `generate` or `resume`, by name; may be empty.
      samplers: the processes that sample the same prompts as this one in `generate`; in `resume` all do.
    """

    mesh: Mesh
    dtype: Any
    weights_dtype: str
    metrics: Mapping[str, float]
    samplers: tuple[int, ...]

    def load(self, params: Params) -> None:
        """Takes weights in the generation layout and drops any earlier ones."""
        ...

    def unload(self) -> Params | None:
        """Returns the arrays of `load`, unchanged, and releases them; None if none are loaded."""
        ...

    def generate(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        on_group: OnGroup | None = None,
        expected_tokens_N: np.ndarray | None = None,
    ) -> Completions:
        """Samples G responses to each prompt until all are finished.

        Args:
          prompts: N prompts.
          options: sampling options, without a budget.
          on_group: function called with each finished group, on this thread and in the same order on every
            process of `samplers`. Its result is ignored.
          expected_tokens_N: expected response length of each prompt, for example from earlier steps. The
            longest start first. None uses the lengths of the prompts.

        Returns:
          Completions with B = N * G samples, in the order of the prompts. Of those that other processes have
          sampled this one has the lengths (`Completions.with_rows`).

        Raises:
          UserError: a prompt is empty or too long, or this backend does not support an option.
        """
        ...

    def resume(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        *,
        more: More | None = None,
        unfinished: UnfinishedGroups | None = None,
        on_group: OnGroup | None = None,
    ) -> Rollout:
        """Continues unfinished groups, samples `prompts`, and may leave groups unfinished.

        An unfinished sample continues under the current weights, with the sampling keys of the step that
        started it. If the weights are unchanged, its tokens equal those of an uninterrupted sample.

        Args:
          prompts, options: as in `generate`. A budget stops each sample after that many new tokens.
          more: function that draws further prompts as slots fall free. It is called on this thread, in the
            same dispatches and with the same numbers on every process. None draws no further prompts.
          unfinished: unfinished groups of an earlier call. They start before all others, the group with the
            oldest tokens first.
          on_group: as in `generate`, but on every process, and sampling stops once it returns True.

        Returns:
          The finished and the unfinished groups.

        Raises:
          UserError: as in `generate`, or an unfinished group has another number of samples.
        """
        ...

    def close(self) -> None:
        """Stops the threads and processes of the backend."""
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
    """The expected response lengths; the prompt lengths if `expected_tokens_N` is None."""
    if expected_tokens_N is None:
        return np.array([len(tokens) for tokens in prompts.tokens])
    return expected_tokens_N
