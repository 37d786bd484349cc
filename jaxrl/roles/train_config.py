"""Settings of the learning step: how it is computed, which does not change what it computes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import MAX_LAYERS, at_least, check_fields, coefficient, count, token_count

# What "auto" stands for (docs/learning.md has the measurements).
_UNROLLED_LAYERS = 8
_WIDE = 256
_ANSWERS_OF_A_ROW = 4


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How the learning step is computed.

    Attributes:
      rows: R, rows of a microbatch over the whole mesh.
      row_tokens: T, tokens of a packed row; at least the longest prompt plus response.
      fill_minibatches: samples may change places with ones of another minibatch of their step where it then
        runs fewer microbatches; about one in a hundred does. Which update a sample is in then depends on
        `rows` and `row_tokens`, which otherwise change nothing.
      share_prompts: the answers to a prompt that lie in a row share it: it is computed once there, forward
        and backward, and each answer is a branch that goes on from it. The same numbers for fewer tokens;
        docs/learning.md says where that pays, which is where "auto" does it.
      logprob_chunk_tokens: positions of a row whose logits are in memory at once.
      dtype: of activations, and of weights that are frozen below adapters; master weights are float32.
      matmuls: what the projections of the layers are multiplied in, forward and backward, "full" (`dtype`),
        "int8" or "fp8" (`models.low_precision`; the extra `qwix`). Sampling has its own.
      remat: what the backward pass keeps of each layer, a name of `models.compute.REMAT_POLICIES`.
      unroll: layers per iteration of the layer scan; with all of them there is none. "auto" is all of up to 8
        layers on CPU if they are 256 wide or wider, else 1.
      pipeline_microbatches: parts of the rows that follow each other through the stages of a layout with
        p > 1; a multiple of p, 0 for p itself. More of them leave the stages idle for a smaller share of
        the time, and give each less work at once.
      attention: implementation, "auto" or one of `models.attention.IMPLEMENTATIONS`.
      load_balancing_coef: weight of `models.mixture.load_balancing_loss` in the loss of a mixture of
        experts, taken microbatch by microbatch.
    """

    rows: Annotated[int, count(1)] = 8
    row_tokens: Annotated[int, token_count(1)] = 256
    fill_minibatches: bool = False
    share_prompts: bool | Literal["auto"] = "auto"
    logprob_chunk_tokens: Annotated[int, token_count(1)] = 256
    dtype: Literal["float32", "bfloat16"] = "float32"
    matmuls: Literal["full", "int8", "fp8"] = "full"
    remat: Literal["full", "projections", "offload", "none"] = "none"
    unroll: Annotated[int, at_least(1, at_most=MAX_LAYERS)] | Literal["auto"] = "auto"
    pipeline_microbatches: Annotated[int, coefficient()] = 0
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    load_balancing_coef: Annotated[float, coefficient()] = 0.0

    def __post_init__(self):
        check_fields(self)
        if self.shares_prompts and self.fill_minibatches:
            raise ValueError(
                "train.fill_minibatches lets samples change their minibatch, and train.share_prompts keeps "
                "those of a prompt together; set one of the two to False"
            )

    @property
    def shares_prompts(self) -> bool:
        """`share_prompts`, where "auto" has not been resolved to True."""
        return self.share_prompts is True

    def layers_per_iteration(self, num_layers: int, d_model: int, platform: str | None) -> int:
        """`unroll`, resolved for a model and the platform of its mesh."""
        if self.unroll != "auto":
            return self.unroll
        # A scan copies what the backward pass keeps of the layers into one array, which counts if wide.
        pays = platform == "cpu" and d_model >= _WIDE and num_layers <= _UNROLLED_LAYERS
        return num_layers if pays else 1

    def with_shared_prompts(
        self,
        *,
        platform: str,
        max_prompt_tokens: int,
        max_response_tokens: int,
        num_samples: int,
        allowed: bool,
    ) -> TrainConfig:
        """These settings with `share_prompts` resolved.

        It pays on CPU if rows hold several answers and prompts are a quarter of the tokens or more. The
        attention kernels of accelerators know no branches.

        Args:
          platform: of the devices.
          max_prompt_tokens, max_response_tokens, num_samples: of a step.
          allowed: nothing else forbids it: no sliding window, no sequences that are split over devices.
        """
        if self.share_prompts != "auto":
            return self
        answers = min(num_samples, _ANSWERS_OF_A_ROW)
        pays = (
            platform == "cpu"
            and num_samples > 1
            and 3 * max_prompt_tokens >= max_response_tokens
            and self.row_tokens >= max_prompt_tokens + answers * max_response_tokens
        )
        return dataclasses.replace(
            self, share_prompts=pays and allowed and not self.fill_minibatches
        )
