"""Names of TRL and verl lead to ours; the documents and the file of names say the same."""

import pathlib
import re

import pytest

from jaxrl.api import build_config
from jaxrl.config.command_line import load_config, load_recipe, run
from jaxrl.config.config_tree import group_class, leaf_types, near_settings, setting_type
from jaxrl.config.schema import Config
from jaxrl.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "jaxrl/config/other_names.txt"
THEIRS, COMMON = (
    [line.split() for line in part.splitlines() if line and not line.startswith("#")]
    for part in FILE.read_text().split(
        "# Names that many programs have, and that stand in no table.\n"
    )
)


def documented() -> list[tuple[str, str]]:
    """The first two cells of each row of the tables of settings."""
    lines = [
        line
        for page in ("from_trl.md", "from_verl.md")
        for line in (ROOT / "docs" / page).read_text().split("## Metrics")[0].splitlines()
    ]
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    return [(theirs, ours) for theirs, ours in rows]


def test_every_name_stands_in_a_table_beside_ours():
    rows = documented()
    for name, *ours in THEIRS:
        last = name.rpartition(".")[2]
        cells = [row for row in rows if re.search(rf"[`.]{re.escape(last)}[`=]", row[0])]
        cells += [row for row in rows if f"`{name.partition('.')[0]}.*`" in row[0]]
        assert cells, f"{name} is in no table"
        for setting in ours:
            leaf = setting.rpartition(".")[2]
            assert any(re.search(rf"\b{leaf}\b", cell[1]) for cell in cells), (name, setting)


def test_every_row_with_one_name_and_one_setting_is_in_the_file():
    known = dict.fromkeys(leaf_types(Config))
    for theirs, ours in documented():
        name, setting = (re.fullmatch(r" `([\w.]+)` ", cell) for cell in (theirs, ours))
        # The same name on both sides leads nowhere else.
        if name and setting and setting[1] in known and name[1] != setting[1]:
            assert near_settings(name[1], known.keys())[0] == setting[1], name[1]


def test_every_setting_of_the_file_exists():
    names = [name for name, *_ in THEIRS + COMMON]
    assert len(names) == len(set(names)) > 100
    for _, *ours in THEIRS + COMMON:
        assert ours and all(setting_type(Config, setting) is not None for setting in ours)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learning_rate", "optim.lr"),
        ("learning-rate", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("actor_rollout_ref.actor.optim.lr", "optim.lr"),
        ("critic.optim.lr", "critic.lr"),
        ("batch_size", "rollout.num_prompts"),
        ("num_generations", "rollout.num_samples"),
        ("actor_rollout_ref.rollout.n", "rollout.num_samples"),
        ("max_completion_length", "rollout.max_response_tokens"),
        ("num_steps", "run.num_steps"),
        ("trainer.total_epochs", "run.num_steps"),
        ("kl_coef", "algorithm.kl.loss_coef"),
        ("beta", "algorithm.kl.loss_coef"),
        ("temperature", "rollout.temperature"),
        ("top_k", "rollout.top_k, evaluation.top_k"),
        ("lr_scheduler_type", "optim.lr_schedule, optim.lr_decay_steps, optim.lr_final"),
        ("prompt_key", "data.train.fields, data.evaluation.fields"),
        ("epsilon_high", "algorithm.loss_options.clip_high"),
        ("clip_ratio_low", "algorithm.loss_options.clip_low"),
        ("warmup_ratio", "optim.lr_warmup_steps"),
        # Ours, misspelt: letters are compared.
        ("optim.lrr", "optim.lr"),
        ("rollout.num_sample", "rollout.num_samples"),
    ],
)
def test_a_name_of_another_program_is_told_ours(given, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf'^unknown setting "{given}"; near: {meant}(,|$)'):
        load_config(Config, "grpo_tiny", {given: "1"})
    meant = meant.partition(",")[0]
    with pytest.raises(
        UserError, match=rf"^unknown flag --{given}; near: --config\.{meant}=VALUE "
    ):
        run(print, Config, argv=["train", "--config", "grpo_tiny", f"--{given}=1"])
    if given.replace(".", "").isidentifier() and given != "num_steps":
        keyword = {"run.num_steps": "num_steps"}.get(meant, meant.replace(".", "__"))
        with pytest.raises(UserError, match=f"^unknown keyword .*near: {keyword}="):
            build_config("grpo_tiny", **{given.replace(".", "__"): 1})


GROUPS = sorted(
    {
        group
        for leaf in leaf_types(Config)
        for parts in [leaf.split(".")]
        for group in (".".join(parts[:n]) for n in range(1, len(parts)))
        if group_class(setting_type(Config, group))
    }
)
OF_GROUPS = {
    "model": "weights",
    "model.lora": "model.lora.rank",
    "data": "data.train.path",
    "data.evaluation": "data.evaluation.path",
    "reward": "reward.grader",
    "reward.judge": "reward.judge.model",
    "optim": "optim.kind",
    "sft": "sft.path",
    "sft.optim": "sft.optim.kind",
    "algorithm": "algorithm.dataflow, algorithm.advantage",
    "algorithm.kl": "algorithm.kl.loss_coef",
    "mesh": "mesh.train",
    "train": "data.train.path",
    "run": "name",
    "reward.functions": "reward.functions.NAME.path",
    "data.sources": "data.sources.NAME.path",
    "placement": "placement.NAME.roles",
}


def test_every_group_that_may_be_taken_for_a_setting_leads_to_one():
    names = {name: ours for name, *ours in COMMON}
    assert len(GROUPS) > 20 and {*GROUPS} >= {x for x in OF_GROUPS if "NAME" not in OF_GROUPS[x]}
    for group in GROUPS:
        parts = group.split(".")
        rows = (names.get(".".join(parts[n:])) for n in range(len(parts)))
        assert next(filter(None, rows), None), f"{group} has no row"


@pytest.mark.parametrize("group", OF_GROUPS)
def test_a_group_that_is_taken_for_a_setting_is_told_which(group):
    told = rf'^"{group}" is a group of settings; near: {OF_GROUPS[group]}[, ]'
    with pytest.raises(UserError, match=told):
        load_config(Config, "grpo_tiny", {group: "x"})
    *outer, last = group.split(".")
    node = recipe = load_recipe("grpo_tiny")
    for name in outer:
        node = node[name]
    node[last] = "x"
    with pytest.raises(UserError, match=told):
        load_config(Config, recipe, {})


def test_an_entry_of_a_table_is_told_its_settings():
    """Not those that a group of its name may be taken for."""
    told = '^"data.sources.model" is a group of settings; near: data.sources.model.source, '
    with pytest.raises(UserError, match=told):
        load_config(Config, "grpo_tiny", {"data.sources.model": "x.jsonl"})


def test_a_misspelt_flag_is_told_the_flag():
    with pytest.raises(UserError, match="unknown flag --dryrun; near: --dry_run "):
        run(print, Config, switches={"dry_run": ""}, argv=["train", "--dryrun"])


def settings(**overrides) -> Config:
    return load_config(Config, "grpo_tiny", {k.replace("__", "."): v for k, v in overrides.items()})


def test_the_command_line_changes_and_adds_groups_of_a_table():
    new = {"reward__functions__f__path": "mine.py:f", "reward__functions__f__weight": ".5"}
    assert settings(**new).reward.functions == {"f": {"path": "mine.py:f", "weight": 0.5}}
    recipe = {"f": {"path": "mine.py:f", "weight": 1.0}}
    again = settings(reward__functions=recipe, reward__functions__f__weight="2")
    assert again.reward.functions == {"f": {"path": "mine.py:f", "weight": 2}}
    placed = settings(placement__one__roles="('actor',)", placement__one__devices="0-1").placement
    assert placed == {"one": {"roles": ("actor",), "devices": "0-1"}}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"reward__functions__f__weight": ".5"}, r"reward\.functions\.f\.path: "),
        ({"reward__functions__f__wieght": ".5"}, r"near: reward\.functions\.f\.weight"),
        ({"placement__all__rolls": "()"}, r"near: placement\.all\.roles"),
        ({"reward__functions__f__weight__x": ".5"}, r"unknown setting \"reward\.functions\.f\."),
        ({"algorithm__loss_options__clip_lo": ".5"}, r"unknown setting .*clip_lo"),
        ({"data__sources__a__pth": "x"}, r"unknown setting \"data\.sources\.a\.pth\""),
    ],
)
def test_what_no_group_has_is_refused(overrides, told):
    with pytest.raises(UserError, match=told):
        settings(**overrides)
