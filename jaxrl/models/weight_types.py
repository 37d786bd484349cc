"""The types in which a sampler stores the weights of a model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.decoder import Decoder
from jaxrl.models.model_config import ModelConfig
from jaxrl.quantized import StoredType


def weight_types(model: ModelConfig, dtype: Any, matmul_dtype: str = "") -> Any:
    """A tree of `StoredType`s in the structure of the parameters.

    Projections inside layers are in `matmul_dtype`, with one scale for each output of a layer. Embeddings,
    unembedding, norms, biases, routers and adapters are in `dtype`.

    Args:
      model: the model.
      dtype: data type of weights.
      matmul_dtype: "int8", or "" for `dtype`.
    """
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))

    def one(path: Any, param: nnx.Param) -> nnx.Variable:
        summed = param.get_metadata().get("summed", ()) if matmul_dtype else ()
        stacked = path[0].key == "layers"
        dims = tuple(dim + stacked for dim in summed)
        return param.replace(StoredType(jnp.dtype(matmul_dtype if dims else dtype), dims))

    types = jax.tree_util.tree_map_with_path(
        one, nnx.state(abstract, nnx.Param), is_leaf=lambda v: isinstance(v, nnx.Param)
    )
    return nnx.to_pure_dict(types)
