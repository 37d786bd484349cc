"""The kind of attention of a layer: full or sliding window, with or without capped scores.

Also the choice among implementations of attention, for whole sequences and for decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl.errors import UserError

# A window larger than any sequence; a position less a window stays within int32.
_EVERYTHING = 2**30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """The kind of attention of one layer. The default is full attention without a cap.

    Attributes:
      window: tokens that a token of a sliding layer sees, itself included; 0 if no layer slides.
      softcap: score cap as in Gemma 2, s -> softcap * tanh(s / softcap); 0 for none.
      slides: bool scalar, True if this layer slides; None if all layers are alike, and `window` decides.
      sinks: float32 [Q], one more score of each query head, which takes part in the softmax and has no value;
        None for none.
    """

    # Static, so that kernels can be built for these numbers.
    window: int = dataclasses.field(default=0, metadata={"static": True})
    softcap: float = dataclasses.field(default=0.0, metadata={"static": True})
    # An array: a scan over layers of different kinds has one program, and only this differs.
    slides: jax.Array | None = None
    sinks: jax.Array | None = None

    @property
    def reach(self) -> jax.Array | int | None:
        """The number of tokens that a token can see, itself included; None for all."""
        if not self.window:
            return None
        if self.slides is None:
            return self.window
        return jnp.where(self.slides, self.window, _EVERYTHING)

    def capped(self, scores: jax.Array) -> jax.Array:
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores


# Full attention without a cap.
FULL = AttentionKind()


def picked(
    what: str,
    requested: str,
    platform: str | None,
    runs: Mapping[str, bool],
    rules: Mapping[str, str],
    asked: str,
) -> str:
    """The requested implementation if it can run, or for "auto" the first that can.

    Args:
      what: what is implemented, for messages.
      requested: a key of `runs`, or "auto".
      platform: platform of the devices; None if only shapes are computed, for which "xla" stands.
      runs: whether each implementation can run there; "xla" always can, and is last.
      rules: where the others run, for messages.
      asked: the case at hand, for messages.

    Raises:
      UserError: `requested` is unknown or cannot run there.
    """
    if requested == "auto":
        return next(name for name, can_run in runs.items() if can_run)
    if requested not in runs:
        raise UserError(f"unknown {what} {requested!r}; use auto or one of {', '.join(runs)}")
    if platform is None:
        return "xla"
    if not runs[requested]:
        raise UserError(
            f"{what} {requested!r} on {platform} {asked}: it runs on {rules[requested]} only; use auto or xla"
        )
    return requested
