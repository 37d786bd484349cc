"""Advantages of a packed batch: from the reward of each sequence to the advantage of each token.

One program covers the whole step, because baselines and deviations look across minibatches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.advantages import ADVANTAGES
from jaxrl.algos.kl import KL_ESTIMATES, mean_by_sequence, penalized_reward
from jaxrl.algos.moments import whiten
from jaxrl.algos.registry import check_options, inputs_of, lookup, options_of
from jaxrl.algos.segments import last_tokens, masked, to_sequences, to_tokens
from jaxrl.errors import UserError
from jaxrl.types import TrainBatch

# The moving average of earlier steps' rewards.
AVERAGE = "average_reward"
# Arrays that every dataflow can give to an estimator.
ALWAYS = frozenset(
    [
        "score_B",
        "score_BK",
        "weight_K",
        "group_B",
        "length_B",
        "reward_BT",
        "mask_BT",
        "segment_ids_BT",
        "logprob_BT",
        "group_BT",
        AVERAGE,
    ]
)
# Arrays from a critic, from a greedy answer, and from the pass that recomputes log-probabilities.
VALUES, BASELINE, SUM_PI_SQUARED = "value_BT", "baseline_BT", "sum_pi_squared_BT"
# An array that the program passes as a keyword, to estimators that have it among their settings.
IMPORTANCE_WEIGHT = "importance_weight_BT"
_GIVEN = ("num_groups", IMPORTANCE_WEIGHT)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabularyBatch(TrainBatch):
    """A batch for estimators that use the probabilities of the whole vocabulary.

    Attributes:
      sum_pi_squared: float32 [U, M, R, T], sum over the vocabulary of the squared probabilities of the old
        policy.
    """

    sum_pi_squared: jax.Array


@dataclasses.dataclass(frozen=True)
class Estimator:
    """An advantage estimator of `algos.advantages`, with the KL penalty in the reward.

    Attributes:
      name: one of `ADVANTAGES`, or the path of a function of the same form.
      options: keyword arguments of that function.
      whiten: scale the advantages to mean 0 and deviation 1 over the trained tokens of the step.
      kl_estimate: estimate of the KL penalty in the reward, one of `KL_ESTIMATES`.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    whiten: bool = False
    kl_estimate: str = "k1"

    @staticmethod
    def of(
        name: str, options: Mapping[str, Any], *, whiten: bool = False, kl_estimate: str = "k1"
    ) -> Estimator:
        """Builds an estimator and checks its names and options.

        Raises:
          UserError: a name or an option is unknown.
        """
        estimator = Estimator(name, tuple(sorted(options.items())), whiten, kl_estimate)
        check_options(estimator.function, options, f"advantage {name!r}", given=_GIVEN)
        lookup(KL_ESTIMATES, kl_estimate, "KL estimate")
        return estimator

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the arrays that the estimator needs."""
        return frozenset(inputs_of(self.function))

    @property
    def function(self) -> Callable[..., Any]:
        return lookup(ADVANTAGES, self.name, "advantage")

    def check(
        self, dataflow: str, computed: frozenset[str], *, num_samples: int, bypass: bool
    ) -> None:
        """Raises UserError if the estimator does not go with the run.

        Args:
          dataflow: name of the dataflow.
          computed: arrays that the dataflow computes for it.
          num_samples: number of answers to a prompt.
          bypass: `algorithm.correction.bypass`.
        """
        # The recomputed log-probabilities bring the squared ones with them, whatever the dataflow.
        missing = sorted(self.inputs - ALWAYS - computed - {SUM_PI_SQUARED})
        if missing:
            raise UserError(
                f"advantage {self.name!r} needs {', '.join(missing)}, which dataflow {dataflow!r} does not "
                "compute; use another estimator, or a dataflow with a critic (ppo), a greedy answer (remax) "
                "or the arrays that it takes (gives=... of @dataflow)"
            )
        if not computed <= self.inputs:
            users = [name for name, f in ADVANTAGES.items() if computed <= set(inputs_of(f))]
            raise UserError(
                f"dataflow {dataflow!r} computes {', '.join(sorted(computed))}, which advantage "
                f"{self.name!r} does not use; set algorithm.advantage to "
                f"{' or '.join(users) or 'one that does'}, or use dataflow grpo"
            )
        if not self.inputs.isdisjoint({"group_B", "group_BT"}) and num_samples < 2:
            raise UserError(
                f"rollout.num_samples {num_samples}: advantage {self.name!r} compares the answers to a "
                "prompt with each other; use at least 2 answers to each prompt"
            )
        if SUM_PI_SQUARED in self.inputs and bypass:
            raise UserError(
                f"advantage {self.name!r} looks at the trainer's probabilities of the whole vocabulary, and "
                "algorithm.correction.bypass saves the forward pass that has them; set it to False"
            )

    def __call__(
        self,
        batch: TrainBatch,
        score_B: np.ndarray,
        group_B: np.ndarray,
        *,
        num_groups: int,
        value: jax.Array | None = None,
        baseline_B: np.ndarray | None = None,
        score_BK: np.ndarray | None = None,
        weight_K: np.ndarray | None = None,
        average_reward: float | None = None,
        arrays: Mapping[str, jax.Array] | None = None,
        kl_coef: float = 0.0,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The advantage and return of every token.

        Args:
          batch: B sequences with log-probabilities of the actor and, if `kl_coef` is not 0, of the reference;
            a `VocabularyBatch` if the estimator needs squared probabilities.
          score_B: float32, reward of each sequence.
          group_B: int32, prompt number of each sequence.
          num_groups: number of prompts.
          value: float32 [U, M, R, T], values of a critic; None if the estimator does not use them.
          baseline_B: float32, reward of the greedy answer; None if not used.
          score_BK, weight_K: float32, components of the reward and their weights; None if not used.
          average_reward: moving average of the rewards of earlier steps; None if not used.
          arrays: further inputs of the estimator by name, [U, M, R, T].
          kl_coef: coefficient of the KL penalty.

        Returns:
          (advantage, return, kl): [U, M, R, T] twice, and the mean over sequences of their mean KL estimate.
        """
        T = batch.tokens.shape[-1]
        by_token = {name: x.reshape(-1, T) for name, x in (arrays or {}).items()}
        given = {"score_BK": score_BK, "weight_K": weight_K, **by_token}
        if average_reward is not None:
            given[AVERAGE] = np.float32(average_reward)
        # The coefficient is an argument of the program: an adaptive one compiles nothing.
        return _estimate(
            self, num_groups, batch, score_B, group_B, value, baseline_B, given, np.float32(kl_coef)
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _estimate(estimator, num_groups, batch, score_B, group_B, value, baseline_B, given, kl_coef):
    T = batch.tokens.shape[-1]
    rows = jax.tree.map(lambda x: x.reshape(-1, T) if x.ndim == 4 else x, batch)
    mask_BT, segment_ids_BT = rows.loss_mask, rows.segment_ids
    # Further conversations of a sample count as its own: `types.PackedBatch.sequence`.
    sequence_BT = jnp.where(rows.sequence < 0, -1, rows.sequence % len(score_B))
    # Masked before the estimate, whose exponential could overflow on tokens that do not count.
    kl_BT = KL_ESTIMATES[estimator.kl_estimate](
        masked(rows.old_logprob, mask_BT), masked(rows.ref_logprob, mask_BT)
    )
    # The score of a sequence sits on its last trained token.
    end_BT = masked(to_tokens(score_B, sequence_BT), last_tokens(mask_BT, segment_ids_BT))
    reward_BT = penalized_reward(end_BT, kl_BT, mask_BT, coef=kl_coef)

    def by_sequence(x_BT: jax.Array) -> jax.Array:
        return to_sequences(x_BT, mask_BT, sequence_BT, num_sequences=len(score_B))

    inputs = {
        # Score plus KL penalty. Not a sum of reward_BT: a sequence without a trained token would lose its
        # score, which the baseline of its group needs.
        "score_B": score_B + by_sequence(reward_BT - end_BT),
        "group_B": group_B,
        "length_B": by_sequence(jnp.ones_like(mask_BT)),
        "reward_BT": reward_BT,
        "mask_BT": mask_BT,
        "segment_ids_BT": segment_ids_BT,
        "logprob_BT": rows.old_logprob,
        "group_BT": to_tokens(group_B, sequence_BT, absent=-1),
        IMPORTANCE_WEIGHT: rows.weight,
        **given,
    }
    if isinstance(rows, VocabularyBatch):
        inputs[SUM_PI_SQUARED] = rows.sum_pi_squared
    if value is not None:
        inputs[VALUES] = value.reshape(-1, T)
    if baseline_B is not None:
        inputs[BASELINE] = to_tokens(baseline_B, sequence_BT)
    function, options = estimator.function, dict(estimator.options)
    further = {"num_groups": num_groups, IMPORTANCE_WEIGHT: inputs[IMPORTANCE_WEIGHT]}
    options |= {name: x for name, x in further.items() if name in options_of(function)}
    advantage_BT = function(*(inputs[name] for name in inputs_of(function)), **options)
    if isinstance(advantage_BT, tuple):
        advantage_BT, return_BT = advantage_BT
    else:
        advantage_BT = return_BT = masked(to_tokens(advantage_BT, sequence_BT), mask_BT)
    if estimator.whiten:
        advantage_BT = whiten(advantage_BT, mask_BT)
    total, count = mean_by_sequence(kl_BT, mask_BT, segment_ids_BT)
    shape = batch.tokens.shape
    return advantage_BT.reshape(shape), return_BT.reshape(shape), total / jnp.maximum(count, 1.0)
