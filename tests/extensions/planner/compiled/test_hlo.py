"""Lines as XLA writes them for CPU and TPU."""

import numpy as np
import pytest

from jaxrl_planner.compiled.traffic import Collective, collectives, computations_of, runs_of


def parse(line: str, num_devices: int = 8) -> Collective:
    (found,) = collectives(f"  {line}\n", num_devices)
    return found


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['axis_0'=8] {'axis_0'}", (tuple(range(8)),)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        (
            "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        # The minor half of the second axis.
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_groups_in_every_notation(groups, expected):
    line = (
        f"ROOT %all-gather.1 = f32[4,16]{{1,0}} all-gather(%copy), channel_id=2, replica_groups={groups}, "
        "dimensions={0}, use_global_device_ids=true"
    )
    assert parse(line) == Collective("all-gather", expected, 4 * 16 * 4)


@pytest.mark.parametrize(
    ("instruction", "received"),
    [
        ("f32[4,16]{1,0} all-gather(%p)", 192),
        ("(f32[4,16]{1,0}, bf16[8]{0}) all-gather(%p, %q)", 204),
        ("(f32[1,16]{1,0}, f32[4,16]{1,0}) all-gather-start(%p)", 192),
        ("bf16[64]{0:T(256)(2,1)} all-reduce(%p)", 192),
        ("f32[16]{0} reduce-scatter(%p)", 192),
        ("(f32[16]{0}, f32[16]{0}, f32[16]{0}, f32[16]{0}) all-to-all(%a, %b, %c, %d)", 192),
        ("pred[192]{0} all-gather(%p)", 144),
    ],
)
def test_received_bytes_by_kind(instruction, received):
    found = parse(f"%x = {instruction}, replica_groups=[2,4]<=[8], dimensions={{0}}")
    np.testing.assert_array_equal(found.received(8), np.full(8, received))


@pytest.mark.parametrize(
    "instruction",
    [
        "f32[16]{0} collective-permute(%p)",
        "(f32[16]{0}, f32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p)",
    ],
)
def test_only_targets_of_other_devices_receive_from_a_permute(instruction):
    found = parse(f"%x = {instruction}, source_target_pairs={{{{0,0}},{{2,1}},{{1,2}}}}")
    assert found.received(4).tolist() == [0, 64, 64, 0]


def test_other_lines_are_no_collectives():
    text = """
  %collective-permute-done = f32[2]{0} collective-permute-done(%collective-permute-start)
  %copy.1 = f32[4]{0} copy(%all-gather.1), metadata={op_name="all-gather"}
"""
    assert collectives(text, 8) == []


def test_rows_that_depend_on_data_count_as_their_room():
    line = "%x = bf16[8,4] ragged-all-to-all(%a, %b, %c, %d, %e, %f), replica_groups={{0,1,2,3}}"
    (found,) = collectives(line, 4)
    assert (found.kind, found.result_bytes) == ("ragged-all-to-all", 64)
    assert found.received(4).tolist() == [48.0] * 4


def test_what_cannot_be_counted_is_not_passed_over():
    with pytest.raises(AssertionError, match="cannot count"):
        collectives("%x = f32[2] collective-broadcast(%a), replica_groups={{0,1}}", 2)
    with pytest.raises(AssertionError, match="unknown notation"):
        collectives("%x = f32[2] all-gather(%a), replica_groups=odd", 2)


ELEMENTS = """
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[]{:T(128)}, /*index=1*/f32[4,2]{1,0:T(8,128)}) parameter(0)
  %one = s32[] constant(1)
  %next = s32[] add(%t#0, %one)
  ROOT %out = (s32[], f32[4,2]) tuple(%next, %t#1)
}

%test (u: (s32[], f32[4])) -> pred[] {
  %u = (s32[], f32[4,2]) parameter(0)
  %most = s32[] constant(28)
  ROOT %less = pred[] compare(%u#0, %most), direction=LT
}

ENTRY %main (x: f32[4,2]) -> f32[4,2] {
  %x = f32[4,2] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,2]) tuple(%zero, %x)
  %loop = (s32[], f32[4,2]) while(%start), condition=%test, body=%body
  ROOT %end = f32[4,2] copy(%loop#1)
}
"""


def test_elements_of_tuples_in_the_short_notation():
    """As libtpu 0.0.52 writes some programs for a v6e."""
    computations, entry = computations_of(ELEMENTS)
    assert computations["body"]["t#1"].type == "f32[4,2]{1,0:T(8,128)}"
    assert runs_of(computations, entry)["body"] == 28
