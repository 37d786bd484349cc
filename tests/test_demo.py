"""The table of DAPO's techniques, by hand, and its rows."""

import json
import pathlib

import demo

from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import flatten_config
from jaxrl.config.schema import Config

RECIPE = pathlib.Path(__file__).parents[1] / "configs/long_answers_tiny.py"


def log(*accuracies: float) -> list[dict]:
    quantities = {key: 0.25 for key in demo.QUANTITIES}
    return [{"step": 10 * n, "acc": a} | quantities for n, a in enumerate(accuracies)]


def test_a_table_of_two_seeds():
    # Student's t of one degree of freedom is 12.706, and the error of the mean of 50 and 60 is 5.
    logs = {"naive": [log(0.5, 0.7), log(0.6, 0.6)], "+ more": [log(0.5, 0.8), log(0.6, 0.9)]}
    rows = [line.split(" | ")[:4] for line in demo.table_of_techniques("acc", logs).splitlines()]
    assert rows[2:] == [
        ["| warm start", "55.0 ± 63.5", "", "50.0, 60.0"],
        ["| naive", "65.0 ± 63.5", "10.0 ± 127.1", "70.0, 60.0"],
        ["| + more", "85.0 ± 63.5", "20.0 ± 127.1", "80.0, 90.0"],
    ]
    assert demo.with_interval([7.0]) == "7.0"


def test_useful_groups_are_those_of_all_that_were_sampled(tmp_path):
    (tmp_path / "rl").mkdir()
    sampled = {f"training/filter_groups/all_{kind}": 0.25 for kind in ("correct", "wrong")}
    rows = [
        {"step": 1, "train/mixed_groups": 1.0} | sampled,
        {"step": 2, "train/mixed_groups": 0.75},
    ]
    (tmp_path / "rl" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [row["useful_groups"] for row in demo.rows_of(tmp_path)] == [0.5, 0.75]


def test_the_last_row_is_the_recipe():
    recipe = flatten_config(load_config(Config, str(RECIPE), {}))
    last = [*demo.compared("techniques").values()][-1]
    assert {key: recipe[key] for key in last} == last
