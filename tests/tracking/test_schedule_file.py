"""The file of a schedule: rows of a resumed run, what a killed one leaves, and settings that may differ."""

import pytest

from jaxrl.dataflows.schedule import VersionRow
from jaxrl.errors import UserError
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.schedule_file import ScheduleFile, read_schedule

ROWS = [VersionRow(n, 2, (), asked=((0, (7 + n, 8)), (1, (9,)))) for n in range(4)]


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.rl.path.mkdir()
    return folder


def write(folder, *rows):
    file = ScheduleFile(folder.rl.schedule)
    for row in rows:
        file.write(row)
    file.close()


def settings(agent="'a.py:play'", **changes):
    names = {"rollout.agent": agent, "seed": "0", "mesh.train": "'1-1-1'", "evaluation.every": "2"}
    return "".join(f"{k} = {x}\n" for k, x in {**names, **changes}.items())


def test_a_resumed_run_replaces_later_rows_and_the_beginning_of_one(folder):
    folder.config.write_text(settings())
    write(folder, *ROWS[:3])
    with folder.rl.schedule.open("ab") as file:
        file.write(b'{"version": 3, "dispatches": 2, "asked": [[0, [10,')
    assert [*read_schedule(folder, settings()).values()] == ROWS[:3]
    write(folder, *ROWS[2:])
    assert [*read_schedule(folder, settings()).values()] == ROWS


def test_a_run_with_agents_is_repeated_on_another_mesh(folder):
    other = {"mesh.train": "'1-1-4'", "evaluation.every": "0"}
    folder.config.write_text(settings())
    write(folder, *ROWS)
    assert read_schedule(folder, settings(**other))[1] == ROWS[1]
    with pytest.raises(UserError, match=r"other settings \(seed: 0 -> 1\)"):
        read_schedule(folder, settings(seed="1", **other))
    # Without agents the mesh decides what a dispatch holds.
    folder.config.write_text(settings("''"))
    with pytest.raises(UserError, match=r"\(evaluation\.every: 2 -> 0; mesh\.train: '1-1-1' -> "):
        read_schedule(folder, settings("''", **other))


def test_a_loop_of_ones_own_has_no_folder_and_writes_nothing(tmp_path):
    write(folder := RunFolder(tmp_path / "none"), *ROWS)
    assert not folder.path.exists()
