"""jaxrl trains language models with reinforcement learning as one JAX SPMD program.

import jaxrl

metrics = jaxrl.train("grpo_tiny", num_steps=10)
"""

import importlib
from typing import Any

# Found by `__getattr__`.
__all__ = ["open_run", "train"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # `import jaxrl` and the command line do not wait for JAX.
    if name not in __all__:
        raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")
    return getattr(importlib.import_module("jaxrl.api"), name)
