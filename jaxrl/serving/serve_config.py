"""Settings of a server and its engine."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Literal

from jaxrl.checks import PATH, at_least, between, count, token_count
from jaxrl.errors import UserError
from jaxrl.rollout.settings import EngineSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineSettings):
    """Settings of a server and its engine; `EngineSettings` documents the inherited ones.

    Attributes:
      model: Hugging Face directory of the model.
      name: model name that requests must use; "" means the directory's name.
      host: address to listen on.
      http_port, grpc_port: ports to listen on; 0 chooses a free port.
      grpc: whether JetStream's gRPC service runs too.
      slots: maximum number of samples decoded at the same time.
      prefill_prompts: number of prompts per prefill.
      max_prompt_tokens, max_response_tokens: maximum lengths of prompt and response; 0 uses all that the
        model's context and the memory of the devices allow.
      tokens_per_dispatch: number of tokens decoded between two pieces of streamed text.
      mesh: mesh of the devices as "p-t-d"; it uses the first devices of this machine.
      dtype: data type of weights and activations. "auto" is bfloat16 on accelerators and float32 on CPUs,
        which are slower in bfloat16.
      max_waiting: maximum number of samples that wait for a slot; more are refused.
      max_body_bytes: maximum size of a request in bytes.
      max_connections: maximum number of open HTTP connections.
      grace_s: seconds that open requests may continue after SIGTERM.
    """

    model: Annotated[str, PATH]
    name: str = ""
    host: str = "127.0.0.1"
    http_port: Annotated[int, between(0, 65_535)] = 8000
    grpc_port: Annotated[int, between(0, 65_535)] = 9000
    grpc: bool = True
    slots: Annotated[int, count(1)] = 64
    prefill_prompts: Annotated[int, count(1)] = 8
    # The activations of a long prompt may not fit if it is prefilled at once.
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 2048
    max_prompt_tokens: Annotated[int, token_count(0)] = 0
    max_response_tokens: Annotated[int, token_count(0)] = 0
    tokens_per_dispatch: Annotated[int, between(1, 65_536)] = 8
    mesh: str = "1-1-1"
    # Adds "auto" to the engine's type. It is resolved once the devices are known.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # pyright: ignore
    max_waiting: Annotated[int, count(1)] = 10_000
    max_body_bytes: Annotated[int, at_least(1, at_most=2**31)] = 1 << 20
    max_connections: Annotated[int, count(1)] = 1000
    grace_s: Annotated[float, between(0, 86_400)] = 10.0

    def __post_init__(self):
        super().__post_init__()
        if self.cache == "paged" and self.grpc:
            raise UserError(
                "JetStream's gRPC service has no paged cache; add --http_only, or leave out --cache"
            )
        if self.speculate and self.grpc:
            raise UserError(
                "JetStream's gRPC service does not speculate; add --http_only, or leave out --speculate"
            )

    @property
    def model_name(self) -> str:
        """The model name that requests must use."""
        return self.name or pathlib.Path(self.model).resolve().name
