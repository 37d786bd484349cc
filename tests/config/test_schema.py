"""Settings that cannot work are refused where they are written, with their full names."""

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import leaf_types
from jaxrl.config.schema import Config
from jaxrl.config.synonyms import SYNONYMS
from jaxrl.errors import UserError
from jaxrl.trainer.cross_checks import check_algorithm


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("algorithm.updates_per_step", "0", "algorithm.updates_per_step 0 is below 1"),
        ("algorithm.updates_per_step", "7", "192 sequences do not divide into"),
        ("algorithm.loss_options.dual_clip", "1.0", "dual_clip 1.0 is not above 1"),
        ("algorithm.loss_options.clip_low", "-0.5", "clip_low -0.5 is below 0"),
        ("rollout.max_generation_batches", "-1", "max_generation_batches -1 is below 0"),
        ("rollout.on_shortage", "fill", "there is no last one; set it to 1 or more"),
        ("rollout.num_samples", "0", "num_samples 0 is below 1"),
        ("rollout.temperature", "0.0", "temperature 0.0 is below 0.01"),
        ("train.row_tokens", "64", "cannot hold the longest sequence"),
        ("train.remat", "some", "'some': expected 'full', 'projections', 'offload' or 'none'"),
        ("train.rows", "0", "train.rows 0 is below 1"),
        ("reward.overlong_buffer_tokens", "48", "leaves nothing unpunished"),
        ("run.num_steps", "0", "run.num_steps 0 is below 1"),
        ("optim.lrr", "1", "near: optim.lr"),
        ("optim.lr", "fast", "optim.lr"),
        ("optim.learning_rate", "1", 'unknown setting "optim.learning_rate"; near: optim.lr, '),
        ("learning_rate", "1", "near: optim.lr, critic.lr, "),
        ("critic.learning_rate", "1", "near: critic.lr, "),
        ("data.train_batch_size", "1", "near: rollout.num_prompts"),
        ("max_steps", "1", "near: run.num_steps"),
        ("num_generations", "1", "near: rollout.num_samples"),
        ("report_to", "wandb", "near: run.loggers"),
        ("actor_rollout_ref.rollout.n", "1", "near: rollout.num_samples"),
        ("temperature", "1", "near: rollout.temperature"),
        ("beta", "1", "near: algorithm.kl.loss_coef"),
        ("algorithm.kl_ctrl.kl_coef", "1", "near: algorithm.kl.reward_coef"),
        ("clip_ratio_high", "1", "near: algorithm.loss_options.clip_high"),
        ("model.head_dim", "31", "head_dim 31 is odd"),
        ("model.num_kv_heads", "3", "not a multiple of num_kv_heads 3"),
    ],
)
def test_refused(setting, value, message):
    also = {"rollout.max_generation_batches": "0"} if setting == "rollout.on_shortage" else {}
    with pytest.raises(UserError) as error:
        check_algorithm(load_config(Config, "configs/dapo_tiny.py", {setting: value, **also}))
    assert message in str(error.value)


def test_words_of_other_libraries_lead_to_settings_that_exist():
    known = set(leaf_types(Config))
    free = {"algorithm.loss_options", "algorithm.advantage_options"}
    for word, settings in SYNONYMS.items():
        for setting in settings:
            assert setting in known or setting.rpartition(".")[0] in free, (word, setting)
