"""How a layer attends: to all that came before or to a window of it, with scores capped or not."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# Further back than any sequence reaches.
_EVERYTHING = 2**30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """The kind of attention of one layer. The default sees everything.

    A pytree whose numbers are static, so that kernels may be built for them. Where layers differ and are
    scanned, which of them the one at hand is, is an array.

    Attributes:
      window: tokens that a token of a sliding layer sees, itself included; 0 where no layer slides.
      softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2; 0 leaves them.
      slides: bool scalar, whether this layer does; None if `window` says so.
    """

    window: int = dataclasses.field(default=0, metadata={"static": True})
    softcap: float = dataclasses.field(default=0.0, metadata={"static": True})
    slides: jax.Array | None = None

    @property
    def reach(self) -> jax.Array | int | None:
        """Tokens that a token sees at most, itself included; None for all."""
        if not self.window:
            return None
        if self.slides is None:
            return self.window
        return jnp.where(self.slides, self.window, _EVERYTHING)

    def capped(self, scores: jax.Array) -> jax.Array:
        """Scores after the cap."""
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores


# Everything, uncapped.
FULL = AttentionKind()
