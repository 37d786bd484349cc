"""Keeps compiled programs from run to run, in a folder of bounded size.

Turns on JAX's persistent compilation cache in $XDG_CACHE_HOME/jaxrl or ~/.cache/jaxrl. Each kind of processor
has its own folder of at most 8 GB; the entries unused for longest are removed first. Processes share a folder
under a lock. `JAX_COMPILATION_CACHE_DIR` names another folder, which this file does not touch;
`JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxrl.files import cache_root
from jaxrl.mesh.pools import Pool
from jaxrl.mesh.replica_groups import replica_groups
from jaxrl.private import keep_what_this_process_compiles

logger = logging.getLogger(__name__)

_MAX_BYTES = 8 * 10**9
# Programs that compile faster than this are not stored: compiling them again is as quick as reading files.
_SHORTEST_S = 0.3
# File names of JAX (jax/_src/lru_cache.py).
_LOCK, _ENTRY, _USED = ".lockfile", "-cache", "-atime"
_LOCK_TIMEOUT_S = 10


def keep_compiled_programs() -> pathlib.Path | None:
    """Turns the cache on, unless the user has configured one. Call it before anything is compiled.

    Returns:
      The folder; None if JAX's settings already name one, or if the folder cannot be written.
    """
    if _setting("jax_compilation_cache_dir") is not None:
        return None
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Remove incomplete entries of killed processes: JAX would neither use nor replace nor evict them. An
        # entry is complete once its access time (`-atime`) is written, under the lock.
        with filelock.FileLock(folder / _LOCK, timeout=_LOCK_TIMEOUT_S):
            for entry in folder.glob(f"*{_ENTRY}"):
                used = entry.with_name(entry.name.removesuffix(_ENTRY) + _USED)
                if not used.exists() or used.stat().st_size == 0:
                    entry.unlink()
                    used.unlink(missing_ok=True)
    except (OSError, filelock.Timeout) as error:
        logger.warning(
            "compiled programs are not kept: %s cannot be used (%s); set JAX_COMPILATION_CACHE_DIR to a "
            "folder that can be written",
            folder,
            error,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST_S)
    # -1 is JAX's default, no limit; a limit of the user stays.
    if _setting("jax_compilation_cache_max_size") == -1:
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    return folder


def keep_programs_of(pools: Sequence[Pool]) -> None:
    """Lets the first process of each pool write what it compiles: JAX writes in process 0 alone.

    So does the first of each group that samples without others.
    """
    firsts = {min(device.process_index for device in pool.devices) for pool in pools}
    for mesh in {pool.mesh_of(role) for pool in pools for role in pool.roles}:
        if (groups := replica_groups(mesh)) is not None:
            firsts |= {processes[0] for processes in groups.processes}
    if jax.process_index() in firsts - {0}:
        keep_what_this_process_compiles()


@contextlib.contextmanager
def compiled_programs_not_kept() -> Iterator[None]:
    """Turns the cache off within a `with` block, for programs that are cached elsewhere."""
    before = _setting("jax_enable_compilation_cache")
    _enable(False)
    try:
        yield
    finally:
        _enable(before)


def _enable(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    # JAX checks only once per process whether there is a cache. A reset makes it check again.
    compilation_cache.reset_cache()


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def cache_folder() -> pathlib.Path:
    """The default folder of compiled programs, one for each kind of processor.

    Machines may share a home directory, and a program compiled for one processor may crash on another.
    """
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    abilities = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    features = "\n".join(sorted(abilities or lines[:1]))
    kind = hashlib.sha256(features.encode()).hexdigest()[:8]
    return cache_root() / "jax" / f"{platform.machine()}-{kind}"
