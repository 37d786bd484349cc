"""What small kernels, copies and visits of the host cost, beside products and reads of weights and cache.

    token    kernels x kernel_s + (2 copied + other bytes) / copy + rounds of loops / W + visits
    update   (products + attention + other bytes / copy) x the part that does not run side by side

Costs of a GPU are from one H200 and Qwen2.5-1.5B on 26 November 2026, with counts of that day's programs
(benchmarks/results/2026-11-26-h200.md). Measured: `copy_rate`, `cache_rate`, `side_by_side`. Fitted, to 16
rows: `kernel_s`. The other seconds are usual ones of a launch and of a value that the host reads. A
microsecond for an operation of a TPU is a guess. What programs do was counted (benchmarks/compiled_counts.py)
of 1.5B and, for other widths, of 7B; it stands where a plan has compiled none.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_planner.simulation.model_numbers import ModelNumbers

Rows = float | np.ndarray


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """What a device does for a token, beside multiplying and reading weights and cache.

    Attributes:
      kernels: number of kernels, or of a TPU's operations.
      copied: bytes of weights that are copied, once each.
      row_bytes: other bytes read and written, of each row.
      visits: number of times that the host decides what comes next.
      row_rounds: rounds of loops that the host starts at the end of a dispatch, of each row.
    """

    kernels: float
    copied: float = 0.0
    row_bytes: float = 0.0
    visits: float = 0.0
    row_rounds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Costs of a kind of device, and what its programs do, where no compiled one was counted.

    Attributes:
      kernel_s: seconds of a kernel that does next to nothing.
      visit_s, round_s: seconds of a visit of the host, and of a round of a loop that it starts.
      copy_rate: fraction of the memory bandwidth for bytes read and written.
      cache_rate: fraction at which the kernel of decoding reads the cache; 0: that of `Assumptions`.
      copies_layers: whether a scan over layers copies each out of its stack.
      listed, scanned: kernels of a layer with weights of its own, and with slices of a stack.
      outside, visits, row_rounds: as in `TokenCounts`, kernels outside of layers alone.
      layer_bytes, logit_bytes: other bytes of a row: in any layer and for its width, and of a logit.
      side_by_side: part of an update that runs beside the rest.
      token_bytes: other bytes of an update, of a token: in a layer of width 1, for each value of a layer that
        tensor parallelism splits, and of a logit.
      weight_bytes: other bytes of a microbatch for a weight of a layer, and of a chunk of logits for one of
        the head.
    """

    kernel_s: float = 0.0
    visit_s: float = 0.0
    round_s: float = 0.0
    copy_rate: float = 1.0
    cache_rate: float = 0.0
    copies_layers: bool = False
    listed: float = 0.0
    scanned: float = 0.0
    outside: float = 0.0
    visits: float = 0.0
    row_rounds: float = 0.0
    layer_bytes: tuple[float, float] = (0.0, 0.0)
    logit_bytes: float = 0.0
    side_by_side: float = 0.0
    token_bytes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    weight_bytes: tuple[float, float] = (0.0, 0.0)

    def token(self, numbers: ModelNumbers, p: int, t: int, copied: float) -> TokenCounts:
        """What a token needs by the table; `copied` are the bytes of layers that are copied, if any are."""
        layers, each = numbers.layers / p, self.scanned if copied else self.listed
        fixed, wide = self.layer_bytes
        moved = layers * (fixed + wide * numbers.width / t)
        moved += self.logit_bytes * numbers.vocabulary / t
        kernels = each * layers + self.outside
        return TokenCounts(kernels, copied, moved, self.visits, self.row_rounds)

    def token_s(
        self, counts: TokenCounts, rows: Rows, tokens_per_dispatch: int, memory_gbs: float
    ) -> dict[str, Rows]:
        """Seconds of a token of all rows by cause."""
        copy = self.copy_rate * memory_gbs * 1e9
        rounds = rows * counts.row_rounds / tokens_per_dispatch
        return {
            "small kernels": counts.kernels * self.kernel_s + rows * 0.0,
            "layers copied out of their stack": 2 * counts.copied / copy + rows * 0.0,
            "activations and logits": rows * counts.row_bytes / copy,
            "visits of the host": counts.visits * self.visit_s + rounds * self.round_s,
        }

    def moved_s(self, nbytes: float, memory_gbs: float) -> float:
        """Seconds in which bytes are read and written by kernels that do no more."""
        return nbytes / (self.copy_rate * memory_gbs * 1e9)

    def together_s(self, *parts: float) -> float:
        """Seconds of parts of an update, of which some run side by side."""
        return (1 - self.side_by_side) * sum(parts)


UNCOUNTED = KernelTable()
TABLES = {
    "gpu": KernelTable(
        kernel_s=1.6e-6,
        visit_s=15e-6,
        round_s=22e-6,
        copy_rate=0.68,
        cache_rate=0.27,
        copies_layers=True,
        listed=11,
        scanned=40,
        outside=21,
        visits=2,
        layer_bytes=(230_000, 93),
        # Written and read.
        logit_bytes=8,
        side_by_side=0.13,
        token_bytes=(139, 7.6, 10),
        weight_bytes=(36.6, 10),
    ),
    "tpu": KernelTable(kernel_s=1e-6, listed=20, scanned=20, outside=62),
}
"""By `Accelerator.platform`; of CPUs nothing is counted."""
