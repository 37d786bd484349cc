"""A disk that is full: one line, status 2, nothing torn, and a run that goes on once there is room."""

import dataclasses

import jax
import pytest
from test_loop import Counter, rows_of, run

from jaxrl.errors import UserError
from jaxrl.tracking.durable import disk_errors


class Wide(Counter):
    """Its checkpoints are 40 kB that no compression makes smaller."""

    @staticmethod
    def _state_of(count):
        state = Counter._state_of(count)
        noise = jax.random.normal(jax.random.key(count), (10_000,))
        return dataclasses.replace(state, params=state.params | {"noise": noise})


OPTIONS = {
    "metrics": lambda step: {f"metric/{i}": step / (i + 1) for i in range(40)},
    "num_steps": 40,
    "save_every": 3,
    "keep": 2,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict]:
    """Rows of a run with room for everything."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder / "rl", counter=Wide(), **OPTIONS)
    return rows_of(folder / "rl")


@pytest.mark.parametrize(
    "size", [8_000, *(pytest.param(n, marks=pytest.mark.long) for n in (40_000, 150_000)), 300_000]
)
def test_a_stage_tells_of_it_and_goes_on_to_the_same_rows(size, disk, whole, capfd):
    """At each size the disk fills up in another file: logs, a first or later checkpoint, a manifest."""
    disk.resize(size)
    capfd.readouterr()
    line = r"No space left on device\)[^\n]*free space[^\n]*$"
    # As a program does: which file is the first without room depends on what TensorStore has written by then.
    with pytest.raises(UserError, match=line), disk_errors(disk.path):
        run(disk.path / "rl", counter=Wide(), **OPTIONS)
    # Of Orbax's threads each would tell of it with its stack.
    assert "Traceback" not in capfd.readouterr().err
    disk.resize(10**8)
    counter = run(disk.path / "rl", counter=Wide(), **OPTIONS)
    assert int(counter.state.step) == 40
    assert rows_of(disk.path / "rl") == whole
