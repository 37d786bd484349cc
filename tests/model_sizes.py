"""Models by their sizes, in the order of the letters that name them in shapes."""

from typing import Any

from jaxrl.models.model_config import ModelConfig


def sized_model(V: int, L: int, D: int, F: int, Q: int, K: int, H: int, **more: Any) -> ModelConfig:
    """Vocabulary, layers, width, neurons, query heads, key-value heads and their size."""
    names = ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
    return ModelConfig(**dict(zip(names, (V, L, D, F, Q, K, H), strict=True)), **more)
