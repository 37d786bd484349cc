"""Settings of the learning step. They change speed and memory, not the result."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import coefficient, count, settings, token_count

# Float32 logits that are in memory at once; of their size there are about five arrays. On GPUs every chunk
# reads and writes the float32 gradient of the head: 19 chunks of 2**28 bytes take 43 GB more than 5 do (an
# update of 8,192 tokens of 1.5B, compiled for an H200).
_LOGITS_BYTES = {"cpu": 40 * 2**20, "gpu": 2**30}


@settings
class TrainConfig:
    """How the learning step is computed."""

    rows: Annotated[int, count(1)] = 8
    """R, rows of a microbatch over the whole mesh."""
    row_tokens: Annotated[int, token_count(1)] | Literal["auto"] = "auto"
    """T, tokens of a packed row; at least the longest prompt plus response. "auto" is that
    length, 256 or more. Where prompts may be shared, the rows of a device then become one row,
    of as many tokens or up to twice as many, for a prompt with its answers.
    """
    fill_minibatches: bool = False
    """Samples may move to another minibatch of their step if that saves microbatches; about one
    in a hundred moves. The minibatch of a sample then depends on `rows` and `row_tokens`.
    """
    share_prompts: bool | Literal["auto"] = "auto"
    """Compute a prompt once for all its answers in a row, forward and backward. Each answer is
    a branch after the prompt. The results are the same with fewer tokens. "auto" shares the
    prompts of a step on CPU if its lengths make that faster (docs/learning.md).
    """
    logprob_chunk_tokens: Annotated[int, token_count(1)] | Literal["auto"] = "auto"
    """Number of positions of a device whose logits are in memory at once; "auto" takes as many
    as fit into 42 MB on CPU, 1.07 GB on GPUs and 268 MB on TPUs.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of activations and of weights frozen below adapters. Master weights are
    float32.
    """
    remat: Literal["auto", "full", "projections", "offload", "offload_inputs", "none"] = "auto"
    """Activations that the backward pass keeps, a name of `models.compute.REMAT_POLICIES`;
    "auto" keeps as many as fit into memory (docs/learning.md).
    """
    pipeline_microbatches: Annotated[int, coefficient()] = 0
    """Number of parts of the rows that pass through the pipeline stages one after another, for
    layouts with p > 1; a multiple of p, and 0 for p. With more parts the stages idle less, and
    each part is less work.
    """
    load_balancing_coef: Annotated[float, coefficient()] = 0.0
    """Weight of `models.mixture.load_balancing_loss` in the loss of a mixture of experts,
    computed per microbatch.
    """

    replay_routes: bool = False
    """In a mixture, train each token with the experts that the sampler took for it; the router
    still decides their weights. `moe/same_routes` says how many the trainer would have
    chosen itself. Not with agents.
    """

    def __post_init__(self):
        if self.shares_prompts and self.fill_minibatches:
            raise ValueError(
                "train.fill_minibatches lets samples change their minibatch, and train.share_prompts keeps "
                "those of a prompt together; set one of the two to False"
            )

    def positions_of_logits(
        self, vocab_size: int, platform: str | None, *, of_device: int = 0
    ) -> int:
        """The value of `logprob_chunk_tokens` where a device has `vocab_size` logits of a position.

        All of `of_device` positions are one chunk if there are at most twice as many: it is not recomputed.
        """
        if self.logprob_chunk_tokens != "auto":
            return self.logprob_chunk_tokens
        nbytes = _LOGITS_BYTES.get(platform or "", 2**28)
        positions = max(1, nbytes // (4 * vocab_size))
        return of_device if positions < of_device <= 2 * positions else positions

    def remat_on(self, platform: str | None) -> str:
        """The value of `remat`; "auto" where nobody counted what fits: on CPU everything does."""
        if self.remat != "auto":
            return self.remat
        return "none" if platform in (None, "cpu") else "full"

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts are always shared."""
        return self.share_prompts is True

    def with_shared_prompts(self, *, platform: str, num_samples: int, allowed: bool) -> TrainConfig:
        """These settings with `share_prompts` False where "auto" can share none.

        The attention kernels of accelerators know no branches.

        Args:
          platform: platform of the devices.
          num_samples: number of answers to a prompt.
          allowed: False with delta layers, or if sequences are split over devices.
        """
        may = platform == "cpu" and num_samples > 1 and allowed and not self.fill_minibatches
        if self.share_prompts != "auto" or may:
            return self
        return dataclasses.replace(self, share_prompts=False)
