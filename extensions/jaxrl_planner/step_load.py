"""The work of a step of a config before any step has run, and the assumptions that its settings imply.

Plans, the search and the choice of slots all use this one description.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from jaxrl.config.schema import Config
from jaxrl.models.attention import pick_implementation
from jaxrl.models.kernels.paged_attention import pick_decode_implementation
from jaxrl.roles.packing import PackedShape
from jaxrl_planner.hardware.accelerators import Accelerator
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.filled_rows import filled_rows
from jaxrl_planner.simulation.workload import LengthDistribution, Workload

# In DAPO's run the mean answer grew to a fifth of the limit.
RESPONSE_SHARE = 0.2
# A guess: prompts are a small part of the work, and their limit is set by the longest.
_PROMPT_SHARE = 0.15
# Two moments per trained weight: int8 values with one scale per block.
_MOMENTS_BYTES = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.1}


@dataclasses.dataclass(frozen=True)
class StepLoad:
    """The assumed work of a step. All figures that depend on it are predictions.

    Attributes:
      work: prompts, samples, lengths, updates and microbatches.
      source: origin of the lengths of `work`, as a phrase for tables.
      greedy: whether each prompt also gets a greedy answer.
      truncated: whether sampling is truncated (top-k, top-p, min-p).
    """

    work: Workload
    source: str
    greedy: bool = False
    truncated: bool = False

    @property
    def prompts(self) -> int:
        return math.ceil(self.work.prompts * self.work.sampled_per_kept)

    @property
    def samples(self) -> int:
        """Number of answers per prompt, a greedy one included."""
        return self.work.samples + self.greedy

    @property
    def live_tokens(self) -> float:
        """Mean tokens that a sample in flight has in the cache."""
        return self.work.prompt_lengths.mean + self.work.response_lengths.mean_in_flight

    @property
    def lengths_text(self) -> str:
        found = self.work.response_lengths
        return (
            f"answers of {found.mean:,.0f} tokens on average (deviation {found.deviation:,.0f}), "
            f"{found.cut_off:.1%} cut off at {found.longest:,}; {self.source}"
        )

    @property
    def text(self) -> str:
        return (
            f"{self.prompts:,} prompts x {self.samples} answers = {self.prompts * self.samples:,} are "
            f"sampled, {self.work.sequences:,} are kept and trained on"
        )

    def microbatches(self, shape: PackedShape) -> float:
        """Mean number of microbatches that the kept sequences fill in a minibatch."""
        work = self.work
        filled = filled_rows(work)
        return filled.microbatches(shape.rows, fill_minibatches=work.fill_minibatches)

    def of_verdicts(self, tokens: int) -> StepLoad:
        """The work of a judge that reads every sample and writes `tokens` tokens about it."""
        work = self.work
        mean = work.prompt_lengths.mean + work.response_lengths.mean
        read = LengthDistribution(mean, max(work.longest_tokens, math.ceil(mean)))
        verdicts = dataclasses.replace(
            work,
            prompts=work.sequences,
            samples=1,
            prompt_lengths=read,
            response_lengths=LengthDistribution.exactly(tokens),
            max_slots=work.sequences,
            # As `role_table.JudgeKind.build` has it. A judge finishes all of its answers in the step.
            paged=False,
            always_full=False,
        )
        return dataclasses.replace(self, work=verdicts, greedy=False)


def response_lengths(config: Config, mean: float | None = None) -> LengthDistribution:
    """Lengths of answers for a config that has not run, with the spread of reasoning policies.

    Args:
      config: config of the run.
      mean: mean length of an answer; None assumes a fifth of the limit.

    Raises:
      UserError: the mean is not positive or above the limit.
    """
    limit = config.rollout.max_response_tokens
    mean = max(1.0, RESPONSE_SHARE * limit) if mean is None else mean
    return LengthDistribution(mean, limit, "log-normal")


def load_of(config: Config, responses: LengthDistribution | None = None) -> StepLoad:
    """The work of a step of a config; `responses` are the assumed lengths by default."""
    rollout, dataflow = config.rollout, config.algorithm.flow
    longest_prompt = config.data.max_prompt_tokens
    sampled = config.prompts_per_batch
    work = Workload(
        prompts=rollout.num_prompts,
        samples=rollout.num_samples,
        prompt_lengths=LengthDistribution(max(1.0, _PROMPT_SHARE * longest_prompt), longest_prompt),
        response_lengths=responses or response_lengths(config),
        sampled_per_kept=max(1.0, sampled / rollout.num_prompts),
        updates=config.algorithm.updates_per_step,
        epochs=config.algorithm.epochs,
        microbatch_tokens=config.row_tokens,
        microbatch_rows=config.train.rows,
        pipeline_microbatches=config.train.pipeline_microbatches,
        tokens_per_dispatch=rollout.tokens_per_dispatch,
        prefill_prompts=rollout.prefill_prompts,
        shares_prompts=config.train.shares_prompts,
        fill_minibatches=config.train.fill_minibatches,
        paged=rollout.cache == "paged",
        always_full=rollout.partial,
        max_staleness=max(1, rollout.max_staleness),
    )
    # Each of these takes the long branch of the sampling program.
    truncated = bool(rollout.top_k or rollout.top_p < 1 or rollout.min_p)
    source = "as given" if responses else "assumed"
    return StepLoad(work, source, dataflow.greedy_baseline, truncated)


def assumptions_of(config: Config, kind: Accelerator) -> Assumptions:
    """The assumptions of the simulation with the settings of a recipe; critics train like the actor.

    Args:
      config: config of the run.
      kind: kind of its devices.

    Raises:
      UserError: the attention that the recipe names does not run on these devices.
    """
    train, rollout, model = config.train, config.rollout, config.model
    kv_dtype = rollout.kv_dtype or rollout.dtype
    attention = pick_implementation(
        kind.platform,
        train.dtype,
        "auto",
        softcap=model.attention_softcap,
        windows=bool(model.sliding_window),
        sinks=model.attention_sinks,
        head_dim=model.largest_head,
        tree=train.share_prompts is True,
        tokens=config.row_tokens,
    )
    decode_attention = pick_decode_implementation(
        kind.platform,
        rollout.dtype,
        kv_dtype,
        model.cached_dim,
        "auto",
        alike=model.decodes_by_kernel,
    )
    # Critics and other roles are simulated with the same types.
    return Assumptions.on(
        kind,
        attention=attention,
        dtype=train.dtype,
        compute_bytes=float(jnp.dtype(train.dtype).itemsize),
        sampled_bytes=float(jnp.dtype(rollout.weights_dtype or rollout.dtype).itemsize),
        cache_bytes=float(jnp.dtype(kv_dtype).itemsize),
        fixed_slots=decode_attention != "xla",
        moments_bytes=_MOMENTS_BYTES[config.optim.moments],
        remat=train.remat if train.remat in ("none", "offload_inputs") else "full",
        logits_tokens=train.positions_of_logits(model.vocab_size, kind.platform),
    )
