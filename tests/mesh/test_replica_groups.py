"""Processes that hold whole replicas together: which ones, what each does, and what they exchange."""

import os
import pathlib
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from processes import free_port, started

from jaxrl.errors import UserError
from jaxrl.mesh.replica_groups import ReplicaGroups, _keep, replica_groups
from jaxrl.mesh.rules import GENERATE_RULES, shards_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("train", "generate", "processes", "devices"),
    [
        ("1-1-8", "", [(0,), (1,), (2,), (3,)], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # A replica is a pair of neighbours.
        ("1-2-4", "", [(0,), (1,), (2,), (3,)], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # A replica is four devices, on two processes.
        ("1-4-2", "", [(0, 1), (2, 3)], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("2-2-2", "", [(0, 1), (2, 3)], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # Zero redundancy: every second device of four, so that each replica is on both of two processes.
        ("1-4-2", "1-2-2-2", [(0, 1), (2, 3)], [[0, 2, 1, 3], [4, 6, 5, 7]]),
    ],
)
def test_groups_have_whole_replicas_on_processes_of_their_own(train, generate, processes, devices):
    """Eight devices of four processes, which have two each."""
    mesh = mesh_of(train, generate)
    groups = replica_groups(mesh, lambda device: device.id // 2)
    assert groups is not None
    assert list(groups.processes) == processes
    # Another run makes the same groups, whatever its own processes are: here this one has all.
    again = replica_groups(mesh, members=groups.members)
    assert again is not None and again.meshes == groups.meshes
    assert again.here == tuple(range(len(processes)))
    assert [[d.id for d in each.devices.flat] for each in groups.meshes] == devices
    for each in groups.meshes:
        assert each.axis_names == mesh.axis_names
        of_all = shards_of("batch", GENERATE_RULES, mesh)
        assert shards_of("batch", GENERATE_RULES, each) * len(processes) == of_all


@pytest.mark.parametrize(("train", "of_process"), [("1-8-1", 2), ("1-1-8", 8), ("1-2-4", 5)])
def test_one_group_is_none(train, of_process):
    """One replica, one process, or processes that share replicas with their neighbours."""
    assert replica_groups(mesh_of(train), lambda device: device.id // of_process) is None


def test_groups_of_another_number_of_replicas_are_refused():
    with pytest.raises(UserError, match="has 3 replicas of the sampler, and this run has 8"):
        replica_groups(mesh_of("1-1-8"), members=(0, 1, 1))


def test_a_view_of_the_weights_has_no_copies():
    # All devices are of this process, as where one repeats the schedule of two.
    mesh, own = mesh_of("1-2-2"), mesh_of("1-2-1")
    weights = jax.device_put(np.arange(12.0).reshape(6, 2), NamedSharding(mesh, P("tensor_gen")))
    shards = [s for s in weights.addressable_shards if s.device in own.devices.flat]
    assert len(shards) == 2
    groups = ReplicaGroups(((0,), (1,)), (own, mesh_of("1-2-1", first=2)), (0, 1), (0, 1))
    view = groups.view({"w": weights}, 0)["w"]
    np.testing.assert_array_equal(view, weights)
    assert view.sharding.is_equivalent_to(NamedSharding(own, P("tensor_gen")), 2)
    places = [s.data.unsafe_buffer_pointer() for s in view.addressable_shards]
    assert places == [s.data.unsafe_buffer_pointer() for s in shards]


def groups_of(*sizes: int) -> ReplicaGroups:
    firsts = np.cumsum([0, *sizes])
    meshes = (mesh_of(f"1-1-{n}", first=int(a)) for n, a in zip(sizes, firsts, strict=False))
    members = np.repeat(np.arange(len(sizes)), sizes).tolist()
    return ReplicaGroups(
        tuple((i,) for i in range(len(sizes))), tuple(meshes), tuple(members), (0,)
    )


def test_work_is_shared_out_by_hand():
    """9 to group 0, 7 to group 1, 6 to it too (7 < 9), 5 to group 0, 4 to group 1 (13 < 14), 1 to 0."""
    work = np.array([5.0, 9, 6, 7, 1, 4])
    assert groups_of(1, 1).share_out(work).tolist() == [0, 0, 1, 1, 0, 1]
    # Pieces of equal or unknown length are dealt out evenly; two devices do twice as many.
    assert groups_of(1, 1).share_out(np.zeros(4)).tolist() == [0, 1, 0, 1]
    assert np.bincount(groups_of(2, 1).share_out(np.ones(9))).tolist() == [6, 3]
    # Two devices have 6 to do already, and one has 1: it gets 2 more before all have 3 each.
    assert groups_of(2, 1).share_out(np.ones(3), [6.0, 1]).tolist() == [1, 1, 0]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 4))
def test_no_group_has_more_than_the_mean_and_a_piece(work, num_groups):
    group_N = groups_of(*[1] * num_groups).share_out(np.array(work, float))
    loads = np.bincount(group_N, weights=work, minlength=num_groups)
    assert loads.sum() == sum(work)
    assert loads.max() <= sum(work) / num_groups + max(work)


@given(st.data())
def test_wanted_ranges_lie_together_however_the_content_arrives(data):
    """Value i of the content is i, so the expected values are the indices of the ranges."""
    content = np.arange(100, dtype=np.int32)
    cuts = sorted(
        data.draw(st.lists(st.integers(0, 100), max_size=12).filter(lambda x: len(x) % 2 == 0))
    )
    ranges = np.array(cuts, int).reshape(-1, 2)
    step = data.draw(st.integers(1, 120))
    kept = np.zeros((ranges[:, 1] - ranges[:, 0]).sum(), np.int32)
    for low in range(0, 100, step):
        _keep(kept, ranges, content[low : low + step], low)
    assert kept.tolist() == [i for start, stop in ranges.tolist() for i in range(start, stop)]


# Six and eight devices of four processes. In the first mesh process 3 has none, and samples nothing.
PROGRAM = r"""
import sys

from jaxrl.mesh import hosts
from jaxrl.mesh.devices import simulate
import numpy as np

simulate(8, processes=4)
hosts.start(hosts.HostsConfig(coordinator=sys.argv[1], num_processes=4, process_id=int(sys.argv[2])))

import types
from jaxrl.mesh import replica_groups as module
from jaxrl.rollout.decode_loops import DecodeLoops
from jaxrl.rollout.group_loop import GroupLoop
from jaxrl.rollout.sample_groups import SampleGroups
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl.types import Completions, Prompts, Stretch
from meshes import mesh_of

# Small ones, so that several are sent one after another.
module._MOST_SENT = 64

# A decode loop in which a dispatch ends every second sample.
class Loop:
    def __init__(self, keeps_routes):
        self.waiting, self.keeps_routes = [], keeps_routes
        self.scheduler, self.slot_of, self.places = self, self.waiting, 10 * (me + 1)

    @property
    def num_unfinished(self):
        return len(self.waiting)

    def add(self, samples):
        self.waiting += samples

    def finish(self):
        ended, self.waiting[:] = self.waiting[::2], self.waiting[1::2]
        for sample in ended:
            sampled(sample, self.keeps_routes)
        return [types.SimpleNamespace(sample=sample) for sample in ended]

    def give_ended(self):
        pass

def sampled(sample, keeps_routes):
    random = np.random.default_rng([sample.prompt, sample.index])
    size = 0 if sample.prompt == 1 else int(random.integers(1, 40))
    sample.add(Stretch(
        random.integers(0, 2**31 - 1, size).astype(np.int32),
        random.normal(size=size).astype(np.float32), random.normal(size=size).astype(np.float32), 7,
    ))
    sample.finished, sample.truncated = True, bool(random.integers(2))
    if keeps_routes:
        length = len(prompts.tokens[sample.prompt]) + size - 1
        sample.routes = random.integers(0, 99, (length, 3, 1)).astype(np.int16)

def texts(tokens):
    assert all((x >= 0).all() for x in tokens), "read, and not here"
    return ["".join(map(str, x.tolist())) for x in tokens]

prompts = Prompts(
    ids_N=np.arange(5), tokens=tuple(np.ones(n + 2, np.int32) for n in range(5)),
    texts=("",) * 5, answers=("",) * 5, sources=("",) * 5, extras=({},) * 5,
)
me, fields = int(sys.argv[2]), ("tokens", "rollout_logprob", "entropy", "routes")
for layout, num_groups in (("1-1-6", 3), ("1-4-2", 2)):
    groups = module.replica_groups(mesh_of(layout))
    assert len(groups.processes) == num_groups
    own = groups.here[0] if groups.here else -1
    # By hand: each goes where there is least, 9 | 7 1 | 6 2 with three groups, 9 2 1 | 7 6 with two.
    work = [9.0, 7.0, 6.0, 2.0, 1.0]
    group_N = np.array([0, 1, 2, 2, 1] if num_groups == 3 else [0, 1, 1, 0, 0])
    limits = types.SimpleNamespace(max_prompt_tokens=99, max_response_tokens=99)
    for keeps_routes in (False, True):
        options = SamplingOptions(num_samples=2, seed=0, step=7, temperature=1.0)
        ours, expected = (SampleGroups(options, texts) for _ in range(2))
        for n in expected.add(prompts):
            for sample in expected.samples[n]:
                sampled(sample, keeps_routes)
        loops = DecodeLoops({g: Loop(keeps_routes) for g in groups.here}, groups)
        running = GroupLoop(ours, options, lambda: loops, dict, limits)
        running.add(prompts, np.array(work))
        # Until all have ended, and only then the lengths are told over the devices.
        ended, dispatches, on_devices = [], 0, keeps_routes
        while loops.num_unfinished(here=on_devices):
            loops.finish()
            dispatches += 1
            if not on_devices:
                ended += running.ended(loops.agree())
                firsts = [each[0] for each in groups.processes]
                assert loops.places == sum(10 * (first + 1) for first in firsts)
                # All begin with the first dispatch.
                for s in sum(ours.samples.values(), []):
                    elsewhere = not s.finished and s.holder != own
                    assert not elsewhere or (len(s), s.oldest_version) == (1, 0)
        if on_devices:
            ended = running.ended(loops.agree(on_devices=True))
        assert sorted(ended) == list(range(5)) and loops.num_unfinished() == 0
        # The same order on all processes.
        hosts.check_same("the order", [np.array(ended)])
        # Two to six samples of a group, halved by each dispatch.
        assert on_devices or dispatches == 3
        holder_B = np.repeat(group_N, 2)
        expected, found = expected.rollout().completions, ours.rollout().completions
        assert found.holder_B.tolist() == holder_B.tolist()
        own_B = holder_B == own

        def check(found, order, has_B):
            assert found.lengths_B.tolist() == expected.lengths_B[order].tolist()
            assert found.truncated_B.tolist() == expected.truncated_B[order].tolist()
            for name in ("version", *fields) if keeps_routes else ("version", *fields[:3]):
                for i, b in enumerate(order):
                    a, wanted = getattr(found, name)[i], getattr(expected, name)[b]
                    assert a.shape == wanted.shape and a.dtype == wanted.dtype, name
                    if has_B[i] or name == "version":
                        np.testing.assert_array_equal(a, wanted, err_msg=name)
                    else:
                        # Nothing in memory, and nothing that could be taken for a sample.
                        assert a.strides[0] == 0 and not (np.nan_to_num(a, nan=-1) + 1).any(), name
            for i in np.flatnonzero(has_B):
                assert found.texts[i] == found.turns[i][0].text == expected.texts[order[i]]

        check(found, np.arange(10), own_B)
        # Others for each process, none for one of them; after groups were left out and joined.
        parts = [found.take([4, 0]), found.take([]), found.take([3])]
        order = np.array([8, 9, 0, 1, 6, 7])
        wanted_B = np.random.default_rng(me).random(6) < (0 if me == 2 else .6)
        some = Completions.concatenate(parts).with_rows(wanted_B)
        check(some, order, own_B[order] | wanted_B)
        check(some.with_rows(True), order, np.ones(6, bool))
        assert len(found.take([]).with_rows(True)) == 0

        # Groups that are not finished, for a checkpoint: the tokens of all samples, wherever they are.
        ours, alone = (SampleGroups(options, texts) for _ in range(2))
        loops = DecodeLoops({g: Loop(keeps_routes) for g in groups.here}, groups)
        running = GroupLoop(ours, options, lambda: loops, dict, limits)
        running.add(prompts, np.array(work))
        loops.finish()
        running.ended(loops.agree())
        for n in alone.add(prompts):
            for ours_k, sample in zip(ours.samples[n], alone.samples[n], strict=True):
                if ours_k.finished:
                    sampled(sample, keeps_routes)
        wants = me != 1
        whole = ours.unfinished().whole(wants)
        if wants:
            theirs, wanted = whole.record(), alone.unfinished().record()
            assert 0 < len(whole.prompts) <= 5 and theirs.keys() == wanted.keys()
            for name in theirs:
                np.testing.assert_array_equal(theirs[name], wanted[name], err_msg=name)
            assert all(s.holder == -1 for s in whole.samples)
print("equal", own)
"""


@pytest.mark.long
def test_processes_get_the_lengths_of_all_samples_and_the_rows_that_they_want():
    address = f"localhost:{free_port()}"
    commands = [[sys.executable, "-c", PROGRAM, address, str(i)] for i in range(4)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    with started(commands, cwd=ROOT, env=env) as processes:
        told = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, told[0][1][-3000:]
    assert [out.split()[-2:] for out, _ in told] == [["equal", g] for g in "0011"]
