"""Settings of a server for the Tinker API."""

from __future__ import annotations

from typing import Annotated

from jaxrl.checks import PATH, at_least, between, count, settings, token_count
from jaxrl.errors import UserError
from jaxrl.mesh.hosts import HostsConfig
from jaxrl_serving.serve_config import ServeConfig


@settings
class TinkerConfig(ServeConfig, HostsConfig):
    """Settings of a server for the Tinker API.

    `ServeConfig` and `HostsConfig` document the inherited ones.
    """

    folder: Annotated[str, PATH] = "runs/tinker"
    """Folder of the weights that clients save by name, and of the log that a restart goes on from."""
    checkpoint_steps: Annotated[int, count(1)] = 10
    """Number of optimiser steps between checkpoints. A restart repeats the steps after the last one."""
    tokenizer: str = ""
    """Name or directory of the tokenizer that clients should load; "" leaves it to the name of
    the model.
    """
    train_tokens: Annotated[int, token_count(0)] = 0
    """Maximum number of tokens of a sequence to train on; 0 means those of the model's context,
    1,024 at most. Every batch has rows of this length.
    """
    train_rows: Annotated[int, count(1)] = 1
    """Number of rows of a microbatch on each replica."""
    train_microbatches: Annotated[int, count(1)] = 32
    """Number of microbatches of a batch. Empty ones take no time; a larger request takes several
    batches.
    """
    full: bool = False
    """Train all weights, for one client at a time, instead of adapters for several."""
    adapters: Annotated[int, between(1, 32)] = 8
    """Maximum number of models that clients train at the same time, each an adapter."""
    max_rank: Annotated[int, between(1, 256)] = 32
    """Maximum rank of an adapter. Adapters of lower ranks take the memory and time of this one."""
    dry_run: bool = False
    """Print the memory of the server, without loading the model, and end."""
    lease_s: Annotated[float, between(1, 86_400)] = 300.0
    """Seconds without a word from a session after which another one may have its place."""
    # The SDK cuts its requests at 5 MB.
    max_body_bytes: Annotated[int, at_least(1, at_most=2**31)] = 32 << 20

    def __post_init__(self):
        super().__post_init__()
        if self.chat_template:
            raise UserError(
                f"--chat_template {self.chat_template} has no effect with --tinker, where clients render "
                "their messages; leave it out, and put the template into the folder of --tokenizer"
            )
        HostsConfig.__post_init__(self)
