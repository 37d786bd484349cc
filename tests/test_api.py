"""`jaxrl.train` and `jaxrl.open_run`, as a notebook calls them."""

import datetime
import decimal
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extras import import_extra
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

import jaxrl
from jaxrl.api import build_config
from jaxrl.config.command_line import load_recipe
from jaxrl.config.config_tree import format_config
from jaxrl.data.problems import read_source
from jaxrl.errors import UserError
from jaxrl.user_code import load_function

ROOT = pathlib.Path(__file__).parents[1]
ROWS = [{"problem": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(8)]
# One small step, on one device of eight.
SMALL = {
    "placement": {"one": {"roles": ("actor", "reference"), "train": "1-1-1", "devices": "0-0"}},
    "train__rows": 8,
    "sft__num_steps": 0,
    "sft__run": "",
    "rollout__num_prompts": 2,
    "rollout__slots": 8,
    "rollout__prefill_prompts": 2,
    "rollout__generation_prompts": 2,
    "rollout__num_samples": 4,
    "rollout__max_response_tokens": 8,
    "algorithm__updates_per_step": 1,
    "run__save_every": 1,
    "model__num_layers": 1,
    "model__d_model": 32,
    "model__d_ff": 32,
}


def brevity(responses):
    return [1.0 / (1 + len(text)) for text in responses.texts]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_import_does_not_wait_for_jax():
    code = "import sys, jaxrl; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        jaxrl.trian  # noqa: B018


@pytest.mark.long
def test_train_on_rows_with_a_function(here):
    suffix = 3.0

    def reward(responses):  # holds a value of the program around it
        return [suffix + len(answer) for answer in responses.answers]

    metrics = jaxrl.train("grpo_tiny", data=ROWS, reward=reward, name="mine", num_steps=2, **SMALL)
    assert metrics["step"].to_pylist() == [1, 2]
    assert all(4.0 <= value <= 5.0 for value in metrics["critic/rewards/mean"].to_pylist())
    folder = pathlib.Path(metrics.schema.metadata[b"folder"].decode())
    assert folder == pathlib.Path("runs/mine/seed0") and (folder / "report.html").exists()
    # The same call again: the run is finished, and its metrics come back.
    again = jaxrl.train("grpo_tiny", data=ROWS, reward=reward, name="mine", num_steps=2, **SMALL)
    assert again.equals(metrics)
    # Anything else under the same name would mix two runs, and a refused call leaves nothing behind.
    before = sorted(folder.rglob("*"))
    again = {"data": ROWS, "reward": reward, "name": "mine", "num_steps": 3, **SMALL}
    for changes in (
        {"data": ROWS[:9]},
        {"reward": brevity},
        {"reward": [reward, brevity]},
        {"reward": None},
        {"evaluation": ROWS[:3]},
        {"optim__lr": 1.0},
    ):
        with pytest.raises(
            UserError, match=r"mine/seed0 holds a run that was made with other .*`name`"
        ):
            jaxrl.train("grpo_tiny", **{**again, **changes})
        with (
            pytest.raises(UserError, match="mine/seed0 holds a run that was made with other"),
            jaxrl.open_run("grpo_tiny", **{**again, **changes}),
        ):
            pass
    assert sorted(folder.rglob("*")) == before
    assert jaxrl.train("grpo_tiny", **again)["step"].to_pylist() == [1, 2, 3]


def test_a_loop_of_ones_own(here):
    drawn = []

    def mine(step, prompts):
        sampled = step.sample(prompts)
        drawn.append(sampled)
        batch = step.advantages(step.actor.logprobs(step.pack(sampled)))
        return batch.metrics | step.actor.update(batch)

    (here / "taken").mkdir()
    with (
        pytest.raises(UserError, match="taken exists and is not overwritten"),
        jaxrl.open_run("grpo_tiny", data=iter(ROWS), reward=brevity, **SMALL) as run,
    ):
        metrics = [run.step(), run.step(mine)]
        assert len(drawn) == 1
        for row in metrics:
            assert np.isfinite(row["actor/pg_loss"])
        run.save_model(here / "taken")
    # What was trained is not lost.
    run.save_model(here / "model")
    with pytest.raises(UserError, match="this run is closed"):
        run.step()
    assert {"config.json", "model.safetensors"} <= set(os.listdir(here / "model"))


def test_what_becomes_of_objects(here):
    def endless_rows(seed):
        return ({"problem": str(n), "answer": "1"} for n in itertools.count(seed))

    config = build_config(
        "grpo_tiny",
        model="Qwen/Qwen2.5-0.5B",
        data=({"problem": p, "answer": "1"} for p in "abc"),
        reward=lambda responses: [2.0],
        algorithm__entropy_coef=0.0,
        rollout__driver=endless_rows,
        optim__lr=1e-4,
        num_steps=3,
    )
    assert (
        config.weights == config.tokenizer.path == "Qwen/Qwen2.5-0.5B" and not config.sft.num_steps
    )
    assert (config.optim.lr, config.run.num_steps) == (1e-4, 3)
    assert pathlib.Path(config.data.train.path).read_text().count("\n") == 3
    # Data of one's own are not evaluated with a recipe's problems.
    assert not config.data.evaluation_sources
    reward = load_function(config.reward.functions["reward"]["path"], "it", takes=("responses",))
    assert reward("x") == [2.0]
    assert next(load_function(config.rollout.driver, "it")(5)) == {"problem": "5", "answer": "1"}
    # A cell that runs again means the same run.
    again = build_config("grpo_tiny", reward=brevity, name="brief")
    assert build_config("grpo_tiny", reward=brevity, name="brief") == again


def by_length(responses):
    return [float(len(text)) for text in responses.texts]


def test_several_rewards(here):
    (here / "mine.py").write_text("def third(responses):\n    return [0.0] * len(responses)\n")
    config = build_config("grpo_tiny", data=ROWS[:3], reward=[brevity, by_length, "mine.py:third"])
    assert pathlib.Path(config.data.train.path).read_text().count("\n") == 3
    assert list(config.reward.functions) == ["brevity", "by_length", "third"]
    assert {term["weight"] for term in config.reward.functions.values()} == {1.0}
    paths = [term["path"] for term in config.reward.functions.values()]
    assert load_function(paths[1], "it") is not load_function(paths[0], "it")
    assert paths[2] == "mine.py:third" and config.reward.grader_weight == 0.0
    with pytest.raises(UserError, match=r"reward 'brevity' of the list has no name of its own"):
        build_config("grpo_tiny", reward=[brevity, brevity], name="twice")
    with pytest.raises(UserError, match=r"<lambda>.* has no name of its own"):
        build_config("grpo_tiny", reward=[lambda responses: [1.0]], name="unnamed")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
TABLE = [
    {
        "prompt": MESSAGES,
        "answer": "007",
        "info": {"tags": ["a", "b"], "at": datetime.datetime(2024, 1, 31, 12, 30)},
        "day": datetime.date(2024, 1, 31),
        "cost": decimal.Decimal("1.50"),
        "level": 3,
        "share": 0.5,
        "hard": True,
    },
    {
        "prompt": MESSAGES[1:],
        "answer": "2",
        "info": {"tags": [], "at": None},
        "day": None,
        "cost": None,
        "level": None,
        "share": None,
        "hard": None,
    },
]
WRITTEN = [
    TABLE[0]
    | {
        "info": {"tags": ["a", "b"], "at": "2024-01-31 12:30:00"},
        "day": "2024-01-31",
        "cost": "1.50",
    },
    TABLE[1],
]


def kept_rows(here, data) -> list:
    """The rows of a run of its own that are kept of some data."""
    shutil.rmtree(here / "runs", ignore_errors=True)
    config = build_config("grpo_tiny", data=data)
    lines = pathlib.Path(config.data.train.path).read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    # They are problems.
    source = read_source(config.data.train, "data.train")
    assert len(source.records) == len(rows)
    return rows


def as_parquet(tmp_path) -> pathlib.Path:
    pq.write_table(pa.Table.from_pylist(TABLE), tmp_path / "table.parquet")
    return tmp_path / "table.parquet"


def test_pandas_itself(here):
    pandas = import_extra("dev", "pandas")
    assert kept_rows(here, pandas.DataFrame(ROWS)) == ROWS
    assert kept_rows(here, pandas.Series(ROWS)) == ROWS
    with pytest.raises(UserError, match="row 0 of train is str; give dicts"):
        kept_rows(here, pandas.Series(["1 + 1"]))
    # Lists of a file are arrays in a frame, and what is missing is NaN, NaT or None.
    path = as_parquet(here)
    assert kept_rows(here, pandas.read_parquet(path)) == WRITTEN
    assert kept_rows(here, pandas.read_parquet(path, dtype_backend="pyarrow")) == WRITTEN
    assert kept_rows(here, pandas.read_parquet(path, dtype_backend="numpy_nullable")) == WRITTEN


def test_tables_of_pyarrow(here):
    table = pq.read_table(as_parquet(here))
    assert kept_rows(here, table) == kept_rows(here, table.to_batches()[0]) == WRITTEN


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="in no extra")
def test_frames_of_polars(here):
    import polars  # pyright: ignore[reportMissingImports]

    path = as_parquet(here)
    for frame in (polars.read_parquet(path), polars.scan_parquet(path)):
        assert kept_rows(here, frame) == WRITTEN


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="in no extra")
def test_data_sets_of_datasets(here):
    import datasets  # pyright: ignore[reportMissingImports]

    whole = datasets.Dataset.from_parquet(str(as_parquet(here)), cache_dir=str(here / "cache"))
    assert kept_rows(here, whole) == kept_rows(here, whole.to_iterable_dataset()) == WRITTEN
    # Of NumPy's format all numbers of a column are floats if one is missing.
    numbers = whole.select_columns(["prompt", "answer", "info"]).with_format("numpy")
    assert kept_rows(here, numbers)[0]["prompt"] == MESSAGES


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([1.0, np.nan]), [1.0, None]),
        (np.array(7), 7),
        (np.array([], np.float32), []),
        (np.array(["2024-01-31"], "datetime64[ns]"), ["2024-01-31 00:00:00"]),
        (np.datetime64("2024-01-31T12:30:00.000000001"), "2024-01-31 12:30:00"),
        (np.datetime64("2024-01-31"), "2024-01-31 00:00:00"),
        (np.datetime64("NaT"), None),
        (np.timedelta64(90, "s"), "0:01:30"),
        (float("nan"), None),
        (decimal.Decimal("NaN"), None),
        (decimal.Decimal("0.10"), "0.10"),
        (datetime.time(12, 30), "12:30:00"),
        (
            {"a": (1, np.nan), 2: {"b": np.array([None, "x"], object)}},
            {"a": [1, None], "2": {"b": [None, "x"]}},
        ),
    ],
)
def test_values_of_rows_are_those_of_json(value, read, here):
    (row,) = kept_rows(here, [{"problem": "?", "answer": "1", "x": value}])
    assert row["x"] == read


@pytest.mark.parametrize(
    "value",
    [
        b"PNG",
        [b"PNG"],
        {"image": np.bytes_(b"PNG")},
        np.array([b"x"]),
        1j,
        object(),
        {1},
        np.void(b"a"),
    ],
)
def test_a_value_that_is_no_json_is_told_in_a_line(value, here):
    with pytest.raises(UserError, match="row 1 of train has a value that is no JSON") as raised:
        build_config("grpo_tiny", data=[{"problem": "?"}, {"problem": "?", "x": value}])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


@pytest.mark.slow
def test_a_function_typed_into_a_program_is_a_reward_as_an_object_and_not_as_a_path(here):
    """As in a notebook: the program has no file, and the run calls the function in another process."""
    small = {**SMALL, "run__num_steps": 1}
    code = f"""
import jaxrl
def reward(responses):
    return [0.5] * len(responses)
rows, small = {ROWS!r}, {small!r}
metrics = jaxrl.train("grpo_tiny", data=rows, reward=[reward], name="typed", **small)
assert metrics["reward/reward/mean"].to_pylist()[-1] == 0.5, metrics
try:
    jaxrl.train("grpo_tiny", data=rows, reward="__main__:reward", name="named", **small)
except jaxrl.errors.UserError as error:
    assert "cannot import what was typed" in str(error), error
else:
    raise AssertionError("taken")
"""
    subprocess.run([sys.executable, "-"], input=code.encode(), check=True, cwd=here)


def test_a_reward_that_uses_another_number_is_another_reward(here):
    def reward(responses):
        return [limit for _ in responses.texts]

    limit = 1.0
    config = build_config("grpo_tiny", reward=reward)
    assert build_config("grpo_tiny", reward=reward) == config
    limit = 2.0
    assert build_config("grpo_tiny", reward=reward) != config


def test_rows_are_for_the_sft_of_their_own_run(here):
    """Of grpo_tiny, whose SFT stage is shared by the recipes of the demo, and learnt from its sums."""
    assert build_config("grpo_tiny").sft.run == "dapo_tiny"
    assert build_config("grpo_tiny", data=ROWS).sft.run == ""
    assert build_config("grpo_tiny", data=ROWS, sft__run="x").sft.run == "x"
    small = {name: value for name, value in SMALL.items() if not name.startswith("sft__")}
    told = "row 0 of train-.* has no solution to learn from; .* sft[.]num_steps=0"
    with pytest.raises(UserError, match=told):
        jaxrl.train("grpo_tiny", data=ROWS, **small)
    assert not (here / "runs/dapo_tiny").exists()


@pytest.mark.long
def test_sft_learns_from_the_solutions_of_rows(here):
    rows = [row | {"solution": row["answer"]} for row in ROWS]
    jaxrl.train("grpo_tiny", data=rows, num_steps=1, **SMALL | {"sft__num_steps": 2})
    assert (here / "runs/grpo_tiny/seed0/sft").is_dir()
    assert not (here / "runs/dapo_tiny").exists()


def test_the_order_of_fields_makes_no_other_rows(here):
    """Nor that of a field's fields; the order of rows does."""
    rows = [{"problem": "a", "answer": "1", "x": {"b": 1, "c": 2}}, {"problem": "b", "answer": "2"}]
    turned = [dict(reversed(row.items())) for row in rows]
    turned[0]["x"] = {"c": 2, "b": 1}
    named = [build_config("grpo_tiny", data=each).data for each in (rows, turned, rows[::-1])]
    assert named[0] == named[1] != named[2]


def test_the_order_of_rewards_makes_no_other_run(here):
    lines = [
        format_config(build_config("grpo_tiny", reward=rewards))
        for rewards in ([brevity, by_length], [by_length, brevity], [brevity])
    ]
    assert lines[0] == lines[1] != lines[2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optim__lrr": 1.0}, 'unknown keyword "optim__lrr"; near: optim__lr='),
        ({"nothing": 1.0}, 'unknown keyword "nothing"; none is near'),
        ({"rewards": brevity}, 'unknown keyword "rewards"; near: reward='),
        ({"train_dataset": ROWS}, 'unknown keyword "train_dataset"; near: data='),
        # A name of TRL or verl is not compared by its letters, such as with num_steps or reward.
        (
            {"save_steps": 5},
            'unknown keyword "save_steps"; near: run__save_every=, sft__save_every=$',
        ),
        ({"scale_rewards": True}, "near: algorithm__advantage=, algorithm__advantage_options=$"),
        ({"nme": "mine"}, 'unknown keyword "nme"; near: name='),
        *(
            ({"reward": value}, "^reward = .*expected a function, its path, or a list of these")
            for value in (
                [],
                (),
                5,
                True,
                b"f",
                [5],
                [brevity, None],
                {},
                {"f": brevity},
                {"a.py:f"},
            )
        ),
        *(({"agent": value}, "^agent = .*expected a function") for value in (5, True, [brevity])),
        *(
            ({keyword: value}, f"^{keyword} = .*expected a path, or rows as dicts")
            for keyword in ("data", "evaluation")
            for value in (5, 0.5, True, b"rows", {"problem": "1"}, brevity, object())
        ),
        *(({"name": value}, "^name .* is empty") for value in ("", " ")),
        ({"name": "a\nb"}, r"^name = 'a\\nb': has the character"),
        ({"name": "é" * 200}, "^name = .*is too long for a file system"),
        ({"num_steps": "x"}, "^run.num_steps = 'x': "),
        ({"num_steps": 3, "run__num_steps": 4}, "both are given"),
        ({"model": 5}, "^weights = 5: "),
        ({"model": "x" * 5000}, "^weights .*is too long"),
        ({"data": "x" * 5000}, "^data.train.path .*is too long"),
        ({"reward": "x" * 5000 + ".py:f"}, "functions.reward.path .*is too long"),
        ({"data": [["a"]]}, "row 0 of train is list; give dicts"),
        ({"data": []}, "^train has no rows; give dicts$"),
        ({"evaluation": iter([])}, "^evaluation has no rows; give dicts$"),
        (
            {"data": [{"problem": "a"}, {"problem": {1}}]},
            "row 1 of train has a value that is no JSON",
        ),
        ({"optim__lr": "fast"}, "optim.lr"),
        (
            {"optim__lr": np.zeros((2, 2))},
            r"^optim.lr = array\(\[\[0., 0.\], \[0., 0.\]\]\): Input",
        ),
    ],
)
def test_a_mistake_is_one_line_and_keeps_nothing(here, changes, told):
    with pytest.raises(UserError, match=told) as caught:
        build_config("grpo_tiny", **changes)
    assert "\n" not in str(caught.value) and not list(here.iterdir())


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (5, "^recipe 5 is no recipe"),
        (None, "^recipe None is no recipe"),
        ({"optim": {"lr": 1.0}}, "^recipe .* is no recipe"),
        ("", 'no recipe file ""'),
        ("a\nb", r'no recipe file "a\\nb"'),
        ("a\0b", "no recipe file"),
        ("x" * 5000, "no recipe file"),
        (pathlib.Path("a/" * 3000 + "b.py"), "no recipe file"),
        (ConfigDict({"optimm": {}}), 'unknown setting "optimm"; near: optim'),
        (ConfigDict({"optim": 5}), '"optim" is a group of settings; near: optim.kind'),
        (ConfigDict({"mesh": None}), '"mesh" is a group of settings; near: mesh.train'),
        (ConfigDict({"optim": {"lrr": 1.0}}), 'unknown setting "optim.lrr"'),
        (ConfigDict({"optim": {"lr": placeholder(float, required=True)}}), "cannot be read"),
    ],
)
def test_what_is_no_recipe_is_one_line(here, recipe, told):
    with pytest.raises(UserError, match=told) as caught:
        build_config(recipe, data=ROWS)
    assert "\n" not in str(caught.value) and not list(here.iterdir())


def test_a_recipe_of_some_settings_has_the_others_by_default(here):
    """Also one that is not locked; and it is not changed."""
    recipe = ConfigDict({"name": "mine", "optim": {"lr": 1e-4}})
    config = build_config(recipe, rollout__num_prompts=np.int64(16))
    assert (config.name, config.optim.lr, config.rollout.num_prompts) == ("mine", 1e-4, 16)
    assert config.optim.betas == (0.9, 0.999)
    with pytest.raises(UserError, match='unknown keyword "optim__lrr"; near: optim__lr='):
        build_config(recipe, optim__lrr=1.0)
    assert recipe.to_dict() == {"name": "mine", "optim": {"lr": 1e-4}}


@pytest.mark.parametrize("loaded", [False, True])
def test_a_setting_that_follows_another_one_does_so_from_python_too(here, loaded):
    recipe = load_recipe("grpo_smollm2") if loaded else "grpo_smollm2"
    # The recipe's rate decays until the last step, whichever that is.
    assert build_config(recipe, num_steps=7).optim.lr_decay_steps == 7
    assert build_config(recipe).optim.lr_decay_steps == 24


def test_a_function_that_holds_a_lock_is_refused(here):
    lock = threading.Lock()

    def reward(responses):
        with lock:
            return [1.0]

    with pytest.raises(
        UserError, match=r"reward cannot be taken to another process .*my_functions.py"
    ):
        build_config("grpo_tiny", reward=reward)


@pytest.mark.long
def test_an_open_run_is_served_between_two_steps(here):
    openai = import_extra("dev", "openai")
    with jaxrl.open_run("grpo_tiny", data=iter(ROWS), reward=brevity, **SMALL) as run:
        run.step()
        with run.serve() as server:
            ask = {"model": server.model, "prompt": "3 + 4 =", "max_tokens": 4, "seed": 1}
            with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
                first, again = (client.completions.create(**ask).choices[0].text for _ in range(2))
                assert first == again
            other = openai.OpenAI(base_url=server.url, api_key="other", max_retries=0)
            with other, pytest.raises(openai.AuthenticationError):
                other.completions.create(**ask)
        assert np.isfinite(run.step()["actor/pg_loss"])
    with pytest.raises(UserError, match="this run is closed"), run.serve():
        pass


@pytest.mark.slow
def test_the_page_about_python_can_be_followed(here):
    """Its blocks in order, on the tiny model, which has no chat template: the last block is tested above."""
    page = (ROOT / "docs/python.md").read_text()
    blocks = [
        textwrap.dedent(block)
        for block in re.findall(r"(?:^(?: {4}.*)?\n)+", page, re.MULTILINE)
        if block.strip()
    ]
    assert len(blocks) == 3 and "run.serve()" in blocks.pop()
    names: dict = {"small": SMALL}
    for block in blocks:
        code = block.replace('"grpo_smollm2", ', '"grpo_tiny", **small, ')
        assert code != block
        exec(code.replace("num_steps=20", "num_steps=1").replace("range(10)", "range(1)"), names)
    assert names["metrics"] and (here / "my_model" / "config.json").is_file()
