"""The page of a plan, and the comparison of two saved plans: what they show, and what is refused."""

import dataclasses
import functools
import html.parser
import json
import pathlib
import re

import jax
import pytest
from report_page import check_page

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.hardware import accelerator
from jaxrl.planner import plan_tables
from jaxrl.planner.compare_plans import compare_plans
from jaxrl.planner.compiled.ahead import CompiledProgram
from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.hardware.topologies import Topology
from jaxrl.planner.plan import VERSION, Plan, Target
from jaxrl.planner.plan_page import write_plan_page
from jaxrl.planner.search.mapping import Alternative
from jaxrl.planner.search.mapping_choice import propose
from jaxrl.planner.step_times import StepTimes
from jaxrl.planner.trace_plan import trace_plan

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
PPO = str(CONFIGS / "ppo_llama8b.py")


@functools.cache
def pod_plan(topology: str = "h100:16x8", layout: str = "h100-128") -> Plan:
    config = load_config(Config, str(CONFIGS / f"dapo_qwen32b.py:{layout}"), {})
    return trace_plan(config, Cluster.parse(topology))


def times_of(plan: Plan) -> StepTimes:
    assert plan.times is not None
    return plan.times


@functools.cache
def ppo_plan() -> Plan:
    cluster = Cluster.parse("h100:2x8")
    found, proposed = propose(load_config(Config, PPO, {}), cluster, within=0.1)
    return dataclasses.replace(trace_plan(proposed, cluster), alternatives=found.alternatives)


class _Text(html.parser.HTMLParser):
    """The text of a page, and the widths of its bars."""

    def __init__(self):
        super().__init__()
        self.words, self.bars = [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if attributes.get("class") == "bar":
            self.bars.append([])
        found = re.match(r"width: ([\d.]+)%", attributes.get("style") or "")
        if tag == "i" and found:
            self.bars[-1].append(float(found[1]))

    def handle_data(self, data):
        self.words += data.split()


def page_of(plan: Plan, tmp_path: pathlib.Path) -> tuple[str, list[list[float]]]:
    path = tmp_path / "plan.html"
    write_plan_page(path, plan)
    check_page(path.read_text(), plots=False)
    page = _Text()
    page.feed(path.read_text())
    return " ".join(page.words), page.bars


def test_the_page_says_what_is_rented_for_how_long_and_for_how_much(tmp_path):
    plan = dataclasses.replace(pod_plan(), price_per_hour=2.5)
    text, _ = page_of(plan, tmp_path)
    times = times_of(plan)
    hours = times.step_s * 400 / 3600
    assert "devices 128 h100" in text and f"hours of 400 steps {hours:.0f}" in text
    assert f"price, at 2.5 an hour {hours * 128 * 2.5:,.0f}" in text
    assert "price" not in page_of(pod_plan(), tmp_path)[0]
    assert times.load.lengths.text in text
    assert "1,536 prompts x 16 answers = 24,576 are sampled, 8,192 are kept" in text
    assert " of a step, bound by memory" in text and "cache read, " in text


def test_bars_are_as_long_as_what_they_show(tmp_path):
    plan = pod_plan()
    _, bars = page_of(plan, tmp_path)
    tasks = [task.expected.total_s for task in times_of(plan).tasks]
    (pool,) = plan.pools
    memory = [pool.bytes_in("sampling"), pool.bytes_in("learning")]
    expected = [100 * s / max(tasks) for s in tasks] + [100 * n / 80e9 for n in memory]
    assert [sum(bar) for bar in bars] == pytest.approx(expected, abs=0.5)


def test_the_use_of_slots_is_in_text_json_and_page(tmp_path, capsys):
    """The figures of the replay: all tokens of the lengths, decoded in the busy slots."""
    plan = pod_plan()
    times = times_of(plan)
    (sampling,) = times.of_stage("generation")
    use, work = sampling.expected.slot_use, times.load.work
    assert use is not None and 0 < use.busy < use.slots
    tokens = times.load.prompts * times.load.samples * work.response_lengths.mean
    steps = tokens / use.busy
    assert steps <= use.dispatches * work.tokens_per_dispatch < 2 * steps
    plan_tables.show(plan)
    page = tmp_path / "plan.html"
    write_plan_page(page, plan)
    assert use.text in capsys.readouterr().out and use.text in page.read_text()
    found = plan.as_json()["predicted"]["phases"][0]["slot_use"]
    assert found == {
        "busy": use.busy,
        "slots": use.slots,
        "dispatches": use.dispatches,
        "preempted": use.preempted,
    }


def test_a_device_that_is_too_small_is_named(tmp_path):
    config = load_config(Config, str(CONFIGS / "dapo_qwen7b.py"), {"rollout.slots": "512"})
    text, bars = page_of(trace_plan(config, Cluster.parse("v5e:2x4")), tmp_path)
    assert "37.3 GB more than a device has" in text
    assert max(sum(bar) for bar in bars) == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize(("others", "lacking"), [(20, False), (60, True)])
def test_a_compiled_plan_has_a_bar_of_each_program(others, lacking, tmp_path):
    gb = 10**9
    update = CompiledProgram(
        *("actor", "update", "learning", 9 * gb, 20 * gb, 32 * gb, others * gb, 80 * gb),
        *(1e15, 1e9, (), 128, 1.0, False),
    )
    plan = pod_plan()
    topology = Topology("h100:16x8", accelerator("h100"), tuple(jax.devices()), 8)
    pool = dataclasses.replace(plan.pools[0], programs=(update,))
    target = Target(topology, "bfloat16")
    text, bars = page_of(dataclasses.replace(plan, pools=(pool,), target=target), tmp_path)
    there = topology.memory_bytes
    track = max(there, (32 + others) * gb)
    parts = [others, 9, 20, 3]
    assert bars[-1] == pytest.approx([100 * n * gb / track for n in parts], abs=0.01)
    assert "arguments 9.00 GB temporaries 20.00 GB results 3.00 GB" in text
    assert ("does not fit" in text) == lacking
    assert ("more than a device has" in text) == lacking


def test_every_role_has_its_devices(tmp_path):
    plan = ppo_plan()
    text, _ = page_of(plan, tmp_path)
    taken = [n for pool in plan.pools for n in pool.devices]
    assert sorted(taken) == list(range(16))
    for pool in plan.pools:
        assert f"{pool.num_devices} devices: {', '.join(pool.roles)}" in text
        for kind, groups in pool.groups:
            assert f"{kind} {groups}" in text
    page = (tmp_path / "plan.html").read_text()
    drawn = re.findall(r'<i style="background: var\(--c(\d)\)">(G\d+)</i>', page)
    owners = {
        position: (str(i), f"G{n + 1}")
        for i, pool in enumerate(plan.pools)
        for n, position in enumerate(pool.devices)
    }
    assert drawn == [owners[position] for position in range(16)]
    assert text.count("host 0") == text.count("host 1") == 1


def test_pools_that_do_not_divide_over_hosts_are_refused():
    placement = {
        "policy": {"roles": ("actor", "reference"), "train": "1-1-9", "generate": "1-1-1-9"},
        "value": {"roles": ("critic",), "train": "1-1-7", "generate": "1-1-1-7"},
    }
    config = load_config(Config, str(CONFIGS / "ppo_tiny.py"), {"mesh.fsdp": "1"})
    config = dataclasses.replace(
        config,
        placement=placement,
        train=dataclasses.replace(config.train, rows=63),
        rollout=dataclasses.replace(config.rollout, slots=63, prefill_prompts=63),
    )
    rule = "h100:2x8, a process on each host: pool policy .* a multiple of 2"
    with pytest.raises(UserError, match=rule):
        trace_plan(config, Cluster.parse("h100:2x8"))


def test_alternatives_are_within_ten_percent_and_slower(tmp_path):
    plan = ppo_plan()
    assert plan.alternatives
    assert all(0 <= each.slower <= 0.1 for each in plan.alternatives)
    assert any("|" in each.name for each in plan.alternatives), "no other placement"
    assert any("slots a replica" in each.name for each in plan.alternatives), "no other layout"
    text, _ = page_of(plan, tmp_path)
    for each in plan.alternatives:
        assert f"{each.name} {each.slower:+.1%}" in text
    nothing = dataclasses.replace(plan, alternatives=())
    assert "No other mapping comes within 10%" in page_of(nothing, tmp_path)[0]


def test_names_in_a_plan_stay_text(tmp_path):
    changed = dataclasses.replace(
        pod_plan(), title="<script>", alternatives=(Alternative("<b>x", 0.05),)
    )
    assert "<b>x +5.0%" in page_of(changed, tmp_path)[0]


def saved(tmp_path, name: str, plan: Plan, **changes) -> pathlib.Path:
    path = tmp_path / name
    path.write_text(json.dumps(plan.as_json() | changes))
    return path


def test_two_plans_side_by_side(tmp_path, capsys):
    first = saved(tmp_path, "a.json", dataclasses.replace(pod_plan(), price_per_hour=2.0))
    second = saved(tmp_path, "b.json", pod_plan("v5p:4x4x8", "v5p-128"))
    page = tmp_path / "page.html"
    assert cli.run("plan", ["plan", "--compare", str(first), str(second), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    times = times_of(pod_plan())
    rows = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.setdefault(cells[0], cells[1:])
    price = times.chip_hours(times.step_s) * 2
    assert rows["topology"] == ["h100:16x8", "v5p:4x4x8"]
    assert rows["a step"][0] == f"{times.step_s:,.1f} s"
    assert rows["price"] == [f"{price:,.0f}, at 2 per chip-hour", ""]
    assert rows["rollout.slots"] == ["3600", "4464"]
    assert rows["memory, sampling"][0].endswith("GB")
    assert "mesh.train" not in rows, "equal in both"
    check_page(page.read_text(), plots=False)
    assert "<td><code>4464</code></td>" in page.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON; name a file that `jaxrl plan --json` wrote"),
        ("[1]", "is no plan"),
        ('{"version": 1}', "is no plan"),
        ('{"pools": [], "fits": true}', "has no version, .* make the plan again"),
        (f'{{"pools": [], "fits": true, "version": {VERSION + 1}}}', f"has version {VERSION + 1}"),
    ],
)
def test_what_is_no_plan_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        compare_plans([path, path])
    assert cli.run("plan", ["plan", "--compare", str(path), str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_with_missing_figures_is_refused(tmp_path):
    broken = saved(tmp_path, "a.json", pod_plan(), predicted={"step_s": 1.0})
    with pytest.raises(UserError, match="lacks 'topology'"):
        compare_plans([broken, broken])


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        compare_plans([tmp_path / "none.json", tmp_path])


@pytest.mark.parametrize("price", ["-1", "0", "nan", "inf"])
def test_an_impossible_price_is_refused(price, capsys):
    arguments = ["--config", PPO, "--topology", "h100:1x8", f"--price-per-hour={price}"]
    assert cli.run("plan", ["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert "is no price" in error and error.count("\n") == 1


def test_a_page_that_cannot_be_written_is_refused_before_planning(tmp_path, capsys):
    assert cli.run("plan", ["plan", "--config", PPO, "--html", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_a_plan_needs_a_recipe(capsys):
    assert cli.run("plan", ["plan"]) == 2
    assert "no recipe is named; add --config" in capsys.readouterr().err


def test_a_layout_of_25_devices_is_told_the_next_topology_that_exists():
    changes = {"mesh.train": "1-1-25", "mesh.generate": "1-1-1-25", "mesh.fsdp": "1"}
    config = load_config(
        Config,
        str(CONFIGS / "grpo_tiny.py"),
        changes
        | {"mesh.simulated_devices": "0", "train.rows": "25", "rollout.slots": "25"}
        | {"rollout.prefill_prompts": "25"},
    )
    with pytest.raises(UserError, match=r"choose v5e:4x8 \(32 devices\)"):
        trace_plan(config, Cluster.parse("v5e:2x4"))
