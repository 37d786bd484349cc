"""Settings of the learning step: how it is computed, which does not change what it computes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxrl.checks import MAX_LAYERS, at_least, check_fields, count, token_count


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
        docs/learning.md says where that pays.
      logprob_chunk_tokens: positions of a row whose logits are in memory at once.
      dtype: of activations, and of weights that are frozen below adapters; master weights are float32.
      products: what the projections of the layers are multiplied in, forward and backward, "full" (`dtype`),
        "int8" or "fp8" (`models.low_precision`; the extra `qwix`). Sampling has its own.
      remat: what the backward pass keeps of each layer, a name of `models.compute.REMAT_POLICIES`.
      unroll: layers per iteration of the layer scan; with all of them there is none.
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
    share_prompts: bool = False
    logprob_chunk_tokens: Annotated[int, token_count(1)] = 256
    dtype: Literal["float32", "bfloat16"] = "float32"
    products: Literal["full", "int8", "fp8"] = "full"
    remat: Literal["full", "projections", "offload", "none"] = "none"
    unroll: Annotated[int, at_least(1, at_most=MAX_LAYERS)] = 1
    pipeline_microbatches: Annotated[int, at_least(0)] = 0
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    load_balancing_coef: Annotated[float, at_least(0)] = 0.0

    def __post_init__(self):
        check_fields(self)
        if self.share_prompts and self.fill_minibatches:
            raise ValueError(
                "train.fill_minibatches lets samples change their minibatch, and train.share_prompts keeps "
                "those of a prompt together; set one of the two to False"
            )
