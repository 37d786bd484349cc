"""The user's cache of compiled programs: where it is, who may decide otherwise, and what it survives."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from beside import of_extension
from meshes import mesh_of
from processes import free_port, started

from jaxrl.mesh.compilation_cache import cache_folder
from jaxrl.models.compute import REMAT_POLICIES
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig

abstract_batch = of_extension("jaxrl_planner.compiled.programs:abstract_batch")

# A program that is worth keeping, and whether it was compiled or read.
PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jaxrl.mesh import compilation_cache
compilation_cache._SHORTEST_S = 0.0
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
print(compilation_cache.keep_compiled_programs())
print(jax.config.jax_compilation_cache_max_size)
for n in map(int, sys.argv[1:]):
    print(float(jax.jit(lambda x: (jnp.sin(x) * n).sum())(jnp.zeros(5) + 1)))
print(found.count("/jax/compilation_cache/cache_hits"))
"""


def environment(home: pathlib.Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    return kept | {"JAX_PLATFORMS": "cpu", "HOME": str(home)} | more


def run(home: pathlib.Path, *numbers: int, **more: str) -> tuple[str, list[str], int, str]:
    """(folder, size limit and results, programs that were read, stderr) of a process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, numbers)],
        env=environment(home, **more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder, *results, hits = done.stdout.split()
    return folder, results, int(hits), done.stderr


def test_processes_read_what_others_have_compiled_and_compile_again_what_is_broken(
    tmp_path, monkeypatch
):
    folder, first, hits, _ = run(tmp_path, 3)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pathlib.Path(folder) == cache_folder()
    assert folder.startswith(str(tmp_path / ".cache/jaxrl/jax"))
    assert first[0] == "8000000000" and hits == 0
    entries = list(pathlib.Path(folder).glob("*-cache"))
    assert run(tmp_path, 3)[1:3] == (first, len(entries))
    # What a killed process left.
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:10])
        entry.with_name(entry.name.removesuffix("-cache") + "-atime").unlink()
    _, again, hits, log = run(tmp_path, 3)
    assert (again, hits, log) == (first, 0, "")
    _, again, hits, log = run(tmp_path, 3)
    assert again == first and hits > 0 and log == ""


def test_it_follows_the_users_cache_folder_and_size(tmp_path):
    own = {"XDG_CACHE_HOME": str(tmp_path / "own"), "JAX_COMPILATION_CACHE_MAX_SIZE": "1000000"}
    folder, results, *_ = run(tmp_path, **own)
    assert folder.startswith(str(tmp_path / "own/jaxrl/jax"))
    assert results == ["1000000"]


def test_a_folder_of_the_users_own_is_left_as_it_is(tmp_path):
    own = tmp_path / "own"
    folder, results, _, _ = run(tmp_path, 3, JAX_COMPILATION_CACHE_DIR=str(own))
    assert folder == "None" and results[0] == "-1"
    assert not (tmp_path / ".cache").exists()


def test_a_home_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / ".cache").write_text("a file")
    folder, results, _, log = run(tmp_path, 3)
    assert folder == "None" and len(results) == 2
    assert log.count("compiled programs are not kept") == 1


@pytest.mark.long
def test_processes_that_share_it_do_not_disturb_each_other(tmp_path):
    numbers = [str(n) for n in range(2, 12)]
    command = [sys.executable, "-c", PROGRAM, *numbers]
    with started([command], env=environment(tmp_path)) as (one,):
        _, results, _, log = run(tmp_path, *map(int, numbers))
        out, _ = one.communicate(timeout=120)
    assert one.returncode == 0 and log == ""
    assert out.split()[1:-1] == results
    assert run(tmp_path, *map(int, numbers))[2] > len(numbers)


# The size of what is compiled


def num_operations(num_layers: int, remat: str, kind: str = "") -> int:
    """Operations of the lowered update whose names begin with `kind`, of all loops once."""
    model = ModelConfig(vocab_size=32, num_layers=num_layers, d_model=16, d_ff=16, head_dim=4)
    actor = Actor(
        model,
        mesh_of(),
        train=TrainConfig(rows=2, row_tokens=16, remat=remat),
        optim=OptimConfig(moments="int8"),
        temperature=1.0,
        seed=0,
    )

    def update(state, batch):
        actor.state = state
        metrics = actor.update(batch, SUPERVISED)
        return actor.state, metrics

    batch = abstract_batch(actor, PackedShape(2, 2, 2, 16))
    text = jax.jit(update).lower(actor.abstract_state(), batch).as_text()
    return len(re.findall(rf"\bstablehlo\.{kind}", text))


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.long)])
def test_the_update_is_as_large_at_any_depth(remat):
    """Layers are scanned, so compiling 64 of them takes what 4 take."""
    sizes = {depth: num_operations(depth, remat) for depth in (4, 64)}
    assert len(set(sizes.values())) == 1, sizes


def test_what_is_kept_of_a_layer_saves_all_its_products():
    """Of a layer "full" repeats q, k, v, scores, mixed values, o, gate and up."""
    products = {remat: num_operations(4, remat, "dot_general") for remat in REMAT_POLICIES}
    assert products["projections"] == products["none"] == products["full"] - 8
    # In host memory are q, k, v, o and down.
    assert products["full"] - products["offload"] == 4


def test_it_can_be_turned_off_for_a_while(tmp_path):
    program = """
import pathlib, sys
import jax, jax.numpy as jnp
from jaxrl.mesh import compilation_cache
compilation_cache._SHORTEST_S = 0.0
folder = pathlib.Path(compilation_cache.keep_compiled_programs())
def kept(n):
    jax.jit(lambda x: (jnp.sin(x) * n).sum())(jnp.zeros(5) + 1)
    return len(list(folder.glob("*-cache")))
before = kept(1)
with compilation_cache.compiled_programs_not_kept():
    during = kept(2)
print(0 < before == during < kept(3))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr


# Two processes of one device each, a pool each.
POOLS_PROGRAM = """
import dataclasses, sys
import jax, jax.numpy as jnp
from jaxrl.mesh import compilation_cache, hosts
from jaxrl.mesh.devices import simulate
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.mesh.pools import Pool, take_devices

address, me = sys.argv[1], int(sys.argv[2])
simulate(2, processes=2)
hosts.start(hosts.HostsConfig(coordinator=address, num_processes=2, process_id=me))
pools = [Pool(name, (name,), LayoutConfig(), whole_hosts=True) for name in "ab"]
with hosts.watched(hosts.HostsConfig()):
    compilation_cache.keep_programs_of(take_devices(pools, jax.devices()).pools)
    jax.jit(lambda x: (jnp.sin(x) * (7 + me)).sum())(jnp.zeros(5)).block_until_ready()
    hosts.gather(lambda: None)
"""


@pytest.mark.long
def test_each_pool_keeps_its_programs(tmp_path):
    keeps = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    keeps |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    keeps |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    address = f"localhost:{free_port()}"
    commands = [[sys.executable, "-c", POOLS_PROGRAM, address, str(i)] for i in range(2)]
    with started(commands, env=environment(tmp_path, **keeps)) as processes:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    # That of each pool has a constant of its own.
    assert len(list((tmp_path / "cache").glob("jit__lambda*-cache"))) == 2, errors
