"""Memory of a long process of tests: compiled programs are dropped between files.

They pile up otherwise: to 5 GB in each of two processes for the whole suite, and to tens of thousands of
memory mappings. Of these Linux allows a process 65,530 (`vm.max_map_count`). Every compiled program has some,
and when XLA is refused the next, it logs "LLVM compilation error: Cannot allocate memory" and dies of a
segmentation fault, as a rule while the half-made program is written to the persistent cache.
"""

import ctypes
import gc
import platform
import types

import jax


def drop_compiled_programs(module: types.ModuleType) -> None:
    """Empties JAX's caches and those of `module`, a file of tests, which keep engines and their programs."""
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        # It keeps what it was given back, in pieces too small for programs to come.
        ctypes.CDLL(None).malloc_trim(0)
