"""`jaxrl import-verl`: scripts and files of verl become recipes with the same settings."""

import pathlib
import re
import shutil
import tomllib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import flatten_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl_verl import verl_script
from jaxrl_verl.import_verl import recipe_text
from jaxrl_verl.verl_files import read_verl
from jaxrl_verl.verl_settings import SAME, convert_settings

SCRIPTS = pathlib.Path(__file__).parent / "verl"
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "from_verl.md"


RUN = ["--run"] if verl_script._fault_of_bubblewrap() else []


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """A script gets copies of the files in the working folder."""
    monkeypatch.chdir(tmp_path)


def imported(tmp_path, source, *arguments, status=0):
    """(settings by dotted name, text of the recipe) of a file of verl."""
    out = tmp_path / "recipe.py"
    command = ["jaxrl", "import-verl", *RUN, "--out", str(out), str(source), *arguments]
    assert cli.main(command) == status
    return flatten_config(load_config(Config, str(out), {})), out.read_text()


def refused(tmp_path, capsys, text, name="run.sh"):
    """The one line that a file is refused with."""
    source = tmp_path / name
    source.write_text(text) if isinstance(text, str) else source.write_bytes(text)
    assert cli.main(["jaxrl", "import-verl", *RUN, str(source)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and not out
    return err


def expected(recipe):
    """Settings of a recipe that is imported, from imported.toml."""
    table = tomllib.loads(pathlib.Path(__file__).with_name("imported.toml").read_text())[recipe]
    return {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}


def check(settings, expected):
    assert {name: settings[name] for name in expected} == expected


def test_dapo_32b(tmp_path, monkeypatch):
    for name in ("NODES", "MODEL", "ROOT", "CKPTS"):
        monkeypatch.delenv(name, raising=False)
    settings, text = imported(tmp_path, SCRIPTS / "dapo_32b.sh")
    check(settings, expected("dapo_32b"))
    assert "1-8-16, not 1-1-128" in text.replace("\n# ", " ")
    assert "rollout.memory_fraction" in text and "gpu_memory_utilization" in text
    assert "Not known" not in text


def test_grpo_on_gsm8k(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", "/data")
    script = SCRIPTS / "grpo_gsm8k.sh"
    settings, text = imported(tmp_path, script, "--num_train_prompts", "14973")
    check(settings, expected("grpo_gsm8k"))
    assert settings["data.sources.train_2.path"] == "/data/math/train.parquet"
    assert settings["data.evaluations.evaluation_2.path"] == "/data/math/test.parquet"
    assert "Not known to jaxrl; see docs/from_verl.md:\n#   actor.clip_ration" in text
    assert "my_reward.py:score" in text


def test_ppo_with_a_critic(tmp_path):
    settings, text = imported(tmp_path, SCRIPTS / "ppo_critic.yaml")
    train = str(pathlib.Path.home() / "data/gsm8k/train.parquet")
    check(settings, expected("ppo_critic") | {"data.train.path": train})
    assert "trainer.default_local_dir = ${nowhere.at_all}/x" in text
    assert "2 hosts" in text


def test_the_recipe_goes_to_standard_output_without_out(capsys):
    assert cli.main(["jaxrl", "import-verl", str(SCRIPTS / "ppo_critic.yaml")]) == 0
    out, err = capsys.readouterr()
    compile(out, "recipe", "exec")
    assert 'config.name = "ppo_1024"' in out and " have no counterpart" in err


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch, capsys):
    """Without the model: its shape is known by its name."""
    import_it, plan = re.findall(r"^    jaxrl (.*)", PAGE.read_text(), re.MULTILINE)[:2]
    monkeypatch.chdir(tmp_path)
    script = import_it.split()[1]
    shutil.copy(SCRIPTS / "dapo_32b.sh", script)
    assert cli.main(["jaxrl", *import_it.split(), *RUN]) == 0
    rows = [
        {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    ]
    pathlib.Path("data/data").mkdir(parents=True)
    for name in ("dapo-math-17k", "aime-2024"):
        pq.write_table(pa.Table.from_pylist(rows), f"data/data/{name}.parquet")
    assert cli.main(["jaxrl", *plan.split()]) == 0
    assert "32,763,876,352" in capsys.readouterr().out  # weights of Qwen2.5-32B


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/models/Qwen2.5-32B", "qwen2.5-32b"),
        ("Qwen/Qwen2.5-32B-Instruct", ""),  # another epsilon
        ("Qwen/Qwen2.5-7B-Instruct/", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Math-7B", ""),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Instruct-2507", ""),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("mine", ""),
    ],
)
def test_the_shape_is_known_by_the_whole_name(path, shape):
    assert convert_settings({"actor_rollout_ref.model.path": path}).shape == shape


def test_false_without_a_counterpart_is_named():
    off = {"trainer.val_before_train": False, "data.shuffle": False, "trainer.ray_wait": False}
    off["trainer.test_freq"] = 5  # without evaluations there is none before the first step
    for every, also in ((False, []), (True, ["trainer.ray_wait"])):
        found = convert_settings(off, every=every)
        names = [name for group in found.without.values() for name in group]
        assert sorted(names) == ["data.shuffle False", *also, "trainer.val_before_train False"]


@pytest.mark.parametrize(
    ("setting", "value", "remark"),
    [
        ("trainer.logger", ["console", "swanlab"], "swanlab"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "linear", "linear"),
        ("actor_rollout_ref.actor.strategy", "veomni", "veomni is taken for FSDP"),
        ("data.seed", 1, "No data.train_files"),
        ("reward.reward_manager.name", "prime", "reward.reward_manager.name"),
        ("actor_rollout_ref.actor.clip_ratio", 0.1, "reads clip_ratio_low and clip_ratio_high"),
    ],
)
def test_what_is_read_and_not_imported_is_named(setting, value, remark):
    found = convert_settings({setting: value}, every=True)
    said = [*found.remarks, *(name for names in found.without.values() for name in names)]
    assert [text for text in said if remark in text]


@pytest.mark.parametrize(
    "name", ["rollout.n_agent", "rollout.val_temperature", "actor.adaptive_entropy.enabled"]
)
def test_a_setting_of_a_fork_is_not_taken_for_one_of_verls(name):
    assert convert_settings({f"actor_rollout_ref.{name}": 5}, every=True).unknown == [name]


# Settings of verl 0.9 in verl's own examples and its default file.
@pytest.mark.parametrize(
    "name",
    [
        "actor_rollout_ref.actor.freeze_vision_tower",
        "actor_rollout_ref.actor.veomni.expert_parallel_size",
        "actor_rollout_ref.actor.torchtitan.attn_type",
        "actor_rollout_ref.actor.engine.impl_cfg.optimizer",
        "actor_rollout_ref.model.exclude_modules",
        "actor_rollout_ref.model.custom_chat_template",
        "actor_rollout_ref.model.hf_config_path",
        "algorithm.filter_groups.max_inflight_gen_batches",
        "algorithm.gdpo_reward_keys",
        "data.function_tool_path",
        "data.validation_shuffle",
        "sandbox_fusion.url",
        "trainer.del_local_ckpt_after_load",
        "trainer.use_legacy_worker_impl",
    ],
)
def test_a_setting_of_verl_without_a_counterpart_has_a_reason(name):
    found = convert_settings({name: "x"}, every=True)
    assert not found.unknown
    assert name.removeprefix("actor_rollout_ref.") in str(found.without)


def test_variables_of_the_chat_template_are_imported():
    prefix = "data.apply_chat_template_kwargs"
    given = {f"{prefix}.enable_thinking": False, f"{prefix}.reasoning_effort": "low"}
    found = {line.setting: line.value for line in convert_settings(given, every=True).lines}
    assert found["data.chat_options.enable_thinking"] is False
    assert found["data.chat_options.reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("setting", "limits"),
    [
        ("top_p: 0.9", True),
        ("top_k: 50", True),
        ("top_k: -1", False),
        ("val_kwargs: {top_p: 0.7}", False),
    ],
)
def test_a_recipe_with_limits_of_sampling_says_what_verl_trains(tmp_path, setting, limits):
    source = tmp_path / "run.yaml"
    source.write_text(f"actor_rollout_ref: {{rollout: {{{setting}}}}}\n")
    settings, text = imported(tmp_path, source)
    text = text.replace("\n# ", " ")
    told = "verl trains on log-probabilities of the whole vocabulary; set "
    assert (f"{told}algorithm.truncated_logprobs = False for that." in text) == limits
    # Our default stays: the policy that sampled is trained.
    assert settings["algorithm.truncated_logprobs"]


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({}, {}),
        ({"lr_warmup_steps": 5}, {"schedule": "constant"}),
        ({"lr_warmup_steps_ratio": 0.1}, {"schedule": "constant"}),
        ({"lr_scheduler_type": "constant"}, {}),
        (
            {"lr_warmup_steps": 5, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
            {"schedule": "cosine", "decay_steps": 40, "final": 0.1, "cycles": 0.5},
        ),
        (
            {"warmup_style": "cosine", "num_cycles": 1.5},
            {"schedule": "cosine", "decay_steps": 40, "final": 0.0, "cycles": 1.5},
        ),
        (
            {"lr_scheduler_type": "wsd"},
            {"schedule": "wsd", "decay_steps": 40, "final": 0.0, "cycles": 0.5},
        ),
        # Megatron's names; min_lr is a rate.
        (
            {"lr_decay_style": "linear", "lr_decay_steps": 30, "lr": 1e-5, "min_lr": 1e-6},
            {"schedule": "linear", "decay_steps": 30, "final": 1e-6 / 1e-5, "cycles": 0.5},
        ),
        ({"lr_decay_style": "constant"}, {}),
        # All of the run is warm-up.
        ({"lr_scheduler_type": "cosine", "lr_warmup_steps": 40}, {"schedule": "constant"}),
        ({"lr_decay_style": "inverse_square_root"}, {}),
    ],
)
def test_schedules_are_verls(optim, expected):
    given = {f"actor_rollout_ref.actor.optim.{name}": value for name, value in optim.items()}
    found = convert_settings(given | {"trainer.total_training_steps": 40})
    settings = {line.setting: line.value for line in found.lines}
    names = {name.removeprefix("optim.lr_") for name in settings if name.startswith("optim.lr_")}
    assert names == {"warmup_steps", *expected}
    check(settings, {f"optim.lr_{name}": value for name, value in expected.items()})
    assert not [name for name in found.unknown if "optim" in name]


def test_megatron_settings_are_a_megatron_layout():
    name = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
    settings = {line.setting: line.value for line in convert_settings({name: 4}).lines}
    # On 8 devices, with verl's default of TP 2 in rollout.
    check(settings, {"mesh.train": "4-1-2", "mesh.generate": "1-2-4-1", "mesh.sharding": "ZeRO-1"})


# Devices, rollout TP, and Megatron's tensor, pipeline, context, expert and expert tensor parallel sizes (0 is
# not said) of scripts of verl 0.6 to 0.9; our layouts, with fsdp, context, expert.
PUBLISHED = {
    # Experts over tensor devices.
    "gptoss_20b, 1 node": ((8, 8, 8, 1, 1, 8, 1), "1-8-1", "1-8-1-1", (1, 1, 1)),
    "gptoss_20b, dapo": ((8, 4, 4, 1, 1, 8, 1), "1-4-2", "1-4-1-2", (1, 1, 2)),
    "moonlight": ((24, 4, 4, 3, 1, 4, 1), "3-4-2", "1-4-3-2", (1, 1, 1)),
    # A rollout with more tensor shards: of stages, of replicas and stages, of a context group.
    "qwen3-30b, fp16": ((32, 8, 4, 4, 1, 8, 0), "2-8-2", "1-8-2-2", (1, 1, 1)),
    "qwen3-235b": ((32, 8, 4, 8, 1, 4, 1), "4-8-1", "1-8-4-1", (1, 1, 1)),
    "glm-4.5-air": ((64, 8, 2, 2, 4, 8, 1), "1-4-16", "1-8-1-8", (2, 4, 2)),
    "deepseek-v3": ((256, 32, 1, 16, 1, 16, 1), "2-8-16", "1-32-2-4", (4, 1, 2)),
    "qwen3-vl-30b": ((8, 4, 2, 1, 2, 8, 1), "1-4-2", "1-4-1-2", (1, 1, 2)),
    "qwen3-vl-235b": ((64, 16, 4, 8, 2, 8, 1), "2-16-2", "1-16-2-2", (1, 2, 1)),
    # Of replicas, where all of them hold experts.
    "qwen3.5-35b": ((8, 8, 2, 1, 1, 8, 1), "1-8-1", "1-8-1-1", (1, 1, 1)),
    "qwen3-30b, gspo": ((8, 4, 2, 1, 1, 8, 1), "1-4-2", "1-4-1-2", (1, 1, 2)),
    "16 experts' devices": ((16, 4, 1, 1, 1, 16, 1), "1-4-4", "1-4-1-4", (1, 1, 4)),
    # Megatron's experts lie on context devices.
    "qwen3-235b, npu": ((256, 4, 4, 4, 8, 8, 0), "4-4-16", "1-4-4-16", (1, 8, 2)),
}


@pytest.mark.parametrize(
    ("sizes", "train", "generate", "shares"), PUBLISHED.values(), ids=PUBLISHED.keys()
)
def test_published_layouts_of_megatron(sizes, train, generate, shares):
    devices, rollout, *of_training = sizes
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    given = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": devices}
    given["actor_rollout_ref.rollout.tensor_model_parallel_size"] = rollout
    for kind, size in zip(kinds, of_training, strict=True):
        if size:
            given[f"actor_rollout_ref.actor.megatron.{kind}_parallel_size"] = size
    found = {line.setting: line.value for line in convert_settings(given).lines}
    settings = {key: value for key, value in found.items() if key.startswith("mesh.")}
    expected = dict(zip(("fsdp", "context", "expert"), shares, strict=True))
    expected |= {"train": train, "generate": generate}
    for name, value in expected.items():
        assert settings.get(f"mesh.{name}", 1) == value, name
    assert settings["mesh.sharding"] == ("ZeRO-3" if train == "4-4-16" else "ZeRO-1")
    fields = {key.removeprefix("mesh."): value for key, value in settings.items()}
    assert ParallelLayout.from_config(LayoutConfig(**fields)).num_devices == devices


def test_a_recipe_is_not_written_over(tmp_path, capsys):
    script = str(SCRIPTS / "ppo_critic.yaml")
    out = tmp_path / "mine.py"
    out.write_text("mine")
    assert cli.main(["jaxrl", "import-verl", script, "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err and out.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ray start --head\n", "it starts ray start --head"),
        ("python3 -m x data.train_files='abc\n", "ended with status 2: .*line 1: unexpected EOF"),
        (
            "set -u\npython3 -m x data.seed=$NOWHERE\n",
            "status 1: .*line 2: NOWHERE: unbound variable",
        ),
        ("n=$((1 / 0)); exit\n", "division by 0"),
        ("while true; do sleep 5; done\n", "did not end within 1 seconds"),
        (b"\xff\xfe", "not UTF-8"),
        ("python a.py data.train_batch_size=many\n", "expected a number"),
        (
            "python a.py data.train_batch_size=100\n",
            r"data.train_batch_size 100 of verl is no multiple of actor.ppo_mini_batch_size 256",
        ),
        ("python a.py algorithm.adv_estimator=best\n", "choose one of .*gae, grpo"),
        (
            "python a.py trainer.n_gpus_per_node=3\n",
            r"trainer.nnodes 1 x trainer.n_gpus_per_node 3 = 3 devices of verl are no multiple of 2, the "
            r"least common multiple of actor.ulysses_sequence_parallel_size 1 and "
            r"rollout.tensor_model_parallel_size 2; change",
        ),
        (
            "python a.py actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3 trainer.nnodes=2\n",
            r"trainer.nnodes 2 x .* = 16 devices of verl are no multiple of 3, the product of "
            r"actor.megatron.tensor_model_parallel_size 1 x actor.megatron.pipeline_model_parallel_size 3",
        ),
        (
            "python a.py actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=3\n",
            r"rollout.tensor_model_parallel_size 3 of verl: .* 8 devices .*; use 1 or 2 or 4 or 8",
        ),
        (
            "python a.py actor_rollout_ref.actor.ulysses_sequence_parallel_size=0\n",
            r"actor.ulysses_sequence_parallel_size 0 of verl: expected 1 or more",
        ),
        (
            "python a.py a.b=1 algorithm.rollout_correction.rollout_rs=token_k1 "
            "algorithm.rollout_correction.rollout_rs_threshold=7_x\n",
            "expected a number above 0",
        ),
    ],
)
def test_a_malformed_script_is_one_line(tmp_path, capsys, monkeypatch, text, message):
    monkeypatch.setattr(verl_script, "SECONDS", 1)
    assert re.search(message, refused(tmp_path, capsys, text))


@pytest.mark.parametrize("engine", ["fsdp_config", "megatron"])
@pytest.mark.parametrize("what", ["param_offload", "optimizer_offload"])
def test_the_training_state_is_offloaded_as_in_either_engine(engine, what):
    name = f"actor_rollout_ref.actor.{engine}.{what}"
    for value, expected in ((True, True), (False, None)):
        found = {line.setting: line.value for line in convert_settings({name: value}).lines}
        assert found.get("mesh.offload_training_state") is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [1, 2\n", r":2 is no YAML"),
        ("a: 1\n", "has no setting of verl"),
        ("data: &x {y: *x}\n", "is no YAML that can be read"),
        ("data: {a: '${data.b}', b: '${data.a}'}\n", "do not end"),
    ],
)
def test_a_malformed_yaml_is_one_line(tmp_path, capsys, text, message):
    assert re.search(message, refused(tmp_path, capsys, text, "verl.yaml"))


def test_names_and_values_of_a_file_execute_nothing(tmp_path):
    source = tmp_path / "verl.yaml"
    source.write_text(
        'trainer: {experiment_name: "\\"\\"\\"\\nraise SystemExit(7)", "a\\nraise SystemExit(8)": 1}\n'
        'data: {train_files: "x\\"\\nraise SystemExit(9)"}\n'
    )
    settings, text = imported(tmp_path, source)
    assert settings["data.train.path"] == 'x"\nraise SystemExit(9)'
    assert "trainer.a?raise SystemExit(8)" in text


def test_a_refused_recipe_is_written_and_says_why(tmp_path, capsys):
    source, out = tmp_path / "run.sh", tmp_path / "recipe.py"
    source.write_text("python a.py actor_rollout_ref.rollout.temperature=-1\n")
    assert cli.main(["jaxrl", "import-verl", str(source), "--out", str(out), *RUN]) == 2
    assert (
        "refused as it stands: rollout.temperature = -1.0: must be at least"
        in capsys.readouterr().err
    )
    assert "config.rollout.temperature = -1" in out.read_text()


def test_the_page_has_every_setting_with_one_counterpart():
    page = PAGE.read_text()
    for row in SAME:
        assert f"`{row.verl.removeprefix('actor_rollout_ref.')}`" in page, row.verl
        assert f"`{row.jaxrl}`" in page, row.jaxrl


@pytest.mark.parametrize(
    ("given", "train", "generate", "fsdp"),
    [
        ({"n_gpus_per_node": 1}, "1-1-1", "1-1-1-1", 1),
        ({"n_gpus_per_node": 4}, "1-2-2", "1-2-1-2", 2),
        ({"n_gpus_per_node": 8}, "1-2-4", "1-2-1-4", 4),
        ({"n_gpus_per_node": 8, "nnodes": 4}, "1-2-16", "1-2-1-16", 16),
    ],
)
def test_fsdp_with_tensor_parallel_rollout_is_a_layout(given, train, generate, fsdp):
    found = convert_settings({f"trainer.{name}": value for name, value in given.items()})
    settings = {line.setting: line.value for line in found.lines}
    check(settings, {"mesh.train": train, "mesh.generate": generate, "mesh.fsdp": fsdp})


@pytest.fixture(scope="module")
def files():
    return [read_verl(script, confined=not RUN) for script in sorted(SCRIPTS.iterdir())]


@pytest.mark.parametrize("odd", ["word", -1, 0, 0.5, [1], ["a", None], True, 10**30, "a_b", ""])
def test_odd_values_are_refused_or_written(odd, files):
    for file in files:
        for name in (*file.settings, *(row.verl for row in SAME)):
            try:
                found = convert_settings(file.settings | {name: odd}, every=file.is_script)
            except UserError as error:
                assert "\n" not in str(error)
            else:
                compile(recipe_text("run.sh", file, found), name, "exec")


def test_rules_of_the_correction_are_converted():
    prefix = "algorithm.rollout_correction"
    found = convert_settings(
        {
            f"{prefix}.rollout_is": "sequence",
            f"{prefix}.rollout_is_threshold": "0.5_5.0",
            f"{prefix}.rollout_rs": "token_k1,seq_mean_k3",
            f"{prefix}.rollout_rs_threshold": "2.0,0.01",
        }
    )
    settings = {line.setting: line.value for line in found.lines}
    expected = {
        "algorithm.correction.weights": "sequence",
        "algorithm.correction.bounds": (0.5, 5.0),
        "algorithm.correction.reject.token_ratio": (0.5, 2.0),
        "algorithm.correction.reject.seq_mean_k3": 0.01,
    }
    check(settings, expected)


def test_a_refusal_names_what_is_missing(tmp_path, capsys):
    """The other file may hold the size that does not divide here."""
    text = "python -m verl.trainer.main_ppo --config-name=mine data.train_batch_size=16\n"
    said = refused(tmp_path, capsys, text)
    assert (
        "is no multiple of actor.ppo_mini_batch_size 256" in said
        and "config mine is not here" in said
    )
