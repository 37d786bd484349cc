"""A user's sampler of prompts: the rows that it chooses, what it is told, its state, and its faults."""

import dataclasses
import fractions
import json
import math
import random

import jax.numpy as jnp
import numpy as np
import pytest
from walking_sampler import Walk

from jaxrl.data.curriculum import CurriculumStream, GradedGroup, load_sampler
from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.errors import UserError
from jaxrl.roles.learner import TrainState
from jaxrl.tracking.checkpoints import Checkpoints
from jaxrl.types import AgentFailure, AgentRows, Completions, Prompts, Scored

SIZE = 7


def numbered(first: int, count: int, source="numbers") -> Prompts:
    numbers = range(first, first + count)
    return Prompts(
        # Row numbers of a file, of which some were left out.
        ids_N=np.array([3 * n for n in numbers], np.int64),
        tokens=tuple(np.array([n + 2], np.int32) for n in numbers),
        texts=tuple(f"prompt {n}" for n in numbers),
        answers=tuple(str(n) for n in numbers),
        sources=(source,) * count,
    )


class Sampler:
    """Chooses what a test says; row 0 otherwise."""

    chosen = ()
    at_first = None

    def __init__(self, prompts, seed):
        self.prompts, self.seed = prompts, seed
        self.groups, self.saved = [], self.at_first
        self.rows = iter(self.chosen)

    def next(self):
        return next(self.rows, 0)

    def update(self, groups):
        self.groups.append(list(groups))

    def state(self):
        return self.saved

    def restore(self, state):
        self.saved = state


def stream(made=Sampler, *, per_batch=3, sources=None, **changes):
    """A stream of a class that a module has under the name `Chosen`, with other attributes."""
    module_class = type("Chosen", (made,), changes)
    globals()["Chosen"] = module_class
    return CurriculumStream(
        sources or [numbered(0, SIZE)],
        path=f"{__name__}:Chosen",
        prompts_per_batch=per_batch,
        seed=5,
    )


def test_batches_are_the_chosen_rows_of_all_sources():
    own = stream(chosen=[4, 0, 6, 5, 5, 2], sources=[numbered(0, 4, "a"), numbered(4, 3, "b")])
    first, second = next(own), next(own)
    assert first.answers == ("4", "0", "6") and first.sources == ("b", "a", "b")
    assert second.answers == ("5", "5", "2")
    assert own._sampler.seed == 5
    assert own._sampler.prompts.ids_N.tolist() == list(range(SIZE))


def test_a_row_has_another_id_whenever_it_is_drawn():
    own = stream(chosen=[4, 4, 0, 4])
    # Seven rows: the second draw of row 4 is 7 + 4.
    assert next(own).ids_N.tolist() == [4, 11, 0]
    assert next(own).ids_N.tolist() == [18, 7, 14]


def test_ids_stay_below_the_limit_of_sampling_keys():
    own = stream(chosen=[6] * 9, per_batch=1)
    # The largest id of row 6 is 7 * (2**31 // 7 - 1) + 6 = 2147483645.
    own._draws[6] = 2**31 // 7 - 1
    assert [next(own).ids_N[0] for _ in range(3)] == [2147483645, 6, 13]


def graded(ids, correct_NG, reward_NG, lengths_NG, failed_B=None) -> Scored:
    lengths = [n for group in lengths_NG for n in group]
    count = len(lengths)
    none = ((),) * count
    score_B = np.array(reward_NG, np.float32).reshape(-1)
    why = tuple(AgentFailure("late") if failed else None for failed in failed_B or ())
    agents = failed_B and AgentRows(np.full(count, np.nan, np.float32), why, none)
    prompts = numbered(0, len(ids)).take(range(len(ids)))
    completions = Completions(
        prompts=Prompts(
            np.array(ids), prompts.tokens, prompts.texts, prompts.answers, ("n",) * len(ids)
        ),
        num_samples=len(correct_NG[0]),
        tokens=tuple(np.zeros(n, np.int32) for n in lengths),
        rollout_logprob=tuple(np.zeros(n, np.float32) for n in lengths),
        entropy=tuple(np.zeros(n, np.float32) for n in lengths),
        truncated_B=np.zeros(count, bool),
        texts=("",) * count,
        of_agents=agents or None,
    )
    shaping_B = np.full(count, -0.5, np.float32)
    return Scored(
        completions, np.array(correct_NG).reshape(-1), score_B, shaping_B, (None,) * count
    )


def test_the_sampler_is_told_every_graded_group():
    own = stream()
    # 11 is the second draw of row 4. The reward has the shaping of -.5.
    own.update(
        graded([11, 2], [[True, False], [False, False]], [[1, -1], [0, 0.25]], [[3, 9], [1, 2]])
    )
    own.update(graded([0], [[True, True]], [[1, 1]], [[4, 5]]))
    assert own._sampler.groups == [
        [
            GradedGroup(4, (True, False), (0.5, -1.5), (3, 9)),
            GradedGroup(2, (False, False), (-0.5, -0.25), (1, 2)),
        ],
        [GradedGroup(0, (True, True), (0.5, 0.5), (4, 5))],
    ]


def test_answers_of_failed_agents_are_left_out():
    own = stream()
    failed = [True, False, True, True]
    own.update(graded([1, 2], [[True, True]] * 2, [[1, 1]] * 2, [[0, 5], [0, 0]], failed))
    assert own._sampler.groups == [
        [GradedGroup(1, (True,), (0.5,), (5,)), GradedGroup(2, (), (), ())]
    ]


@pytest.mark.parametrize(
    "row",
    [np.int64(3), np.int32(3), np.uint8(3), np.array(3), 3],
    ids=lambda row: type(row).__name__,
)
def test_any_kind_of_whole_number_is_a_row(row):
    assert next(stream(chosen=[row], per_batch=1)).answers == ("3",)


@pytest.mark.parametrize(
    "row",
    [
        -1,
        SIZE,
        2**40,
        1.0,
        np.float64(1),
        "1",
        None,
        True,
        [1],
        np.array([1, 2]),
        fractions.Fraction(1),
    ],
    ids=repr,
)
def test_other_rows_are_refused_with_their_value(row):
    with pytest.raises(UserError, match=r"next\(\) returned .*numbers 0 to 6; return one of them"):
        next(stream(chosen=[row]))


class Ends(Sampler):
    def next(self):
        return next(iter(()))


class Raises(Sampler):
    def update(self, groups):
        return 1 / 0


class WantsMore(Sampler):
    def update(self, groups, more):
        return more


class Forgets(Sampler):
    number = 0

    def state(self):
        self.number += 1
        return self.number

    def restore(self, state):
        pass


class CannotRestore(Sampler):
    def state(self):
        return random.Random(1).getstate()

    def restore(self, state):
        random.Random().setstate(state)


class CannotBegin(Sampler):
    def __init__(self, prompts, seed):
        raise KeyError("difficulty")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Ends, r"next\(\) raised .*test_curriculum.py:\d+: StopIteration"),
        (
            Raises,
            r"update\(\) raised .*test_curriculum.py:\d+: ZeroDivisionError: division by zero",
        ),
        (WantsMore, r"update\(\) raised TypeError: .*'more'"),
        (Forgets, r"after restore\(state\), state\(\) is another one"),
        # JSON makes lists of its tuples.
        (CannotRestore, r"restore\(\) raised .*TypeError: state vector must be a tuple"),
        (CannotBegin, r"__init__\(\) raised .*KeyError: 'difficulty'"),
    ],
)
def test_faults_of_a_sampler_are_one_line(made, message):
    with pytest.raises(UserError, match=message) as caught:
        own = stream(made)
        next(own)
        own.update(graded([1], [[True]], [[1]], [[1]]))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data.sampler 'test_")


STATES = [
    None,
    3,
    -0.5,
    math.inf,
    math.nan,
    "text",
    True,
    [],
    {},
    {"a": {"b": [1, [2.5, None], {"c": "d"}]}},
    (1, (2, 3)),
    np.int64(3),
    {"share": np.float32(0.25)},
    np.arange(5),
    {"scalar": np.array(2.5), "empty": np.zeros(0)},
    {"counts": np.zeros((2, 3), np.float32), "flags": np.array([True, False])},
    np.random.default_rng(3).bit_generator.state,
    np.random.MT19937(3).state,
    {"generator": random.Random(3).getstate()},
    # Names that a checkpoint has a use for, and those that two ways lead to.
    {"__array__": 1, "__array___": {"__array__": np.arange(3), "dtype": "int8"}},
    {"a.b": np.arange(2), "a": {"b": np.arange(3)}, "a/b": np.arange(4), "": np.arange(5)},
]


COUNTS = next(n for n, s in enumerate(STATES) if isinstance(s, dict) and "counts" in s)


def test_states_come_back_from_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=None)
    checkpoints.prepare(None)
    record = {str(n): stream(at_first=state).state() for n, state in enumerate(STATES)}
    learner = TrainState({"w": jnp.zeros(3)}, {"m": jnp.zeros(3)}, jnp.int32(1))
    checkpoints.save(1, {"actor": learner}, record)
    checkpoints.commit()
    checkpoints.wait()
    found = checkpoints.read_record(1)
    checkpoints.close()
    for n, state in enumerate(STATES):
        own = stream()
        # It refuses a state that is not the sampler's afterwards.
        own.restore(found[str(n)])
        np.testing.assert_equal(own._sampler.saved, as_lists(state))
    counts = found[str(COUNTS)]["sampler_state"]["counts"]
    assert counts.dtype == np.float32 and counts.shape == (2, 3)


def as_lists(state):
    """`state` with lists in place of tuples."""
    if isinstance(state, dict):
        return {name: as_lists(value) for name, value in state.items()}
    return [as_lists(x) for x in state] if isinstance(state, list | tuple) else state


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({1: 2}, "keys that are no texts"),
        ({"a": {(1, 2): 3}}, r"state\(\)\['a'\] is a dict with keys"),
        ({1, 2}, "set"),
        ({"seen": frozenset()}, "frozenset"),
        ([b"1"], r"state\(\)\[0\] is bytes"),
        (1j, "complex"),
        (object(), "object"),
        ({"rng": np.random.default_rng(1)}, "Generator"),
        ({"rng": random.Random(1)}, r"state\(\)\['rng'\] is Random"),
        ([np.zeros(2)], "an array in a list"),
        ({"a": [{"b": np.zeros(2)}]}, "an array in a list"),
        (np.array(["text"]), "an array"),
        (np.array([None]), "an array"),
        (iter([1]), "list_iterator"),
    ],
)
def test_states_that_a_checkpoint_cannot_hold(state, what):
    with pytest.raises(UserError, match=f"{what}.*which a checkpoint cannot hold"):
        stream(at_first=state)


def test_a_state_is_that_of_its_moment():
    own = stream(at_first={"counts": np.zeros(2), "seen": [1]}, chosen=[5])
    state = own.state()
    own._sampler.saved["counts"][0] = 9
    own._sampler.saved["seen"].append(2)
    next(own)
    assert state["sampler_state"]["counts"].tolist() == [0, 0]
    assert state["sampler_state"]["seen"] == [1]
    assert state["draws"].tolist() == [0] * SIZE


def moved(own, count: int) -> list:
    """The next batches; each is told as answered by two tokens."""
    batches = []
    for _ in range(count):
        batch = next(own)
        own.update(graded(batch.ids_N.tolist(), [[True]] * 3, [[1]] * 3, [[2]] * 3))
        batches.append((batch.ids_N.tolist(), batch.answers))
    return batches


@pytest.mark.parametrize("num_taken", [0, 1, 4])
def test_a_restored_stream_continues_exactly(num_taken):
    own = stream(Walk)
    moved(own, num_taken)
    state = own.state()
    expected = moved(own, 5)
    other = stream(Walk)
    moved(other, 2)  # wherever it stood before
    other.restore(state)
    assert moved(other, 5) == expected
    assert json.dumps(own.state(), default=np.ndarray.tolist) == json.dumps(
        other.state(), default=np.ndarray.tolist
    )
    # The state is as it was, although the restored sampler went on.
    again = stream(Walk)
    again.restore(state)
    assert moved(again, 5) == expected


@pytest.mark.parametrize("name", ["sampler", "seed", "sources"])
def test_a_state_of_another_stream_is_refused(name):
    own = stream()
    other = {"sampler": "other.py:Other", "seed": 6, "sources": [[SIZE, 1]]}
    with pytest.raises(UserError, match="in other data"):
        own.restore(own.state() | {name: other[name]})


@pytest.mark.parametrize("other", [{"answers": ("7",) * SIZE}, {"extras": ({"seed": 1},) * SIZE}])
def test_a_state_is_that_of_whole_problems(other):
    """The prompts are the same; truths or other fields are not."""
    changed = stream(sources=[dataclasses.replace(numbered(0, SIZE), **other)])
    with pytest.raises(UserError, match="in other data"):
        changed.restore(stream().state())


def test_a_state_that_restore_leaves_out_is_refused():
    class Partly(Walk):
        def restore(self, state):
            super().restore(state | {"row": self.row})

    own = stream(Partly)
    state = own.state()
    moved(own, 1)
    with pytest.raises(UserError, match=r"after restore\(state\), state\(\) is another one"):
        stream(Partly).restore(own.state())
    own.restore(own.state())
    assert state["sampler_state"]["row"] == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_:Class", "cannot be imported"),
        ("nowhere.py:Class", "does not exist"),
        ("json:Nothing", "has no 'Nothing'"),
        ("json", "has no function's name"),
        ("json:dumps", "cannot be called with"),
        ("collections:OrderedDict", "has no method next, state, restore"),
        (f"{__name__}:SIZE", "is int, which cannot be called"),
    ],
)
def test_what_is_no_sampler_is_refused(path, message):
    with pytest.raises(UserError, match=message):
        load_sampler(path)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"train": {"path": "make.py:make"}}, "data.train generates .*set data.train.size"),
        ({"sources": {"task": {"path": "reasoning-gym:x"}}}, "set data.sources.task.size"),
        ({"train": {"path": "a.jsonl", "weight": 2.0}}, "data.train.weight 2 has no effect"),
        (
            {"train": {"path": "a"}, "sources": {"b": {"path": "b", "weight": 0.5}}},
            "data.sources.b.weight 0.5 has no effect",
        ),
    ],
)
def test_sources_that_no_sampler_can_choose_from(sources, message):
    settings = {
        "train": SourceConfig(**sources.get("train", {})),
        "sources": {name: SourceConfig(**s) for name, s in sources.get("sources", {}).items()},
    }
    DataConfig(**settings)
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings, sampler="my.py:Sampler")


def test_several_sources_and_generated_problems_with_a_size_may_be_chosen_from():
    DataConfig(
        train=SourceConfig(path="make.py:make", size=5),
        sources={"a": SourceConfig(path="a.jsonl")},
        sampler="my.py:Sampler",
    )
