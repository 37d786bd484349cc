"""Memory of a long process of tests: compiled programs are dropped between files, once there are many.

They pile up otherwise: to 5 GB in each of two processes for the whole suite, and to tens of thousands of
memory mappings. Of these Linux allows a process 65,530 (`vm.max_map_count`). Every compiled program has some,
and when XLA is refused the next, it logs "LLVM compilation error: Cannot allocate memory" and dies of a
segmentation fault, as a rule while the half-made program is written to the persistent cache.

After every file would be too often: hundreds of small programs, of 30 ms each, are the same in most files.
"""

import ctypes
import gc
import pathlib
import platform
import resource
import types

import jax

_GLIBC = platform.libc_ver()[0] == "glibc"


def keep_what_is_freed() -> None:
    """Has glibc keep what was freed for later, where it would give it to the kernel and ask again."""
    if _GLIBC:
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        for option, power in ((trim_threshold, 30), (top_pad, 26), (mmap_threshold, 25)):
            ctypes.CDLL(None).mallopt(option, 2**power)


def drop_compiled_programs(
    module: types.ModuleType, *, most_mappings: int = 20_000, most_bytes: int = 2 * 2**30
) -> None:
    """Empties the caches of `module`, a file of tests, which keep engines and their programs.

    Empties JAX's too if the process has more memory mappings or bytes than given.
    """
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    gc.collect()
    process = pathlib.Path("/proc/self")
    if process.exists():
        mappings = (process / "maps").read_bytes().count(b"\n")
        pages = int((process / "statm").read_text().split()[1])
        if mappings <= most_mappings and pages * resource.getpagesize() <= most_bytes:
            return
    jax.clear_caches()
    gc.collect()
    if _GLIBC:
        # It keeps what it was given back, in pieces too small for programs to come.
        ctypes.CDLL(None).malloc_trim(0)
