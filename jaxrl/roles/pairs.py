"""Preference pairs in packed batches: the chosen answer, directly followed by the rejected one.

    R rows   T tokens of a row   P = T // 2, more pairs than a row can hold

    one row     tokens        P P c c c P P r r .      segment_ids   1 1 1 1 1 2 2 2 2 0
                loss_mask     0 0 1 1 1 0 0 1 1 0      pair k has the segments 2k + 1 and 2k + 2

Both answers of a pair lie in one row, so the loss of a pair never needs another microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algos.aggregation import Aggregation, token_mean
from jaxrl.algos.preference_losses import POLICY_INPUTS, PREFERENCE_LOSSES, SCORE_INPUTS, on_pairs
from jaxrl.algos.registry import check_inputs, check_options, lookup
from jaxrl.algos.segments import last_tokens, masked
from jaxrl.data.preferences import Answer, PreferencePair
from jaxrl.roles.losses import Objective, PolicyOutputs, Stats
from jaxrl.roles.packing import PackedShape, Packing, Segments, plan_packing
from jaxrl.roles.scores import ScoreOutputs
from jaxrl.types import PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairBatch(PackedBatch):
    """Packed pairs; `sequence` is the index of the pair.

    Attributes:
      ref_logprob: float32 [U, M, R, T], log-probabilities of the reference policy; 0 if the loss has none.
      margin: float32 [U, M, R, T], strength of the preference, on the last token of the chosen answer.
      harm: float32 [U, M, R, T], on the last token of an answer: 1 if harmful, -1 if harmless, 0 without a
        label.
    """

    ref_logprob: jax.Array
    margin: jax.Array
    harm: jax.Array


def pack_pairs(
    pairs: Sequence[PreferencePair],
    shape: PackedShape,
    *,
    shards: int = 1,
    own_R: np.ndarray | None = None,
) -> tuple[PairBatch, Packing]:
    """Packs pairs on the host; both answers of a pair share a row. The mask covers responses.

    Args:
      pairs: the pairs.
      shape: [U, M, R, T] of the batch.
      shards, own_R: see `plan_packing`.
    """
    # One item for both answers, so that the packing cannot part them.
    items = [np.concatenate([*pair.chosen, *pair.rejected]) for pair in pairs]
    packing = plan_packing([len(item) for item in items], shape, shards=shards, own_R=own_R)
    # Each pair is one segment, since none shares a prefix; number k of a row becomes 2k - 1 and 2k.
    whole = packing.segments
    sizes_2K = np.array([list(map(_length, pair[:2])) for pair in pairs]).T[:, whole.sequence]
    both = functools.partial(np.tile, reps=2)
    answers = Segments(
        starts=np.append(whole.starts, whole.starts + sizes_2K[0]),
        first=both(whole.first),
        stop=sizes_2K.reshape(-1),
        number=np.append(2 * whole.number - 1, 2 * whole.number),
        prefix=both(whole.prefix),
        sequence=both(whole.sequence),
    )
    packing = dataclasses.replace(packing, segments=answers)

    def pack(of_answers: Callable[[PreferencePair], Iterable[np.ndarray]], dtype) -> np.ndarray:
        return packing.pack([np.concatenate(list(of_answers(pair))) for pair in pairs], dtype)

    fields: dict[str, Any] = {
        **packing.fields(),
        "tokens": packing.pack(items, np.int32),
        "loss_mask": pack(
            lambda pair: (np.repeat([0, 1], [len(x) for x in answer]) for answer in pair[:2]),
            np.float32,
        ),
        "ref_logprob": packing.filled(0, np.float32),
        "margin": pack(lambda pair: map(_at_end, pair[:2], (pair.margin, 0)), np.float32),
        "harm": pack(
            lambda pair: map(_at_end, pair[:2], (pair.chosen_harm, pair.rejected_harm)), np.float32
        ),
    }
    return PairBatch(**fields), packing


def _length(answer: Answer) -> int:
    prompt, response = answer
    return len(prompt) + len(response)


def _at_end(answer: Answer, value: float) -> np.ndarray:
    return np.concatenate([np.zeros(_length(answer) - 1), [value]])


def pair_sums(x_RT: jax.Array, segment_ids_RT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of x over the chosen and the rejected answer of each pair, [R, P] each; 0 without a pair."""
    T = x_RT.shape[1]
    sums_RS = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=T + 1))(
        x_RT, segment_ids_RT
    )
    P = T // 2
    # Segment 0 is padding.
    return sums_RS[:, 1 : 2 * P : 2], sums_RS[:, 2 : 2 * P + 1 : 2]


def reward_model_objective(name: str, options: dict[str, Any]) -> Objective:
    """The objective of a score loss such as "bradley_terry" or "cost_preference", a mean over pairs.

    Raises:
      UserError: the name or an option is unknown, or the loss needs arrays that scores do not provide.
    """

    def inputs(outputs: ScoreOutputs, micro: PairBatch) -> dict[str, jax.Array]:
        scores = pair_sums(outputs.score, micro.segment_ids)
        return {
            **_of_both("score", scores),
            **_of_both("cost", scores),
            **_of_both("harm", pair_sums(micro.harm, micro.segment_ids)),
            "margin": pair_sums(micro.margin, micro.segment_ids)[0],
        }

    return _pair_objective(name, options, inputs, SCORE_INPUTS)


def policy_pair_objective(name: str, options: dict[str, Any]) -> Objective:
    """The objective of a log-probability loss such as "dpo" or "ipo", a mean over pairs.

    Raises:
      UserError: the name or an option is unknown, or the loss needs arrays that a policy does not provide.
    """

    def inputs(outputs: PolicyOutputs, micro: PairBatch) -> dict[str, jax.Array]:
        return {
            **_of_both("logprob", pair_sums(outputs.logprob, micro.segment_ids)),
            **_of_both("ref_logprob", pair_sums(micro.ref_logprob, micro.segment_ids)),
        }

    return _pair_objective(name, options, inputs, POLICY_INPUTS)


def _of_both(what: str, values: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    return {f"chosen_{what}": values[0], f"rejected_{what}": values[1]}


def _pair_objective(
    name: str,
    options: dict[str, Any],
    inputs: Callable[[Any, PairBatch], dict[str, jax.Array]],
    names: Sequence[str],
) -> Objective:
    """The objective of a preference loss; `inputs` gives the arrays called `names`, [R, P] each."""
    function = lookup(PREFERENCE_LOSSES, name, "preference loss")
    what = f"preference loss {name!r}"
    check_inputs(function, names, what)
    check_options(function, options, what)

    def by_token(outputs: Any, micro: PairBatch) -> tuple[jax.Array, Stats]:
        ids_RT = micro.segment_ids
        ends_RT = last_tokens(micro.loss_mask, ids_RT)
        present_RP, _ = pair_sums(ends_RT, ids_RT)
        values = on_pairs(function, inputs(outputs, micro), present_RP, **options)
        # A pair's value goes to the last trained token of its chosen answer, whose segment id is odd.
        ends_RT = masked(ends_RT, ids_RT % 2)
        # Segments that the mask leaves out need only stay within the array.
        pair_RT = jnp.minimum(ids_RT // 2, present_RP.shape[1] - 1)
        return jax.tree.map(
            lambda x_RP: masked(jnp.take_along_axis(x_RP, pair_RT, axis=1), ends_RT), values
        )

    # A pair is two sequences.
    pair_mean = Aggregation(token_mean().weigh, lambda counts: counts.sequences / 2.0)
    return Objective(by_token, pair_mean, stats=pair_mean)
