"""Small packed batches for the roles' tests."""

import numpy as np

from jaxrl.roles.packing import PackedShape, plan_packing
from jaxrl.types import PackedBatch, TrainBatch

# Three ways to lay out eight sequences of at most 12 tokens.
ONE_EACH = PackedShape(minibatches=1, microbatches=1, rows=8, tokens=12)
PACKED = PackedShape(minibatches=1, microbatches=4, rows=2, tokens=24)
TWO_UPDATES = PackedShape(minibatches=2, microbatches=2, rows=2, tokens=12)
SHAPES = {"one each": ONE_EACH, "packed": PACKED, "two updates": TWO_UPDATES}


def sequences(num: int = 8, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Ragged prompt-response pairs with log-probabilities of three policies, and values."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(num):
        prompt, response = rng.integers(1, 5), rng.integers(2, 8)
        n = prompt + response
        on_response = (np.arange(n) >= prompt).astype(np.float32)
        floats = {
            name: on_response * rng.uniform(-2, -0.1, n).astype(np.float32)
            for name in ("rollout_logprob", "old_logprob", "ref_logprob", "value")
        }
        tokens = rng.integers(0, 16, n).astype(np.int32)
        out.append({"tokens": tokens, "loss_mask": on_response, **floats})
    return out


def packed(rows: list[dict[str, np.ndarray]], shape: PackedShape):
    """(packing, TrainBatch)."""
    packing = plan_packing([len(row["tokens"]) for row in rows], shape)

    def pack(name: str) -> np.ndarray:
        return packing.pack([row[name] for row in rows], rows[0][name].dtype)

    base = PackedBatch(tokens=pack("tokens"), loss_mask=pack("loss_mask"), **packing.fields())
    names = rows[0].keys() - {"tokens", "loss_mask", "value"}
    return packing, TrainBatch.of(base, **{name: pack(name) for name in names})
