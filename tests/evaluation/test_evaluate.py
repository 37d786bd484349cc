"""`jaxrl evaluate`: evaluates a model on sets of problems, without a training config."""

import dataclasses
import io
import json
import os
import pathlib
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import free_port, started

from jaxrl import cli
from jaxrl.data.chat import ChatTemplate
from jaxrl.data.generated_problems import TaskProblems
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError
from jaxrl.evaluation import answer_writer, eta_line, evaluate_command, evaluating
from jaxrl.evaluation.eta_line import EtaLine
from jaxrl.evaluation.evaluate_config import EvaluateConfig
from jaxrl.evaluation.evaluating import evaluate, plan_evaluation, table_of
from jaxrl.evaluation.evaluation_page import write_evaluation_page
from jaxrl.evaluation.policy_loading import find_model
from jaxrl.mesh import devices as mesh_devices
from jaxrl.mesh.devices import build_generation_mesh
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import adapter_config_json, config_json
from jaxrl.models.huggingface.model_files import write_json
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.testing.arithmetic_backend import ArithmeticBackend
from jaxrl.tracking.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=320, num_layers=2, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8
)
SMALL = {"max_response_tokens": 12, "slots": 8, "prefill_prompts": 2, "dtype": "float32"}


def random_params(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32),
        decoder_graph(model)[1],
    )


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_tokenizer(["one two three four: Answer: 7"] * 4, vocab_size=300)
    chat = ChatTemplate(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        origin="test",
        special_tokens=trained.special_tokens,
    )
    return dataclasses.replace(trained, chat_template=chat)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer) -> pathlib.Path:
    root = tmp_path_factory.mktemp("evaluate")
    tokenizer.save(root / "tokenizer")
    out = root / "tiny-model"
    save_checkpoint(random_params(MODEL), MODEL, out, dtype="float32", source=root / "tokenizer")
    return out


def run_folder(path, tokenizer, model, steps, **settings) -> pathlib.Path:
    """The folder of a run with checkpoints of some RL steps."""
    tokenizer.save(path / "model")
    write_json(
        path / "model" / "config.json", config_json(lora.base_config(model), dtype="float32")
    )
    if model.lora.rank:
        write_json(path / "model" / "adapter_config.json", adapter_config_json(model, base="x"))
    lines = "".join(f"{name.replace('__', '.')} = {value!r}\n" for name, value in settings.items())
    (path / "config.txt").write_text(lines)
    checkpoints = Checkpoints(path / "rl" / "checkpoints", keep=None)
    checkpoints.prepare(None)
    for step, params in steps.items():
        state = TrainState(params, {"moments": jnp.zeros(3)}, jnp.int32(step))
        checkpoints.save(step, {"actor": state}, {})
        checkpoints.commit()
    checkpoints.close()
    return path


@pytest.fixture
def problems(tmp_path) -> list[str]:
    """Two sets: one that the arithmetic model below answers right, and one that it does not."""
    for name, answers in (("right", [7, 7, 7]), ("wrong", [8, 8])):
        rows = [{"problem": f"one two {i}", "answer": a} for i, a in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(tmp_path / "right.jsonl"), str(tmp_path / "wrong.jsonl")]


def config_of(directory, sets, out, **changes) -> EvaluateConfig:
    given = {**SMALL, "n": 4, **changes}
    return EvaluateConfig(model=str(directory), sets=tuple(sets), out=str(out), **given)


def says(tokenizer, *texts):
    """A backend whose sample k is the k-th text and a stop token."""

    def respond(prompt, index):
        tokens = tokenizer.encode(texts[index % len(texts)])
        return np.append(tokens, tokenizer.eos_id).astype(np.int32)

    def build(driver, model, mesh, config, decode_texts):
        return ArithmeticBackend(mesh, config, decode_texts, respond)

    return build


def quiet(text):
    del text


def rows_of(out) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_bytes().splitlines()]


def test_right_answers_are_counted_by_set(directory, tokenizer, problems, tmp_path):
    out = tmp_path / "out"
    planned = plan_evaluation(config_of(directory, problems, out))
    build = says(tokenizer, "Answer: 7", "Answer: 7", "one two", "Answer: 8")
    results = evaluate(planned, say=quiet, build=build)
    assert list(results) == ["right", "wrong", "all"]
    right, wrong, both = (results[name] for name in results)
    assert right.problems == 3 and wrong.problems == 2 and both.problems == 5
    assert right.statistics["mean@4"].value == 1 / 2
    assert wrong.statistics["mean@4"].value == 1 / 4
    assert both.statistics["mean@4"].value == pytest.approx((3 * 2 + 2) / 20)
    assert both.statistics["pass@4"].value == 1 and right.statistics["pass@2"].value == 5 / 6
    assert right.without_answer == 1 / 4 and right.truncated == 0
    assert right.entropy == pytest.approx(1)
    written = json.loads((out / "results.json").read_text())
    assert written["results"]["right"]["statistics"]["mean@4"]["value"] == 1 / 2
    assert written["settings"]["n"] == 4
    rows = rows_of(out)
    assert len(rows) == 20 and rows[0]["completion"] == "Answer: 7" and rows[0]["correct"]
    assert "token_pieces" not in rows[0]
    text = table_of(results)
    assert "mean@4" in text and "50.0% ± 0.0%" in text and "best@" not in text


def test_grader_failures_are_counted(directory, tokenizer, problems, tmp_path, capfd):
    own = tmp_path / "own.py"
    own.write_text(
        "from jaxrl.rewards import Grade\n"
        "def grade(response, answer):\n"
        "    return Grade(1 / (response != '7') > 2, response)\n"
    )
    out, graded = tmp_path / "out", {"grader": f"{own}:grade", "grader_workers": 1, "n": 2}
    planned = plan_evaluation(config_of(directory, problems[:1], out, **graded))
    results = evaluate(planned, say=quiet, build=says(tokenizer, "7", "1"))
    assert results["right"].failed == 3 and results["right"].statistics["mean@2"].value == 0
    assert "grader failed" in table_of(results)
    failures = [row["failure"] for row in rows_of(out)]
    assert [f and f["kind"] for f in failures] == ["raised", None] * 3
    assert "ZeroDivisionError" in failures[0]["message"]
    page = write_evaluation_page(planned.answers.folder, title="x", table=table_of(results))
    assert "grader failed (raised)" in page.read_text()
    # They are counted after a second start too.
    again = plan_evaluation(config_of(directory, problems[:1], out, **graded))
    assert evaluate(again, say=quiet)["right"].failed == 3
    capfd.readouterr()


def test_it_continues_from_complete_problems(directory, tokenizer, problems, tmp_path):
    out = tmp_path / "out"
    config = config_of(directory, problems, out, tokens=True)
    build = says(tokenizer, "Answer: 7", "Answer: 8")
    whole = evaluate(plan_evaluation(config), say=quiet, build=build)
    before = (out / "samples.jsonl").read_bytes()
    lines = before.splitlines(keepends=True)
    # A death within the third problem's answers, and a line that is cut.
    (out / "samples.jsonl").write_bytes(b"".join(lines[:10]) + lines[10][:40])
    planned = plan_evaluation(config)
    assert len(planned.answers.answers) == 2
    told = []
    assert evaluate(planned, say=told.append, build=build) == whole
    assert "has the answers to 2 of 5 problems" in told[0]
    assert (out / "samples.jsonl").read_bytes() == before
    # Complete: no weights are read.
    again = plan_evaluation(config)

    def never(*args):
        raise AssertionError("everything is answered")

    assert evaluate(again, say=quiet, build=never) == whole
    assert (out / "samples.jsonl").read_bytes() == before


def test_other_settings_need_another_folder(directory, tokenizer, problems, tmp_path):
    out = tmp_path / "out"
    build = says(tokenizer, "Answer: 7")
    evaluate(plan_evaluation(config_of(directory, problems, out)), say=quiet, build=build)
    before = sorted((p.name, p.read_bytes()) for p in out.iterdir())
    for changes in ({"temperature": 0.5}, {"n": 2}, {"template": "{prompt}?"}, {"limit": 1}):
        with pytest.raises(UserError, match="were asked for otherwise"):
            plan_evaluation(config_of(directory, problems, out, **changes))
    # Where and how fast is nothing that answers depend on.
    plan_evaluation(config_of(directory, problems, out, slots=4, mesh="1-1-2"))
    assert sorted((p.name, p.read_bytes()) for p in out.iterdir()) == before


def test_other_weights_in_the_same_directory_are_noticed(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer")
    names = []
    for seed in (0, 1):
        out = tmp_path / f"model{seed}"
        params = random_params(MODEL, seed)
        save_checkpoint(params, MODEL, out, dtype="float32", source=tmp_path / "tokenizer")
        names.append(find_model(out).weights)
    assert names[0] != names[1]


def test_the_default_folder_is_unique(directory, problems, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folders = [
        str(plan_evaluation(config_of(directory, problems, "", **changes)).answers.folder)
        for changes in ({}, {}, {"n": 5}, {"slots": 16})
    ]
    assert folders[0] == folders[1] == folders[3] != folders[2]
    assert folders[0].startswith("evaluations/tiny-model-")
    assert not (tmp_path / "evaluations").exists()


# The folder of a run


def test_the_default_dtype_is_that_of_the_run_or_the_fastest(
    tmp_path, directory, tokenizer, problems, monkeypatch
):
    steps = {1: random_params(MODEL, 1)}
    run = run_folder(tmp_path / "run", tokenizer, MODEL, steps, rollout__dtype="bfloat16")

    def type_of(model, out, dtype="auto"):
        planned = plan_evaluation(config_of(model, problems, tmp_path / out, dtype=dtype))
        return planned.engine.dtype

    assert EvaluateConfig(model="m", sets=("s",)).dtype == "auto"
    assert [type_of(run, "a"), type_of(directory, "b")] == ["bfloat16", "float32"]
    assert type_of(run, "c", dtype="float32") == "float32"
    monkeypatch.setattr(mesh_devices, "platform_of", lambda mesh: "tpu")
    assert type_of(directory, "d") == "bfloat16"


def test_a_run_is_evaluated_by_its_newest_checkpoint(tmp_path, tokenizer, problems):
    steps = {step: random_params(MODEL, step) for step in (1, 2)}
    run = run_folder(tmp_path / "run", tokenizer, MODEL, steps, data__template="Q: {prompt}\n")
    found = find_model(run)
    assert found.run and found.weights.startswith("rl step 2, ")
    mesh = build_generation_mesh("1-1-1")
    jax.tree.map(np.testing.assert_array_equal, found.load(mesh, "float32"), steps[2])
    assert {x.dtype for x in jax.tree.leaves(found.load(mesh, "bfloat16"))} == {
        jnp.dtype("bfloat16")
    }
    planned = plan_evaluation(config_of(run, problems, tmp_path / "out"))
    assert planned.prompts.texts[0] == "Q: one two 0\n"
    given = plan_evaluation(config_of(run, problems, tmp_path / "out", template="{prompt}!"))
    assert given.prompts.texts[0] == "one two 0!"
    # Like in training, a damaged checkpoint is passed over.
    damaged = next(
        p for p in (run / "rl/checkpoints/2").rglob("*") if p.is_file() and p.stat().st_size
    )
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    assert find_model(run).weights.startswith("rl step 1, ")


def test_adapters_of_a_run_are_merged(tmp_path, tokenizer):
    adapted = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, targets=("q", "up")))
    params = random_params(adapted)
    run = run_folder(tmp_path / "run", tokenizer, adapted, {1: params})
    found = find_model(run)
    assert found.model.lora.rank == 0
    merged = found.load(build_generation_mesh("1-1-1"), "float32")
    expected = lora.merge(params, adapted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, expected)


def test_a_run_and_its_export_answer_alike(tmp_path, tokenizer, directory):
    run = run_folder(tmp_path / "run", tokenizer, MODEL, {1: random_params(MODEL)})
    mesh = build_generation_mesh("1-2-1")
    ours = find_model(run).load(mesh, "float32")
    theirs = find_model(directory).load(mesh, "float32")
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert all(
        a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    )


# The command, with a real model


def run_command(*arguments) -> int:
    given = [f"--{name}={value}" for name, value in SMALL.items()]
    return cli.main(["jaxrl", "evaluate", *given, *map(str, arguments)])


def test_one_command(directory, problems, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["--model", directory, "--set", problems[0], "--n", 2, "--top_p", 0.7]
    assert run_command(*asked) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["right"] and "mean@2" in out
    assert "3 of 3 problems" in err and "eta" not in err.splitlines()[-2]
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert {p.name for p in folder.iterdir()} == {
        "settings.json",
        "samples.jsonl",
        "results.json",
        "samples.html",
    }
    before = rows_of(folder)
    # On another mesh, with other slots: the same answers.
    assert run_command(*asked, "--out", tmp_path / "other", "--mesh", "1-1-2", "--slots", 4) == 0
    key = lambda row: (row["prompt_id"], row["sample"])  # noqa: E731
    assert [r["completion"] for r in sorted(before, key=key)] == [
        r["completion"] for r in sorted(rows_of(tmp_path / "other"), key=key)
    ]


ENVIRONMENT = """
def again(turn, tokenizer):
    # The first turn is answered, the second one ends the sample.
    return tokenizer.encode("four") if len(turn.response) == len(turn.tokens) else None
"""


def test_stop_strings_and_environments(directory, problems, tmp_path, tokenizer):
    (tmp_path / "tools.py").write_text(ENVIRONMENT)
    asked = ["--model", directory, "--set", problems[0], "--n", 2, "--tokens"]
    assert run_command(*asked, "--out", tmp_path / "plain") == 0
    plain = {(r["prompt_id"], r["sample"]): r for r in rows_of(tmp_path / "plain")}
    # A text that some answer has in its middle.
    stop = next(
        p for r in plain.values() for p in r["token_pieces"]["text"][2:6] if p.isascii() and p
    )
    stops = ["--stop", "never said", "--stop", stop]
    assert run_command(*asked, *stops, "--out", tmp_path / "stops") == 0
    tools = ["--environment", f"{tmp_path / 'tools.py'}:again"]
    assert run_command(*asked, *stops, *tools, "--out", tmp_path / "tools") == 0
    answered = 0
    for row in rows_of(tmp_path / "stops"):
        whole = plain[row["prompt_id"], row["sample"]]["completion"]
        assert whole.startswith(row["completion"].rstrip("\N{REPLACEMENT CHARACTER}"))
        assert (row["stop_reason"] == "stop_string") == (stop in whole)
    four = len(tokenizer.encode("four"))
    for row in rows_of(tmp_path / "tools"):
        given = row["token_pieces"].get("given", [])
        assert len(given) in (0, four)
        answered += bool(given)
        assert not given or "".join(row["token_pieces"]["text"][i] for i in given) == "four"
    assert answered
    settings = json.loads((tmp_path / "tools" / "settings.json").read_text())
    assert settings["stop_strings"] == ["never said", stop]
    assert settings["environment"] == tools[1]


def test_answers_of_a_run_end_as_in_training(tmp_path, tokenizer, problems):
    (tmp_path / "tools.py").write_text(ENVIRONMENT)
    path = f"{tmp_path / 'tools.py'}:again"
    run = run_folder(
        tmp_path / "run",
        tokenizer,
        MODEL,
        {1: random_params(MODEL)},
        rollout__stop_strings=("x", "y"),
        rollout__stop_ids=(5,),
        rollout__environment=path,
        data__answer_prefix="So ",
    )
    planned = plan_evaluation(config_of(run, problems, tmp_path / "a"))
    assert planned.options.stop_strings == ("x", "y") and planned.options.environment is not None
    assert planned.engine.stop_ids == (*tokenizer.stop_ids, 5)
    assert all(text.endswith("So ") for text in planned.prompts.texts)
    given = {"stop_strings": ("z",), "environment": "none"}
    planned = plan_evaluation(config_of(run, problems, tmp_path / "b", **given))
    assert planned.options.stop_strings == ("z",) and planned.options.environment is None


def test_problems_of_tasks_are_generated(directory, tokenizer, tmp_path):
    (tmp_path / "puzzle.py").write_text(
        "def seven(index, rng, *, word='is'):\n"
        "    return {'problem': f'{index + 1} x 7 / {index + 1} {word}', 'answer': 7}\n"
    )
    settings = {
        "tasks": (f"{tmp_path / 'puzzle.py'}:seven",),
        "task_options": {"word": "makes"},
        "limit": 5,
    }
    planned = plan_evaluation(config_of(directory, (), tmp_path / "out", **settings))
    assert planned.prompts.texts[4] == "5 x 7 / 5 makes"
    build = says(tokenizer, "Answer: 7", "Answer: 8")
    table = table_of(evaluate(planned, say=quiet, build=build))
    assert table.split()[:3] == ["seven", "problems", "5"]
    assert "mean@4            50.0% ± 0.0%" in table


def test_one_command_evaluates_tasks(directory, tmp_path, capsys):
    tasks = ["--task", "chain_sum", "--task", "basic_arithmetic", "--limit", 3]
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    assert run_command("--model", directory, *tasks, *small, "--out", tmp_path / "out") == 0
    table = capsys.readouterr().out
    assert table.split()[:3] == ["chain_sum", "basic_arithmetic", "all"]
    assert re.search(r"mean@1 .* ± ", table)


def test_a_task_has_the_problems_of_its_seed(directory, tmp_path):
    def prompts(**changes):
        config = config_of(directory, (), tmp_path / "out", tasks=("chain_sum",), **changes)
        return plan_evaluation(config).prompts.texts

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    texts = prompts(task_options=options)
    # As data.evaluation.seed = 2 of a recipe.
    problems = TaskProblems("chain_sum", seed=2, options=options)
    records = [problems.record(number) for number in range(100)]
    assert list(texts) == [record.prompt for record in records]
    assert prompts(task_options=options, task_seed=1) != texts


def test_a_run_answers_its_own_evaluation_problems(directory, tokenizer, tmp_path):
    options = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    settings = {"task": "chain_sum", "seed": 5, "size": 7}
    run = run_folder(
        tmp_path / "run",
        tokenizer,
        MODEL,
        {1: random_params(MODEL)},
        rollout__max_response_tokens=9,
        **{f"data__evaluation__{name}": value for name, value in settings.items()},
        **{f"data__evaluation__options__{name}": value for name, value in options.items()},
    )

    def planned(**changes):
        changes = {"max_response_tokens": 0, **changes}
        return plan_evaluation(config_of(run, (), tmp_path / "out", **changes))

    own = planned()
    problems = TaskProblems("chain_sum", seed=5, options=options)
    records = [problems.record(number) for number in range(7)]
    assert list(own.prompts.texts) == [record.prompt for record in records]
    assert own.engine.max_response_tokens == 9
    assert len(planned(limit=3).prompts) == 3
    # Its task again, with another seed: three terms, where the task's own default is two to six.
    again = planned(tasks=("chain_sum",), limit=40)
    problems = TaskProblems("chain_sum", seed=2, options=options)
    records = [problems.record(number) for number in range(40)]
    assert list(again.prompts.texts) == [record.prompt for record in records]
    given = planned(tasks=("chain_sum",), task_options={**options, "min_terms": 2}, limit=40)
    assert given.prompts.texts != again.prompts.texts
    assert planned(max_response_tokens=4).engine.max_response_tokens == 4


def test_a_model_of_the_hub_has_its_name_and_not_that_of_a_commit(directory, tmp_path):
    commit = tmp_path / "0123456789abcdef"
    commit.symlink_to(directory)
    (tmp_path / "SmolLM2-135M").symlink_to(commit)
    assert find_model(tmp_path / "SmolLM2-135M").name == "SmolLM2-135M"


def test_a_run_is_graded_as_in_training(tmp_path, tokenizer, problems):
    settings = {
        "reward__grader": "regex",
        "reward__grader_options__pattern": "[0-9]",  # as config.txt has the entries of a dict
        "reward__grader_options__ignore_case": True,
    }
    weights = {1: random_params(MODEL)}
    run = run_folder(tmp_path / "run", tokenizer, MODEL, weights, **settings)
    grader = plan_evaluation(config_of(run, problems, tmp_path / "a")).config
    assert grader.grader == "regex"
    assert grader.grader_options == {"pattern": "[0-9]", "ignore_case": True}
    grader = plan_evaluation(config_of(run, problems, tmp_path / "b", grader="answer")).config
    assert (grader.grader, grader.grader_options) == ("answer", {})


def together(*arguments, outs, status=0) -> list[tuple[str, str]]:
    """Evaluates on two processes with one device each; returns the (stdout, stderr) of each."""
    address = f"localhost:{free_port()}"
    commands = [
        [
            *(sys.executable, ROOT / "launch/evaluate.py", *map(str, arguments), "--out", out),
            *(f"--coordinator={address}", "--num_processes=2", f"--process_id={i}"),
        ]
        for i, out in enumerate(outs)
    ]
    flags = "--xla_force_host_platform_device_count=1"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with started(commands, cwd=ROOT, env=env) as processes:
        outputs = [process.communicate(timeout=300) for process in processes]
        assert [p.returncode for p in processes] == [status] * 2, outputs
    return outputs


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one(directory, problems, tmp_path):
    """Two processes with a sharded model write the samples of one process, in the first's folder only."""
    asked = ["--model", directory, "--set", problems[0], "--n", 2, "--mesh", "1-2-1"]
    asked += [f"--{name}={value}" for name, value in SMALL.items()]
    outputs = together(*asked, outs=[tmp_path / "first", tmp_path / "second"])
    assert ["mean@2" in out for out, _ in outputs] == [True, False]
    assert ["loading" in err for _, err in outputs] == [True, False]
    assert not (tmp_path / "second").exists()
    assert run_command(*asked, "--out", tmp_path / "one") == 0

    def by_problem(out):
        return {(r["prompt_id"], r["sample"]): r["completion"] for r in rows_of(out)}

    assert by_problem(tmp_path / "first") == by_problem(tmp_path / "one")
    assert len(by_problem(tmp_path / "one")) == 6


def test_an_error_of_the_first_process_ends_both(directory, problems, tmp_path):
    asked = ["--model", directory, "--set", problems[0], "--mesh", "1-1-2"]
    outputs = together(*asked, outs=["/dev/null/x", tmp_path / "second"], status=2)
    assert all("cannot write to the output folder" in err for _, err in outputs)


def test_unused_devices_are_an_error(directory, problems, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating.hosts, "num_processes", lambda: 2)
    with pytest.raises(UserError, match=r"takes 1 of the \d+ devices of 2 processes"):
        plan_evaluation(config_of(directory, problems, tmp_path / "out"))


def test_an_interruption_says_how_to_continue(directory, problems, tmp_path, capsys, monkeypatch):
    real = answer_writer.score_without_length_penalty
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(answer_writer, "score_without_length_penalty", interrupted)
    asked = ["--model", directory, "--set", problems[0], "--out", tmp_path / "out"]
    assert run_command(*asked) == 130
    _, err = capsys.readouterr()
    assert "has the answers to 2 of 3 problems, and the same command goes on" in err
    assert run_command(*asked) == 0
    assert len(rows_of(tmp_path / "out")) == 3


def faults(directory, problems, tmp_path):
    missing = tmp_path / "missing"
    other = tmp_path / "other"
    other.mkdir()
    (other / "right.jsonl").write_text('{"problem": "x", "answer": "  "}\n')
    (tmp_path / "empty_answer.jsonl").write_text('{"problem": "x", "answer": "$$"}\n')
    (tmp_path / "run" / "model").mkdir(parents=True)
    sets = ["--set", problems[0]]
    model = ["--model", directory]
    return {
        "does not exist": ["--model", missing, *sets],
        "is a file": ["--model", problems[0], *sets],
        "config.json does not exist": ["--model", tmp_path / "run", *sets],
        "missing does not exist": [*model, "--set", missing],
        "several are called 'right'": [*model, *sets, "--set", other / "right.jsonl"],
        "no field 'question'": [
            *model,
            *sets,
            "--prompt_field",
            "question",
        ],
        "cannot be graded": [*model, "--set", tmp_path / "empty_answer.jsonl"],
        "no grader is called 'anwser'": [*model, *sets, "--grader", "anwser"],
        "has no {prompt}": [*model, *sets, "--template", "Say it"],
        "nothing to answer; name at least one --set FILE or --task NAME": model,
        "has no task 'chain_sums' (did you mean chain_sum": [*model, "--task", "chain_sums"],
        "several are called 'chain_sum'": [*model, *["--task", "chain_sum"] * 2],
        "--task_options are options of a --task": [*model, *sets, "--task_options", "{'a': 1}"],
        "a --stop is empty": [*model, *sets, "--stop", ""],
        "environment 'no.py:f' is not there": [*model, *sets, "--environment", "no.py:f"],
        "without a coordinator": [*model, *sets, "--num_processes", 2],
        "process_id 3 is not one of 1 processes": [*model, *sets, "--process_id", 3],
        "n 0 is below 1": [*model, *sets, "--n", 0],
        "top_p 0.0 is not positive": [*model, *sets, "--top_p", 0],
        "temperature nan is not a number": [*model, *sets, "--temperature", "nan"],
        "prompts of": [*model, *sets, "--max_response_tokens", 32768],
        "longer than max_prompt_tokens 2": [*model, *sets, "--max_prompt_tokens", 2],
        "needs 16 devices": [*model, *sets, "--mesh", "1-1-16"],
        "--mesh 'nonsense' is not p-t-d": [*model, *sets, "--mesh", "nonsense"],
        "--slots": [*model, *sets, "--mesh", "1-1-2", "--slots", 3],
        "cannot write": [*model, *sets, "--out", "/dev/null/x"],
        "overlong": [*model, *sets, "--overlong", "away"],
        "dtype": [*model, *sets, "--dtype", "float8"],
    }


def test_user_errors_are_one_line(directory, problems, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def never(*args):
        raise AssertionError("checked before anything is loaded")

    monkeypatch.setattr(evaluating, "build_backend", never)
    for message, arguments in faults(directory, problems, tmp_path).items():
        assert run_command(*arguments) == 2, message
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, err
        assert message in err, err
    assert not (tmp_path / "evaluations").exists()


def test_more_answers_than_memory_holds_are_refused(directory, problems, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl.evaluation.sampled_answers.host_memory_bytes", lambda: 2**30)
    config = config_of(directory, problems, tmp_path / "out", n=1_000_000)
    with pytest.raises(
        UserError, match=r"--n 1,000,000 x \d+ problems .* more than this machine with 1"
    ):
        plan_evaluation(config)


def test_hostile_answers_are_escaped_on_the_page(directory, tokenizer, problems, tmp_path):
    text = "</pre><script>alert(1)</script>\x00\u202e"
    out = tmp_path / "out"
    planned = plan_evaluation(config_of(directory, problems, out, max_response_tokens=80, n=1))
    evaluate(planned, say=quiet, build=says(tokenizer, text))
    page = evaluate_command.write_evaluation_page(planned.answers.folder, title="x<b>", table="t")
    html = page.read_text()
    assert "<script" not in html and "x<b>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x00\\u202e" in html


# The line


def test_the_line_has_the_estimated_time():
    line = EtaLine(10, before=2)
    for _ in range(4):
        line.add(answers=4, correct=1, tokens=100)
    assert line.text(8.0) == "6 of 10 problems, 25.0% right, 50 tokens/s, eta 8s"


def test_the_line_appears_before_the_first_answer_is_finished(monkeypatch):
    monkeypatch.setattr(eta_line, "_SILENT_S", 0.01)
    said = threading.Event()

    class Out(io.StringIO):
        def write(self, text):
            said.set()
            return super().write(text)

    out = Out()
    with EtaLine(10, before=2, out=out):
        assert said.wait(60)
    assert re.match(r"2 of 10 problems, \S+ at work on the next", out.getvalue())


def test_the_line_leaves_unknown_numbers_out():
    assert EtaLine(0).text(0.0) == "0 of 0 problems, 0.0% right, 0 tokens/s, in 0s"
