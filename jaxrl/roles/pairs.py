"""Preference pairs in packed batches: the answer that was chosen, and right after it the one that was not.

    R rows   T tokens of a row   P = T // 2, more pairs than a row can hold

    one row     tokens        P P c c c P P r r .      segment_ids   1 1 1 1 1 2 2 2 2 0
                loss_mask     0 0 1 1 1 0 0 1 1 0      pair k has the segments 2k + 1 and 2k + 2

Both answers of a pair lie in one row, so a loss of pairs never looks beyond its microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.aggregation import Aggregation, Counts
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import check_options, named
from jaxrl.algos.segments import last_tokens, masked
from jaxrl.data.packing import PackedShape, plan_packing
from jaxrl.data.preferences import Answer, PreferencePair
from jaxrl.roles.objective import Objective, Stats
from jaxrl.roles.policy import PolicyOutputs
from jaxrl.roles.reward_model import ScoreOutputs
from jaxrl.types import PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairBatch(PackedBatch):
    """Packed pairs; `sequence` counts pairs.

    Attributes:
      ref_logprob: float32 [U, M, R, T], from the reference policy, for losses that have one.
      margin: float32 [U, M, R, T], how much better the chosen answer is, on its last token.
      harm: float32 [U, M, R, T], on an answer's last token 1 if it does harm, -1 if not, 0 if nobody said.
    """

    ref_logprob: jax.Array
    margin: jax.Array
    harm: jax.Array


def pack_pairs(pairs: Sequence[PreferencePair], shape: PackedShape) -> PairBatch:
    """Packs pairs on the host; responses are in the mask."""
    items = [np.concatenate([*pair.chosen, *pair.rejected]) for pair in pairs]
    packing = plan_packing([len(item) for item in items], shape)

    def pack(of_answers: Callable[[PreferencePair], Iterable[np.ndarray]], dtype) -> np.ndarray:
        return packing.pack([np.concatenate(list(of_answers(pair))) for pair in pairs], dtype)

    second = pack(lambda pair: (np.full(_length(a), i) for i, a in enumerate(pair[:2])), np.int32)
    inside = packing.segment_ids > 0
    numbers = [np.full(len(item), i) for i, item in enumerate(items)]
    fields: dict[str, Any] = {
        "tokens": packing.pack(items, np.int32),
        "positions": pack(lambda pair: (np.arange(_length(a)) for a in pair[:2]), np.int32),
        "segment_ids": np.where(inside, 2 * packing.segment_ids - 1 + second, 0).astype(np.int32),
        "sequence": np.where(inside, packing.pack(numbers, np.int32), -1).astype(np.int32),
        "loss_mask": pack(lambda pair: map(_on_response, pair[:2]), np.float32),
        "num_micro_U": packing.num_micro_U,
        "ref_logprob": np.zeros(inside.shape, np.float32),
        "margin": pack(lambda pair: map(_at_end, pair[:2], (pair.margin, 0)), np.float32),
        "harm": pack(
            lambda pair: map(_at_end, pair[:2], (pair.chosen_harm, pair.rejected_harm)), np.float32
        ),
    }
    return PairBatch(**fields)


def _length(answer: Answer) -> int:
    prompt, response = answer
    return len(prompt) + len(response)


def _on_response(answer: Answer) -> np.ndarray:
    prompt, response = answer
    return np.concatenate([np.zeros(len(prompt)), np.ones(len(response))])


def _at_end(answer: Answer, value: float) -> np.ndarray:
    return np.concatenate([np.zeros(_length(answer) - 1), [value]])


def pair_sums(x_RT: jax.Array, segment_ids_RT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of x over the chosen and over the rejected answer of each pair, [R, P] twice; 0 where none is."""
    T = x_RT.shape[1]
    sums_RS = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=T + 1))(
        x_RT, segment_ids_RT
    )
    P = T // 2
    return sums_RS[:, 1 : 2 * P : 2], sums_RS[:, 2 : 2 * P + 1 : 2]


def reward_model_objective(name: str, options: dict[str, Any]) -> Objective:
    """A loss of scores, "bradley_terry" or "cost_preference", its mean over the pairs of a minibatch.

    Raises:
      UserError: the name or an option is not known.
    """
    labels_of = named(_SCORE_LABELS, name, "loss of scores")
    function = _checked(name, options)

    def loss(outputs: ScoreOutputs, micro: PairBatch) -> tuple[jax.Array, Stats]:
        scores = pair_sums(outputs.score, micro.segment_ids)
        labels = labels_of(micro)
        return function(*scores, *labels, mask=_present(micro), **options)

    return _pair_objective(loss)


# What each loss of scores wants to know of a pair besides its scores.
_SCORE_LABELS: dict[str, Callable[[PairBatch], tuple[jax.Array, ...]]] = {
    "bradley_terry": lambda micro: pair_sums(micro.margin, micro.segment_ids)[:1],
    "cost_preference": lambda micro: pair_sums(micro.harm, micro.segment_ids),
}


def policy_pair_objective(name: str, options: dict[str, Any]) -> Objective:
    """A loss of log-probabilities, "dpo" or "ipo", its mean over the pairs of a minibatch.

    Raises:
      UserError: the name or an option is not known.
    """
    named(_POLICY_LOSSES, name, "loss of policies")
    function = _checked(name, options)

    def loss(outputs: PolicyOutputs, micro: PairBatch) -> tuple[jax.Array, Stats]:
        logprobs = pair_sums(outputs.logprob, micro.segment_ids)
        ref_logprobs = pair_sums(micro.ref_logprob, micro.segment_ids)
        return function(*logprobs, *ref_logprobs, mask=_present(micro), **options)

    return _pair_objective(loss)


_POLICY_LOSSES = {name: PREFERENCE_LOSSES[name] for name in ("dpo", "ipo")}


def _checked(name: str, options: dict[str, Any]) -> Callable[..., tuple[jax.Array, Stats]]:
    function = PREFERENCE_LOSSES[name]
    check_options(function, options, f"preference loss {name!r}")
    return function


def _present(micro: PairBatch) -> jax.Array:
    """1 for the pairs that a row holds, [R, P]."""
    return pair_sums(last_tokens(micro.loss_mask, micro.segment_ids), micro.segment_ids)[0]


def _pair_objective(
    loss: Callable[[Any, PairBatch], tuple[jax.Array, Stats]],
) -> Objective:
    """An objective from a loss of pairs, (outputs, microbatch) -> (loss, stats), [R, P] each."""

    def by_token(outputs: Any, micro: PairBatch) -> tuple[jax.Array, Stats]:
        values = loss(outputs, micro)
        return jax.tree.map(
            lambda x_RP: _on_chosen(x_RP, micro.loss_mask, micro.segment_ids), values
        )

    pair_mean = Aggregation(
        lambda mask_RT, segment_ids_RT: masked(jnp.ones_like(mask_RT), mask_RT),
        _num_pairs,
    )
    return Objective(by_token, pair_mean, stats=pair_mean)


def _num_pairs(counts: Counts) -> jax.Array:
    return counts.sequences / 2.0


def _on_chosen(x_RP: jax.Array, mask_RT: jax.Array, segment_ids_RT: jax.Array) -> jax.Array:
    """The value of each pair on the last trained token of its chosen answer, 0 elsewhere, [R, T]."""
    ends_RT = masked(last_tokens(mask_RT, segment_ids_RT), segment_ids_RT % 2)
    pair_RT = jnp.minimum(segment_ids_RT // 2, x_RP.shape[1] - 1)
    return masked(jnp.take_along_axis(x_RP, pair_RT, axis=1), ends_RT)
