"""Settings of a server, and of the engine behind it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Literal

from jaxrl.checks import PATH, at_least, between, count, token_count
from jaxrl.rollout.settings import EngineSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineSettings):
    """A server, and the engine behind it, whose other settings are those of `EngineSettings`.

    Attributes:
      model: Hugging Face directory.
      name: what requests call the model; "" is the directory's name.
      host: address to listen on.
      http_port, grpc_port: ports; 0 takes a free one.
      grpc: serve JetStream's gRPC too.
      slots: samples decoded side by side.
      prefill_prompts: prompts of one prefill.
      max_prompt_tokens, max_response_tokens: longest prompt and response; 0 is what the model's context and
        the memory of the devices leave (`lengths_of`).
      tokens_per_dispatch: tokens decoded between two looks of the host, which is how often text is sent.
      mesh: "p-t-d" of the devices, the first of those that are here.
      dtype: of weights and activations; "auto" is float32 on CPUs, which are slower in bfloat16, and bfloat16
        on accelerators.
      max_waiting: samples that may wait for a slot; more are refused.
      max_body_bytes: of a request.
      max_connections: that may be open to the HTTP endpoint.
      grace_s: how long open requests may go on after SIGTERM.
    """

    model: Annotated[str, PATH]
    name: str = ""
    host: str = "127.0.0.1"
    http_port: Annotated[int, between(0, 65_535)] = 8000
    grpc_port: Annotated[int, between(0, 65_535)] = 9000
    grpc: bool = True
    slots: Annotated[int, count(1)] = 64
    # Few requests at a time are the rule, and the last of them are waited for.
    smallest_bucket: Annotated[int, count(1)] | Literal["auto"] = 8
    prefill_prompts: Annotated[int, count(1)] = 8
    # What a layer makes of all of a long prompt at once may not fit.
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 2048
    max_prompt_tokens: Annotated[int, token_count(0)] = 0
    max_response_tokens: Annotated[int, token_count(0)] = 0
    tokens_per_dispatch: Annotated[int, between(1, 65_536)] = 8
    mesh: str = "1-1-1"
    # Wider than the engine's own, which is made when the devices are known.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # pyright: ignore
    max_waiting: Annotated[int, count(1)] = 10_000
    max_body_bytes: Annotated[int, at_least(1, at_most=2**31)] = 1 << 20
    max_connections: Annotated[int, count(1)] = 1000
    grace_s: Annotated[float, between(0, 86_400)] = 10.0

    @property
    def model_name(self) -> str:
        """The name by which requests call the model."""
        return self.name or pathlib.Path(self.model).resolve().name
