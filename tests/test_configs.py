"""Recipes: all of them load, DAPO's numbers are those published, and no setting is idle."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from jaxrl.commands.run_commands import check_for_plan
from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import flatten_config, group_class, leaf_types
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import abstract_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shards_of
from jaxrl.rewards.graders import check_grader
from jaxrl.trainer.identity import differences, sft_settings

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs").glob("*.py"))

# verl's run_dapo_qwen2.5_32b.sh, by our names; what it leaves at a default of verl's included.
DAPO_32B = {
    "rollout.num_prompts": 512,  # data.train_batch_size
    "rollout.generation_prompts": 1536,  # data.gen_batch_size
    "rollout.num_samples": 16,  # rollout.n
    "rollout.max_generation_batches": 10,  # filter_groups.max_num_gen_batches
    "rollout.temperature": 1.0,
    "rollout.max_response_tokens": 20_480,  # data.max_response_length
    "rollout.dtype": "bfloat16",
    "data.max_prompt_tokens": 2048,  # data.max_prompt_length
    "data.overlong": "left",  # data.truncation
    "data.chat": True,
    "reward.overlong_buffer_tokens": 4096,  # overlong_buffer.len
    "reward.overlong_penalty": 1.0,
    "algorithm.loss_options.clip_low": 0.2,
    "algorithm.loss_options.clip_high": 0.28,
    "algorithm.loss_options.dual_clip": 10.0,  # actor.clip_ratio_c
    "algorithm.advantage_options.normalize_std": True,
    "algorithm.updates_per_step": 16,  # train_batch_size 512 / ppo_mini_batch_size 32
    "optim.lr": 1e-6,
    "optim.lr_warmup_steps": 10,
    "optim.lr_decay_steps": 0,
    "optim.betas": (0.9, 0.999),
    "optim.weight_decay": 0.1,
    "optim.grad_clip": 1.0,
    "train.dtype": "bfloat16",
    "train.remat": "full",  # enable_gradient_checkpointing
    "evaluation.every": 5,  # trainer.test_freq
    "evaluation.num_samples": 32,
    "evaluation.temperature": 1.0,
    "evaluation.top_p": 0.7,  # rollout.val_kwargs.top_p
    "run.save_every": 5,  # trainer.save_freq
    "run.resume": "auto",  # trainer.resume_mode auto
    "sft.num_steps": 0,
    "model.rms_norm_eps": 1e-5,
    "model.vocab_size": 152_064,
    "model.num_tokens": 151_665,
}


@pytest.fixture(scope="module")
def dapo_32b() -> Config:
    return load_config(Config, str(ROOT / "configs/dapo_qwen32b.py"), {})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_divides(path):
    config = load_config(Config, str(path), {})
    assert config.name == path.stem
    about = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert re.search(rf"python launch/\w+\.py --config configs/{re.escape(path.name)}", about)
    assert "Hardware:" in about
    assert "{prompt}" in config.data.template
    check_grader(config.reward.grader, config.reward.grader_options)
    mesh = abstract_mesh(ParallelLayout.from_config(config.mesh))
    assert config.train.rows % shards_of("batch", TRAIN_RULES, mesh) == 0
    assert config.row_tokens % shards_of("length", TRAIN_RULES, mesh) == 0
    slots = config.rollout.slots
    for size in (0 if slots == "auto" else slots, config.rollout.prefill_prompts):
        assert size % shards_of("batch", GENERATE_RULES, mesh) == 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_dry_run_of_a_recipe_needs_no_files(path, tmp_path, monkeypatch):
    config = load_config(Config, str(path.resolve()), {})
    monkeypatch.chdir(tmp_path)
    if config.sft.path == "conversations.jsonl":
        (tmp_path / config.sft.path).write_text('{"prompt": "1 + 1?", "response": "2"}\n')
    check_for_plan(config)


@pytest.mark.parametrize("setting", DAPO_32B)
def test_dapo_32b_has_the_published_number(dapo_32b, setting):
    assert flatten_config(dapo_32b)[setting] == DAPO_32B[setting]


def test_dapo_32b_is_qwen_32b(dapo_32b):
    assert dapo_32b.model.num_params == 32_763_876_352
    assert dapo_32b.model.kv_bytes_per_token(2) == 262_144
    assert ParallelLayout.from_config(dapo_32b.mesh).num_devices == 16 * 8


def test_dapo_32b_asks_as_the_paper_does(dapo_32b):
    prompt = dapo_32b.data.template.replace("{prompt}", "1 + 1 = ?")
    assert prompt.endswith(
        '\n\n1 + 1 = ?\n\nRemember to put your answer on its own line after "Answer:".'
    )
    assert prompt.startswith("Solve the following math problem step by step. The last line of your")


# What a row of Table 1 sets otherwise than the row with one technique more; the first is next to DAPO itself.
TABLE_1 = {
    "without-dynamic-sampling": {"algorithm.dataflow": ("dapo", "grpo")},
    "overlong-punishment": {"algorithm.aggregation": ("token-mean", "seq-mean-token-mean")},
    "clip-higher": {
        "reward.overlong_buffer_tokens": (4096, 0),
        "reward.mask_truncated": (False, True),
    },
    "overlong-filtering": {"algorithm.loss_options.clip_high": (0.28, 0.2)},
    "naive-grpo": {"reward.mask_truncated": (True, False)},
}


@pytest.mark.parametrize("hardware", ["", "h200-64"])
def test_each_row_of_dapos_table_differs_from_the_next_by_its_technique(hardware):
    def settings(*words: str) -> dict:
        layout = ",".join(filter(None, words))
        path = f"{ROOT}/configs/dapo_qwen32b.py{':' * bool(layout)}{layout}"
        return flatten_config(load_config(Config, path, {}))

    richer, names = settings(hardware), {"dapo_qwen32b"}
    for row, expected in TABLE_1.items():
        found = settings(hardware, row)
        names.add(found["name"])
        pairs = {k: (richer[k], found[k]) for k in richer if richer[k] != found[k]}
        assert pairs.pop("name") and pairs == expected
        richer = found
    # Each has a folder of its own.
    assert len(names) == 6 and "dapo_qwen32b_naive_grpo" in names
    check_for_plan(load_config(Config, str(ROOT / "configs/dapo_qwen32b.py:naive-grpo"), {}))


@pytest.mark.parametrize(
    "layout", ["naive", "h200-64,naive", "h200-64,", "h200-64,v5p-128", "naive-grpo,clip-higher"]
)
def test_a_row_or_hardware_without_a_name_is_refused(layout):
    message = f"layout '{layout}' is not one of v5p-128, .*, nor one of without-dynamic-sampling, "
    with pytest.raises(UserError, match=message):
        load_config(Config, f"{ROOT}/configs/dapo_qwen32b.py:{layout}", {})


def test_every_setting_is_read():
    """A field that nothing reads is a bug: whoever sets it believes it does something.

    A read is an attribute of that name outside the checks of a dataclass, or `vars(self)` in its class; a
    setting of the run itself must be read off something called `config`. Names that other objects share can
    hide an idle setting.
    """
    receivers: dict[str, set[str]] = {}
    for path in (x for f in ("jaxrl", "extensions", "launch") for x in (ROOT / f).rglob("*.py")):
        for name, receiver in _attributes_read(ast.parse(path.read_text())):
            receivers.setdefault(name, set()).add(receiver)
    idle = [
        setting
        for setting, kind in leaf_types(Config).items()
        if group_class(kind) is None and not _is_read(setting, receivers)
    ]
    assert not idle, f"nothing reads {', '.join(idle)}"


def _is_read(setting: str, receivers: dict[str, set[str]]) -> bool:
    group, _, name = setting.rpartition(".")
    found = receivers.get(name, set())
    return bool(found) if group else "config" in found


def _attributes_read(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, last part of what it is read off) of each attribute below `node`."""
    if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
        return
    if isinstance(node, ast.ClassDef) and "vars(self)" in ast.unparse(node):
        for field in node.body:
            if isinstance(field, ast.AnnAssign):
                yield ast.unparse(field.target), "self"
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr, ast.unparse(node.value).split(".")[-1]
    for child in ast.iter_child_nodes(node):
        yield from _attributes_read(child)


def test_recipes_that_share_an_sft_stage_agree_about_it():
    """Otherwise the recipe that runs first would decide what the others begin with."""
    configs = {path.stem: load_config(Config, str(path), {}) for path in RECIPES}
    sharing = {name: config.sft.run for name, config in configs.items() if config.sft.run}
    assert {"dpo_tiny", "cost_tiny", "grpo_tiny"} <= sharing.keys()
    for name, owner in sharing.items():
        theirs, own = (sft_settings(configs[run], {}) for run in (owner, name))
        assert not differences(theirs, own), name
