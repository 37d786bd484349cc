"""The log of a server, and which of its calls are done again."""

import json

import pytest

from jaxrl.errors import UserError
from jaxrl_tinker.log import Log
from jaxrl_tinker.models import Done, plan_redo


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


def write(path, *records):
    log = Log(path)
    for kind, session, fields in records:
        log.write(kind, session, **fields)
    log.close()


def test_records_come_back_without_a_torn_line_and_without_sessions_that_are_over(path):
    body = bytes(range(256))
    write(path, ("session", "a", {}), ("call", "a", {"id": "x", "body": body}))
    write(path, ("session", "b", {}), ("end", "a", {}), ("call", "b", {"id": "y", "body": b""}))
    with path.open("ab") as file:
        file.write(b'{"kind": "call", "sess')
    kept = [
        {"kind": "session", "session": "b"},
        {"kind": "call", "session": "b", "id": "y", "body": b""},
    ]
    assert Log(path).records == kept
    # The torn line is gone for good: the next one does not continue it.
    write(path, ("call", "b", {"id": "z", "body": body}))
    assert Log(path).records == [*kept, {**kept[1], "id": "z", "body": body}]
    # Nothing is left once all sessions are over, whatever comes after.
    write(path, ("end", "b", {}), ("result", "b", {"id": "z", "body": body}))
    assert path.read_bytes().count(b"\n") == 1 and not Log(path).records


def test_damage_before_the_last_line_is_told(path):
    write(path, ("session", "a", {}), ("session", "b", {}))
    path.write_bytes(path.read_bytes().replace(b"}", b"", 1))
    with pytest.raises(UserError, match=r"line 1 of .* move it away"):
        Log(path)


def test_a_log_that_could_not_be_written_takes_nothing_more(path, monkeypatch):
    log = Log(path)
    log.write("session", "a")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("os.write", full)
        with pytest.raises(OSError, match="No space"):
            log.write("call", "a")
    with pytest.raises(OSError, match="No space"):
        log.write("session", "c")
    assert [json.loads(line)["session"] for line in path.read_text().splitlines()] == ["a"]


ROUTES = {
    "new": "create_model",
    "load": "load_weights",
    "fb": "forward_backward",
    "forward": "forward",
    "step": "optim_step",
    "snap": "save_weights_for_sampler",
    "save": "save_weights",
}


def calls(text):
    """ "new fb fb step!": calls of those names in order, numbered from 0; "!" marks a failed one."""
    for i, name in enumerate(text.split()):
        yield Done(f"{i}", ROUTES[name.rstrip("!")], name.endswith("!"))


@pytest.mark.parametrize(
    ("text", "checkpoints", "held", "runs", "restored"),
    [
        # Without a checkpoint from the beginning, but only what changes the model.
        ("new fb forward step save snap fb", "", "", "0 1 3 6", ""),
        ("new fb step fb step fb", "2", "", "3 4 5", "2"),
        ("new fb step fb step", "2 4", "", "", "4"),
        # A snapshot that is held needs the state before it, the model as it is now another.
        ("new fb step snap fb step fb", "2 5", "3", "3 6", "2 5"),
        ("new snap fb step fb", "3", "1", "0 1 4", "3"),
        # Weights that were loaded, or of a new model, need nothing before.
        ("new fb step load fb", "", "", "3 4", ""),
        ("new fb step new fb", "", "", "3 4", ""),
        ("new snap fb new", "", "1", "0 1 3", ""),
        # What failed changed nothing, but a step that failed may have dropped gradients.
        ("new fb fb! step! fb load! new! step", "", "", "0 1 3 4 7", ""),
    ],
)
def test_only_what_is_needed_is_done_again(text, checkpoints, held, runs, restored):
    found = plan_redo(list(calls(text)), checkpoints.split(), held.split())
    assert sorted(i for i, action in found.items() if action == "run") == runs.split()
    assert sorted(i for i, action in found.items() if action == "restore") == restored.split()


def test_models_are_planned_for_one_by_one():
    """The second one was replaced, and matters for its snapshots alone."""
    text = "a:new b:new a:fb b:fb b:step b:snap a:step b:fb"
    done = []
    for i, (model, name) in enumerate(each.split(":") for each in text.split()):
        done.append(Done(f"{i}", ROUTES[name], False, model))
    run = dict.fromkeys("026", "run")
    assert plan_redo(done, [], [], ["b"]) == run
    assert plan_redo(done, ["4"], ["5"], ["b"]) == run | {"4": "restore", "5": "run"}
    assert plan_redo(done, ["4", "6"], []) == {"6": "restore", "4": "restore", "7": "run"}
