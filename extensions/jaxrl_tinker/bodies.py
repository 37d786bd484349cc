"""JSON bodies of the Tinker API as types; a field that is not here is ignored, and null is the default.

What depends on the model is checked where it is used. `sample_calls` has the body of `asample`.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jaxrl.errors import UserError
from jaxrl_tinker.accumulating import AdamNumbers

Count = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def of(cls, body: Any) -> Self:
        """Reads a JSON object.

        Raises:
          UserError: a field is missing or wrong; the first one, by its dotted name.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
        # Without the branches of unions, which pydantic names beside the fields.
        parts = [str(part) for part in fault["loc"]]
        name = ".".join(part for part in parts if part.isidentifier() or part.isdigit())
        given = "" if fault["type"] == "missing" else f" is {reprlib.repr(fault['input'])}"
        raise UserError(f"{name}{given}: {fault['msg']}")


class NewModel(Body):
    """The number of a new model in its session."""

    model_seq_id: Count


class LoraFields(Body):
    """An adapter; without a rank it has the SDK's, or the largest here."""

    rank: int | None = None
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True


class Optimizer(Body):
    """The optimiser."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """The base, the adapter and the optimiser of a new model."""

    base_model: str | None = None
    lora_config: LoraFields = LoraFields()
    optimizer_config: Optimizer = Optimizer()


class Call(Body):
    """The number of a training call, from 1 for each model."""

    seq_id: Annotated[int, Field(ge=1)]


class OptimStep(Body):
    """The numbers of a step; those of another optimiser are not served."""

    adam_params: AdamNumbers
    optimizer_params: None = None


class SaveWeights(Body):
    """A name for weights; without one they get the number of the call."""

    path: str = ""
    overwrite: bool = False


class SaveForSampler(Body):
    """A name for weights to sample from, or the number of a sampler of the session."""

    kind: Literal["snapshot", "inflight"] = "snapshot"
    path: str = ""
    sampling_session_seq_id: Count | None = None


class LoadWeights(Body):
    """Saved weights, with or without their optimiser's state."""

    path: str
    optimizer: bool = False


class OpenSampler(Body):
    """A sampler of a session, of named weights or of the base model."""

    sampling_session_seq_id: Count
    model_path: str | None = None
    base_model: str | None = None


class Sample(Body):
    """The number of a request to sample, and its sampler."""

    sampling_session_id: str
    seq_id: int


class SamplerTarget(Body):
    """The samples of a sampler, or of a clone of it."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


class FinishedSamples(Body):
    """A wait of up to `timeout` seconds for samples that finish after the first `prev_cursor`."""

    target: SamplerTarget
    prev_cursor: Count = 0
    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
