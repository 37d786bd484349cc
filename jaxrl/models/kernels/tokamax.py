"""The package tokamax: kernels for GPUs and TPUs, an extra of jaxrl that needs Python 3.12.

It takes seconds to import, so a kernel imports it when it is traced. Some names are private to it, so only
versions are taken that have them. Only Hopper GPUs (H100, H200) have all kernels with gradients; jaxrl uses
tokamax there alone. Compiled ahead of time, never run by us.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
from typing import Any

import jax

# The first version that will do, and the first that has not been tried.
_OLDEST, _UNTRIED = (0, 0, 17), (0, 0, 18)


def runs_on(device: Any) -> bool:
    """Whether tokamax is installed and has kernels for a device; None is no device."""
    return is_hopper(device) and not missing()


def is_hopper(device: Any) -> bool:
    """Whether a device is a GPU of compute capability 9.0; None is no device."""
    return getattr(device, "platform", "") == "gpu" and device.compute_capability == "9.0"


@functools.cache
def missing() -> str:
    """A sentence that says what is missing; "" if the package is there."""
    wanted = ".".join(map(str, _OLDEST))
    how = f"pip install 'tokamax=={wanted}' (Python 3.12 or newer)"
    if importlib.util.find_spec("tokamax") is None:
        return f"the package tokamax is not installed: {how}"
    version = importlib.metadata.version("tokamax")
    if _OLDEST <= tuple(map(int, version.split(".")[:3])) < _UNTRIED:
        return ""
    return f"tokamax is installed in version {version}, and {wanted} is needed: {how}"


@contextlib.contextmanager
def compiling_for(device: Any) -> Any:
    """Traces kernels for a device, with the sizes of tiles that they choose by shapes alone."""
    import tokamax

    # tokamax takes the kind of GPU from the default device. When one compiles for a GPU that is not here, the
    # default device is another. Its table of measured sizes warns about every shape that is not in it.
    is_here = jax.devices()[0].device_kind == device.device_kind
    chosen = contextlib.nullcontext() if is_here else jax.default_device(device)
    with chosen, tokamax.config.ignore_autotuning_cache(True):  # pyright: ignore
        yield
