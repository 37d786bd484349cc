"""`jaxrl evaluate`: evaluates a model directory or a run with the trainer's evaluator."""

import dataclasses
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic_backend import ArithmeticBackend
from processes import free_port, started

from jaxrl import cli
from jaxrl.commands import evaluate as command
from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.mesh.devices import build_generation_mesh
from jaxrl.models import lora
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.huggingface.config_json import adapter_config_json, config_json
from jaxrl.models.huggingface.model_files import write_json
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import LoraConfig, ModelConfig
from jaxrl.roles.learner import TrainState
from jaxrl.tracking.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=320, num_layers=2, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8
)
SMALL = {"rollout.max_response_tokens": 12, "rollout.slots": 8, "rollout.prefill_prompts": 2}


def random_params(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32),
        decoder_graph(model)[1],
    )


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four: Answer: 7"] * 4, vocab_size=300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer) -> pathlib.Path:
    root = tmp_path_factory.mktemp("evaluate")
    tokenizer.save(root / "tokenizer")
    out = root / "tiny-model"
    save_checkpoint(random_params(MODEL), MODEL, out, dtype="float32", source=root / "tokenizer")
    return out


def run_folder(path, tokenizer, model, steps, **settings) -> pathlib.Path:
    """The folder of a run with checkpoints of some RL steps, trained with these settings."""
    tokenizer.save(path / "model")
    write_json(
        path / "model" / "config.json", config_json(lora.base_config(model), dtype="float32")
    )
    if model.lora.rank:
        write_json(path / "model" / "adapter_config.json", adapter_config_json(model, base="x"))
    (path / "config.txt").write_text(format_config(dataclasses.replace(Config(), **settings)))
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
    """Two sets: one that the model of `says` answers right, and one that it does not."""
    for name, answers in (("right", [7, 7, 7]), ("wrong", [8, 8])):
        rows = [{"problem": f"one two {i}", "answer": a} for i, a in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(tmp_path / "right.jsonl"), str(tmp_path / "wrong.jsonl")]


@pytest.fixture
def says(monkeypatch, tokenizer):
    """Makes sample k of every answer the k-th text and a stop token."""

    def of(*texts):
        def respond(prompt, index):
            tokens = tokenizer.encode(texts[index % len(texts)])
            return np.append(tokens, tokenizer.eos_id).astype(np.int32)

        monkeypatch.setattr(
            command,
            "build_backend",
            lambda driver, model, mesh, config, decode: ArithmeticBackend(
                mesh, config, decode, respond
            ),
        )

    return of


def run_command(*arguments, **settings) -> int:
    given = [f"--config.{name}={value}" for name, value in (SMALL | settings).items()]
    return cli.main(["jaxrl", "evaluate", *given, *map(str, arguments)])


def rows_of(out) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_bytes().splitlines()]


def test_right_answers_are_counted_by_set(directory, problems, says, tmp_path, capsys):
    says("Answer: 7", "Answer: 7", "one two", "Answer: 8")
    sets = [part for path in problems for part in ("--set", path)]
    out = tmp_path / "out"
    assert run_command("--model", directory, *sets, "--n", 4, "--out", out) == 0
    table = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in table}
    assert cells[""] == ["right", "wrong", "all"] and cells["problems"] == ["3", "2", "5"]
    # Two of four answers are right in the first set, one of four in the second.
    assert cells["mean@4"] == ["50.0% ± 0.0%", "25.0% ± 0.0%", "40.0% ± 6.1%"]
    assert cells["pass@4"] == ["100.0% ± 0.0%"] * 3 and cells["pass@2"][0] == "83.3% ± 0.0%"
    assert cells["without answer"] == ["25.0%"] * 3 and cells["truncated"] == ["0.0%"] * 3
    assert not any(name.startswith(("best@", "worst@")) for name in cells)
    results = json.loads((out / "results.json").read_text())
    assert results["metrics"]["val-core/right/acc/mean@4"] == 1 / 2
    assert results["metrics"]["val-aux/all/acc/pass@4"] == 1
    assert "evaluation.num_samples = 4" in results["settings"]
    rows = rows_of(out)
    assert len(rows) == 20 and rows[0]["completion"] == "Answer: 7" and rows[0]["correct"]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "bfloat16"), ({"rollout.dtype": "float32"}, "float32")]
)
def test_a_model_alone_answers_in_the_fast_type(
    directory, problems, says, tmp_path, monkeypatch, given, expected
):
    """On accelerators that is bfloat16: in float32 a model of 32B would take 131 GB."""
    says("Answer: 7")
    monkeypatch.setattr("jaxrl.mesh.devices.platform_of", lambda mesh: "gpu")
    asked = ["--model", directory, "--set", problems[0], "--n", 1, "--out", tmp_path / "out"]
    assert run_command(*asked, **given) == 0
    settings = json.loads((tmp_path / "out" / "results.json").read_text())["settings"]
    assert f"rollout.dtype = {expected!r}" in settings


def test_grader_failures_are_counted(directory, problems, says, tmp_path, capfd):
    own = tmp_path / "own.py"
    own.write_text(
        "from jaxrl.rewards import Grade\n"
        "def grade(response, answer):\n"
        "    return Grade(1 / (response != '7') > 2, response)\n"
    )
    says("7", "1")
    out, asked = tmp_path / "out", ["--model", directory, "--set", problems[0], "--n", 2]
    graded = {"reward.grader": f"{own}:grade"}
    assert run_command(*asked, "--out", out, **graded) == 0
    table = {
        line.rsplit(None, 1)[0]: line.split()[-1] for line in capfd.readouterr()[0].splitlines()
    }
    assert table["grader failed"] == "3"
    failures = [row["failure"] for row in rows_of(out)]
    assert [f and f["kind"] for f in failures] == ["raised", None] * 3
    assert "ZeroDivisionError" in failures[0]["message"]


def test_one_command(directory, problems, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["--model", directory, "--set", problems[0], "--n", 2, "--config.evaluation.top_p=0.7"]
    assert run_command(*asked) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["right"] and "mean@2" in out
    assert "3 of 3 problems" in err
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert folder.name.startswith("tiny-model-")
    assert {p.name for p in folder.iterdir()} == {"samples.jsonl", "results.json"}


def test_the_most_probable_token_alone_is_greedy(directory, problems, tmp_path):
    asked = ["--model", directory, "--set", problems[0], "--n", 2]
    asked += ["--config.rollout.max_response_tokens=6"]
    texts = {}
    for name, limits in {
        "sampled": {},
        "greedy": {"evaluation.temperature": 0.0},
        "most probable": {"evaluation.top_k": 1},
    }.items():
        assert run_command(*asked, "--out", tmp_path / name, **limits) == 0
        texts[name] = [row["completion"] for row in rows_of(tmp_path / name)]
    assert texts["most probable"] == texts["greedy"] != texts["sampled"]


# The folder of a run


def test_a_run_is_evaluated_as_it_was_trained(tmp_path, tokenizer, problems):
    default = Config()
    evaluation = dataclasses.replace(default.data.evaluation, path=problems[0])
    reward = {"grader": "regex", "grader_options": {"pattern": "[0-9]", "ignore_case": True}}
    trained = {
        "data": dataclasses.replace(default.data, evaluation=evaluation, template="Q: {prompt}"),
        "rollout": dataclasses.replace(
            default.rollout, stop_strings=("x", "y"), stop_ids=(5,), max_response_tokens=30
        ),
        "reward": dataclasses.replace(default.reward, overlong_buffer_tokens=0, **reward),
        "evaluation": dataclasses.replace(default.evaluation, temperature=0.5),
        "algorithm": dataclasses.replace(default.algorithm, updates_per_step=2),
        "seed": 7,
    }
    steps = {1: random_params(MODEL)}
    run = run_folder(tmp_path / "run", tokenizer, MODEL, steps, **trained)
    config = load_config(Config, command.settings_of(run, None), {"evaluation.top_p": "0.5"})
    assert config.data == dataclasses.replace(trained["data"], train=default.data.train)
    assert {name: getattr(config, name) for name in ("rollout", "reward", "algorithm", "seed")} == {
        name: trained[name] for name in ("rollout", "reward", "algorithm", "seed")
    }
    assert (config.evaluation.temperature, config.evaluation.top_p) == (0.5, 0.5)
    # Other problems, in the words and with the grader of the run's own.
    config = load_config(Config, command.settings_of(run, None, problems[1:] * 2), {})
    first, second = config.data.evaluation_sources.values()
    assert first == second and config.data.template == "Q: {prompt}"
    assert (first.path, first.source) == (problems[1], "wrong")


def test_a_run_gives_its_own_numbers(tmp_path, tokenizer, problems, says, capsys):
    says("Answer: 7")
    data = dataclasses.replace(
        Config().data, evaluation=dataclasses.replace(Config().data.evaluation, path=problems[0])
    )
    params = {step: random_params(MODEL, step) for step in (1, 2)}
    run = run_folder(tmp_path / "run", tokenizer, MODEL, params, data=data)
    assert run_command("--model", run, "--n", 1, "--out", tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "mean@1" in out and "100.0%" in out and "rl step 2, " in err
    # As in training, a damaged checkpoint is passed over.
    damaged = next(
        p for p in (run / "rl/checkpoints/2").rglob("*") if p.is_file() and p.stat().st_size
    )
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    assert run_command("--model", run, "--n", 1, "--out", tmp_path / "out") == 0
    assert "rl step 1, " in capsys.readouterr().err


def test_a_run_and_its_export_have_the_same_weights(tmp_path, tokenizer, directory):
    run = run_folder(tmp_path / "run", tokenizer, MODEL, {1: random_params(MODEL)})
    mesh = build_generation_mesh("1-2-1")
    ours = command.load_policy(run, MODEL, mesh, "float32")
    theirs = command.load_policy(directory, MODEL, mesh, "float32")
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert all(
        a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    )
    narrow = command.load_policy(run, MODEL, mesh, "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype("bfloat16")}


def test_adapters_of_a_run_are_merged(tmp_path, tokenizer):
    adapted = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, targets=("q", "up")))
    params = random_params(adapted)
    run = run_folder(tmp_path / "run", tokenizer, adapted, {1: params})
    merged = command.load_policy(run, MODEL, build_generation_mesh("1-1-1"), "float32")
    expected = lora.merge(params, adapted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, expected)


def together(*arguments, outs, status=0) -> list[tuple[str, str]]:
    """Evaluates on two processes with one device each; returns the (stdout, stderr) of each."""
    address = f"localhost:{free_port()}"
    hosts = [f"--config.hosts.coordinator={address}", "--config.hosts.num_processes=2"]
    small = [f"--config.{name}={value}" for name, value in SMALL.items()]
    commands = [
        [
            *(sys.executable, ROOT / "launch/evaluate.py", *map(str, arguments), "--out", out),
            *(*hosts, *small, f"--config.hosts.process_id={i}"),
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
    asked = ["--model", directory, "--set", problems[0], "--n", 2, "--config.mesh.train=1-2-1"]
    outputs = together(*asked, outs=[tmp_path / "first", tmp_path / "second"])
    assert ["mean@2" in out for out, _ in outputs] == [True, False]
    assert ["loading" in err for _, err in outputs] == [True, False]
    assert not (tmp_path / "second").exists()
    assert run_command(*asked, "--out", tmp_path / "one") == 0

    def by_problem(out):
        return {(r["prompt_id"], r["sample"]): r["completion"] for r in rows_of(out)}

    assert by_problem(tmp_path / "first") == by_problem(tmp_path / "one")
    assert len(by_problem(tmp_path / "one")) == 6


@pytest.mark.long
def test_an_error_of_the_first_process_ends_both(directory, problems, tmp_path):
    asked = ["--model", directory, "--set", problems[0], "--config.mesh.train=1-1-2"]
    outputs = together(*asked, outs=["/dev/null/x", tmp_path / "second"], status=2)
    assert all("cannot write to the output folder" in err for _, err in outputs), outputs


def test_user_errors_are_one_line(directory, problems, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def never(*args):
        raise AssertionError("checked before anything is loaded")

    monkeypatch.setattr(command, "build_backend", never)
    (tmp_path / "empty_answer.jsonl").write_text('{"problem": "x", "answer": "$$"}\n')
    (tmp_path / "run" / "model").mkdir(parents=True)
    model, sets = ["--model", directory], ["--set", problems[0]]
    frozen = {"agent": "a.py:a", "agent_roles": ("a", "b"), "frozen_roles.b": "start"}
    frozen = [f"--config.rollout.{name}={value}" for name, value in frozen.items()]
    faults = {
        "does not exist": ["--model", tmp_path / "missing", *sets],
        "is a file": ["--model", problems[0], *sets],
        "config.txt does not exist": ["--model", tmp_path / "run", *sets],
        "missing does not exist": [*model, "--set", tmp_path / "missing"],
        "no field 'question'": [*model, *sets, "--config.data.evaluation.fields.prompt=question"],
        "empty_answer": [*model, "--set", tmp_path / "empty_answer.jsonl"],
        "no grader is called 'anwser'": [*model, *sets, "--config.reward.grader=anwser"],
        "nothing to answer; name at least one --set FILE": model,
        "evaluation.num_samples": [*model, *sets, "--n", 0],
        "evaluation.top_p": [*model, *sets, "--config.evaluation.top_p=0"],
        "evaluation.top_k": [*model, *sets, "--config.evaluation.top_k=-1"],
        "positions of the model": [*model, *sets, "--config.rollout.max_response_tokens=32768"],
        "longer than": [*model, *sets, "--config.data.max_prompt_tokens=2"],
        "needs 16": [*model, *sets, "--config.mesh.train=1-1-16"],
        "rollout.slots": [*model, *sets, "--config.mesh.train=1-1-2", "--config.rollout.slots=3"],
        "cannot write": [*model, *sets, "--out", "/dev/null/x"],
        "'start' is the weights that a run starts": [*model, *sets, *frozen],
        "unknown setting": [*model, *sets, "--config.rollout.slotz=3"],
    }
    for message, arguments in faults.items():
        given = [f"--config.{name}={value}" for name, value in SMALL.items()]
        assert cli.main(["jaxrl", "evaluate", *given, *map(str, arguments)]) == 2, message
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, err
        assert message in err, err
    assert not (tmp_path / "evaluations").exists()
