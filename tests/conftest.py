"""One setting for the whole suite: eight CPU devices, strict types, the same examples every time.

The settings are made here, at import, because JAX reads the device count once, when it first needs a
device; a fixture would come too late.
"""

import gc
import os
import pathlib
import zlib
from collections.abc import Sequence

import hypothesis
import jax
import numpy as np
import pytest
from memory import drop_compiled_programs, keep_what_is_freed

from jaxrl.types import Completions, Prompts, Scored

# Compiling is most of what these tests do, and tiny arrays gain nothing from optimised code. The fusion
# emitters take half of the compile time; from JAX 0.11 on there is no way around them. A program
# as small as these is not worth being split into parts that LLVM compiles side by side.
_UNKNOWN_TO_LIBTPU = "--xla_cpu_use_fusion_emitters=false"
_QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    *([_UNKNOWN_TO_LIBTPU] if jax.__version_info__ < (0, 11) else []),
)
# Once: workers get what the process that starts them has, and the cache tells programs by them.
_FLAGS = dict.fromkeys((*os.environ.get("XLA_FLAGS", "").split(), *_QUICK_TO_COMPILE))
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)
# As jaxrl.jetstream.engine_adapter has it, which some tests import gRPC before.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# pytest-xdist gives its workers a width of 80, and tables follow it.
os.environ.pop("COLUMNS", None)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# As jaxrl.mesh.devices.simulate has them, the first not for the programs that tests start.
os.environ["PJRT_NPROC"] = "32"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
jax.devices()
del os.environ["PJRT_NPROC"]
# Tests build the same small programs again and again; each is compiled once, and kept for the next run. Even
# for those that compile in 30 ms the cache takes half of the time.
_CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Programs that tests start keep theirs beside it, not in the home of whoever runs them.
os.environ["XDG_CACHE_HOME"] = str(_CACHE.with_name("programs"))
# Two dtypes never meet by accident: a bfloat16 weight cannot quietly become a float32 one.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

keep_what_is_freed()

# A first call compiles, which no deadline fits; without randomness a failure is everyone's failure.
hypothesis.settings.register_profile("jaxrl", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("jaxrl")

_LONGEST = (
    "test_recipes.py",
    "test_program.py",
    "test_free_running.py",
    "test_multiprocess.py",
    "test_optimizer.py",
    "test_engine.py",
    "test_driver.py",
    "test_policy.py",
)


@pytest.fixture(autouse=True)
def flags_that_libtpu_knows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """It ends the process that has others in XLA_FLAGS, which jaxlib has read by then."""
    if request.node.get_closest_marker("tpu"):
        jax.devices()
        monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(_UNKNOWN_TO_LIBTPU, ""))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay to the end: Python's garbage collector need not walk them after each file."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    # Nor look for cycles as often as it would: tracing makes many objects, and 6% of all time went there.
    gc.set_threshold(200_000, 50, 100)
    gc.enable()
    return result


def pytest_addoption(parser: pytest.Parser):
    parser.addoption("--part", help="K/N: of the tests those of part K of N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Files that take longest begin first, or in the end all processes but one would wait for them."""
    if part := config.getoption("part"):
        k, n = map(int, part.split("/"))
        # By the name without values of parameters, so that a new test moves no other.
        names = (f"{item.path.name}::{item.name.partition('[')[0]}" for item in items)
        parts = [zlib.crc32(name.encode()) % n for name in names]
        config.hook.pytest_deselected(
            items=[item for item, its in zip(items, parts, strict=True) if its != k]
        )
        items[:] = [item for item, its in zip(items, parts, strict=True) if its == k]
    items.sort(key=lambda item: item.path.name not in _LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """What a file of tests keeps goes when its last fixture has gone."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        drop_compiled_programs(item.module)
    return result


@pytest.fixture(scope="session")
def make_scored():
    """Builds `Scored` whose every entry says which prompt and sample it belongs to.

    The bits of a prompt's id say which of its answers are right: with 4 samples, id 5 has the first and
    the third, id 0 none, id 15 all.
    """

    def make(ids: Sequence[int], num_samples: int = 4) -> Scored:
        rows = [(i, g) for i in ids for g in range(num_samples)]
        lengths = [1 + (3 * i + g) % 5 for i, g in rows]
        tokens = [100 * i + 10 * g + np.arange(n) for (i, g), n in zip(rows, lengths, strict=True)]
        correct_B = np.array([i >> g & 1 for i, g in rows], bool)
        prompts = Prompts(
            ids_N=np.array(ids, np.int64),
            tokens=tuple(np.arange(i, i + 1 + i % 3, dtype=np.int32) for i in ids),
            texts=tuple(f"prompt {i}" for i in ids),
            answers=tuple(f"answer {i}" for i in ids),
            sources=tuple(f"source {i % 2}" for i in ids),
        )
        completions = Completions(
            prompts=prompts,
            num_samples=num_samples,
            tokens=tuple(t.astype(np.int32) for t in tokens),
            rollout_logprob=tuple(-t.astype(np.float32) / 8 for t in tokens),
            entropy=tuple(t.astype(np.float32) / 16 for t in tokens),
            truncated_B=np.array([(i + g) % 2 for i, g in rows], bool),
            texts=tuple(f"response {i}.{g}" for i, g in rows),
        )
        return Scored(
            completions=completions,
            correct_B=correct_B,
            score_B=np.where(correct_B, 1, -1).astype(np.float32),
            shaping_B=np.array([-g / 4 for _, g in rows], np.float32),
            predictions=tuple(f"{i}.{g}" if g else None for i, g in rows),
        )

    return make
