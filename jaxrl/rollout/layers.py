"""A stack of layers as a plain loop, for shallow models on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxrl.models.compute import LayerFunction
from jaxrl.models.decoder import Decoder


def layers_apart(model: Decoder) -> Callable[..., tuple[jax.Array, tuple[Any, Any]]]:
    """What `models.compute.scan_layers` does, with arrays that belong to one layer each.

    The weights are taken apart here, once, so that a loop around the stack does not do it in every round.

    Returns:
      A function of the arguments of `scan_layers`, except that `per_layer` is a sequence of L trees, and
      that so is what it returns of each layer. The stacked weights that it is given it ignores.
    """
    _, stacked = nnx.split(model.layers)
    weights = [jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(model.config.num_layers)]

    def run(
        layer: LayerFunction, x_BTD: jax.Array, _: Any, per_layer: Any, per_row: Any, *, unroll: int
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        del unroll
        outs, sums = [], []
        for layer_weights, layer_in in zip(weights, per_layer, strict=True):
            x_BTD, (out, of_rows) = layer(x_BTD, layer_weights, layer_in, per_row)
            outs.append(out)
            sums.append(of_rows)
        return x_BTD, (tuple(outs), tuple(sums))

    return run
