"""Shapes of published models by name, from `shapes.toml`.

For commands that compute with shapes, and for planning a recipe without its files:

    config.model = model_shapes("qwen2.5-32b")

Training reads the config.json of its checkpoint instead: `rms_norm_eps` and `rope_theta` may differ between
models of one shape.
"""

from __future__ import annotations

import difflib
import pathlib
import tomllib

from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig

_SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
# The defaults of `ModelConfig` are those of a small Qwen 2.5, which has both.
_LEFT_OUT = {"qkv_bias": False, "tie_embeddings": False}


def _read() -> dict[str, ModelConfig]:
    table = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text("utf-8"))
    found = {}
    for name, own in table["models"].items():
        sizes = dict(zip(_SIZES, own.pop("sizes"), strict=True))
        family = table["families"][own.pop("family")]
        found[name] = ModelConfig(**{**_LEFT_OUT, **family, **sizes, **own})
    return found


SHAPES = _read()


def model_shapes(name: str) -> ModelConfig:
    """The shape of a published model; raises UserError with near names for an unknown one."""
    if name not in SHAPES:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=3, cutoff=0.5)
        raise UserError(
            f"model {name!r} is not one of {', '.join(SHAPES)}; "
            + (f"did you mean {' or '.join(near)}? " if near else "")
            + "The path of a config.json works too"
        )
    return SHAPES[name]
