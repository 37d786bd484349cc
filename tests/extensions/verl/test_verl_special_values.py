"""Values of verl for "never", "all", "none" or "as another setting says" are read as verl reads them.

The expected values are worked out from verl's code: a comment says how, where it is not plain.
"""

import math

import pytest

from jaxrl.errors import UserError
from jaxrl_verl.verl_settings import convert_settings

ABSENT = object()
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
CORRECTION = "algorithm.rollout_correction"


def settings_of(given, num_train_prompts=0):
    found = convert_settings(given, num_train_prompts=num_train_prompts, every=True)
    return {line.setting: line.value for line in found.lines}, found


# (values of verl, setting of jaxrl, its value)
VALUES = [
    # verl saves and tests if the number is above 0, and then after the last step, too. It tests once before
    # the first step in any case, but for val_before_train=False.
    *(({"trainer.test_freq": n}, "evaluation.every", -1) for n in (-1, 0, -5, None)),
    ({}, "evaluation.every", -1),
    ({"trainer.val_before_train": True}, "evaluation.every", -1),
    *(
        ({"trainer.test_freq": n, "trainer.val_before_train": False}, "evaluation.every", 0)
        for n in (-1, 0, None)
    ),
    ({"trainer.test_freq": 7}, "evaluation.every", 7),
    ({"trainer.test_freq": -1, "trainer.total_training_steps": 40}, "evaluation.every", -1),
    ({"trainer.test_freq": 1, "trainer.total_epochs": 15}, "evaluation.every", 1),
    *(({"trainer.save_freq": n}, "run.save_every", 0) for n in (-1, 0, -2, None)),
    ({}, "run.save_every", 0),
    ({"trainer.save_freq": -1, "trainer.total_training_steps": 40}, "run.save_every", 0),
    ({"trainer.save_freq": 3, "trainer.total_epochs": 2}, "run.save_every", 3),
    # All checkpoints stay, unless the number is above 0.
    *(({"trainer.max_actor_ckpt_to_keep": n}, "run.keep_checkpoints", 0) for n in (None, -1, 0)),
    ({}, "run.keep_checkpoints", 0),
    ({"trainer.max_actor_ckpt_to_keep": 3}, "run.keep_checkpoints", 3),
    # The actor learns from step critic_warmup on, and the first step is 1.
    *(({"trainer.critic_warmup": n}, "critic.warmup_steps", 0) for n in (-1, 0, 1)),
    ({"trainer.critic_warmup": 5}, "critic.warmup_steps", 4),
    # All prompts, unless the number is above 0.
    *(({"data.train_max_samples": n}, "data.train.size", 0) for n in (-1, 0)),
    ({"data.train_max_samples": 500}, "data.train.size", 500),
    *(({"data.val_max_samples": n}, "data.evaluation.size", 0) for n in (-1, 0)),
    ({"data.val_max_samples": 20}, "data.evaluation.size", 20),
    # The batch of training, if it is null or 0.
    *(
        (
            {
                "algorithm.adv_estimator": "grpo",
                "algorithm.filter_groups.enable": True,
                "data.train_batch_size": 512,
                "data.gen_batch_size": n,
            },
            "rollout.generation_prompts",
            expected,
        )
        for n, expected in ((None, 512), (0, 512), (1536, 1536))
    ),
    # No limit, unless the number is above 0.
    *(
        (
            {
                "algorithm.adv_estimator": "grpo",
                "algorithm.filter_groups.enable": True,
                "algorithm.filter_groups.max_num_gen_batches": n,
            },
            "rollout.max_generation_batches",
            expected,
        )
        for n, expected in ((None, 0), (0, 0), (-1, 0), (10, 10))
    ),
    # Every token of the vocabulary.
    *(({f"{ROLLOUT}.top_k": n}, "rollout.top_k", 0) for n in (-1, 0)),
    ({f"{ROLLOUT}.top_k": 50}, "rollout.top_k", 50),
    # verl's servers sample evaluations at this temperature, whatever do_sample says.
    ({}, "evaluation.temperature", 0.0),
    ({f"{ROLLOUT}.val_kwargs.temperature": 0}, "evaluation.temperature", 0.0),
    ({f"{ROLLOUT}.val_kwargs.temperature": 0.6}, "evaluation.temperature", 0.6),
    (
        {f"{ROLLOUT}.val_kwargs.do_sample": False, f"{ROLLOUT}.val_kwargs.temperature": 0.6},
        "evaluation.temperature",
        0.6,
    ),
    ({f"{ROLLOUT}.val_kwargs.do_sample": True}, "evaluation.temperature", 0.0),
    # Steps above 0 count; otherwise the ratio of all steps: int(0.1 x 55) = 5.
    *(
        (
            {
                "trainer.total_training_steps": 55,
                f"{ACTOR}.optim.lr_warmup_steps": n,
                f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1,
            },
            "optim.lr_warmup_steps",
            expected,
        )
        for n, expected in ((-1, 5), (0, 5), (None, 5), (3, 3))
    ),
    ({f"{ACTOR}.optim.lr_warmup_steps": -1}, "optim.lr_warmup_steps", 0),
    # Null is clip_ratio.
    *(
        (
            {f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_{end}": None},
            "algorithm.loss_options",
            {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 3.0},
        )
        for end in ("low", "high")
    ),
    # Null is the length of a response.
    *(
        (
            {
                f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                f"{ACTOR}.loss_scale_factor": n,
                "data.max_response_length": 300,
            },
            "algorithm.aggregation_options",
            {"scale": expected},
        )
        for n, expected in ((None, 300.0), (64, 64.0))
    ),
    # Megatron clips nothing at 0. FSDP clips to a norm of 0 there, which trains nothing, and is refused.
    (
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.optim.clip_grad": 0.0},
        "optim.grad_clip",
        math.inf,
    ),
    ({f"{ACTOR}.strategy": "megatron", f"{ACTOR}.grad_clip": 2.0}, "optim.grad_clip", 2.0),
    ({f"{ACTOR}.strategy": "fsdp", f"{ACTOR}.grad_clip": 0.0}, "optim.grad_clip", 0.0),
    # All 8 devices hold one copy of the state: tensor 2 x fsdp 4. With 4 or 2 devices it is fsdp 2 or 1.
    *(
        ({f"{ACTOR}.fsdp_config.fsdp_size": n}, "mesh.fsdp", expected)
        for n, expected in ((-1, 4), (None, 4), (8, 4), (12, 4), (64, 4), (4, 2), (2, 1))
    ),
    # The critic has the actor's number of passes.
    *(
        (
            {f"{ACTOR}.ppo_epochs": 3, "critic.ppo_epochs": n},
            "critic.epochs",
            expected,
        )
        for n, expected in ((None, 3), (2, 2))
    ),
    # No adapter.
    *(({f"{MODEL}.lora_rank": n}, "model.lora.rank", ABSENT) for n in (None, 0, -1)),
    ({f"{MODEL}.lora_rank": 8}, "model.lora.rank", 8),
    ({f"{MODEL}.lora_rank": 0, f"{MODEL}.lora.rank": 16}, "model.lora.rank", 16),
    # No weights without a threshold; 2 is verl's default for a file that does not name one.
    ({f"{CORRECTION}.rollout_is": None}, "algorithm.correction.weights", ABSENT),
    (
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": None},
        "algorithm.correction.weights",
        ABSENT,
    ),
    ({f"{CORRECTION}.rollout_is": "token"}, "algorithm.correction.bounds", (0.0, 2.0)),
    # Megatron's experts have the tensor size of the rest: 8 devices of experts, tensor 2 x expert 4.
    (
        {
            f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
            f"{ACTOR}.megatron.expert_model_parallel_size": 4,
            f"{ACTOR}.megatron.expert_tensor_parallel_size": None,
        },
        "mesh.expert",
        4,
    ),
    ({f"{MODEL}.path": "a", f"{MODEL}.tokenizer_path": None}, "tokenizer.path", "a"),
    ({"trainer.resume_mode": None}, "run.resume", "auto"),
    ({"trainer.resume_mode": "disable"}, "run.resume", "never"),
    ({"reward.custom_reward_function.path": None}, "reward.functions", ABSENT),
    (
        {
            "reward.reward_kwargs.overlong_buffer_cfg.enable": False,
            "reward.reward_kwargs.overlong_buffer_cfg.len": 4096,
        },
        "reward.overlong_buffer_tokens",
        0,
    ),
    ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0},
     "algorithm.kl.reward_coef", ABSENT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    VALUES,
    ids=[f"{given} {setting}" for given, setting, _ in VALUES],
)
def test_special_values_are_read_as_verl_reads_them(given, setting, value):
    assert settings_of(given)[0].get(setting, ABSENT) == value


# Prompts in the files, epochs, all steps, largest number of prompts: steps at 64 prompts a batch.
STEPS = [
    (1000, 2, None, -1, 30),  # 15 batches of an epoch
    (1000, 2, 20, -1, 20),
    (1000, 2, 500, -1, 30),  # both end it, whichever comes first
    (1000, 2, None, 200, 6),  # 3 batches of 200 prompts
    (1000, 2, None, 5000, 30),
    (1000, None, None, -1, 450),  # 30 epochs
    (1000, 0, None, -1, 0),
    (0, 2, 20, -1, 20),
    (0, 2, None, -1, ABSENT),
    (0, None, 0, -1, 0),
]


@pytest.mark.parametrize(("prompts", "epochs", "steps", "most", "expected"), STEPS)
def test_steps_end_with_the_epochs_or_the_steps(prompts, epochs, steps, most, expected):
    given = {
        "data.train_batch_size": 64,
        f"{ACTOR}.ppo_mini_batch_size": 64,
        "trainer.total_epochs": epochs,
        "trainer.total_training_steps": steps,
        "data.train_max_samples": most,
    }
    found, imported = settings_of(given, prompts)
    assert found.get("run.num_steps", ABSENT) == expected
    # Without the number of prompts nobody knows whether the epochs end earlier.
    open_end = not prompts and epochs is not None
    assert any("--num_train_prompts" in text for text in imported.remarks) == open_end


def test_the_warm_up_is_a_part_of_all_steps_that_the_file_names():
    given = {
        "data.train_batch_size": 64,
        f"{ACTOR}.ppo_mini_batch_size": 64,
        "trainer.total_epochs": 2,
        "trainer.total_training_steps": 500,
        f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1,
    }
    found = settings_of(given, 1000)[0]
    assert (found["run.num_steps"], found["optim.lr_warmup_steps"]) == (30, 50)


def test_epochs_without_a_whole_batch_are_refused():
    with pytest.raises(UserError, match=r"100 prompts.*data\.train_batch_size 1024.*no step"):
        convert_settings({}, num_train_prompts=100)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"trainer.test_freq": 5}, True), ({"trainer.test_freq": -1}, False), ({}, False)],
)
def test_an_evaluation_that_cannot_be_left_out_is_named(given, named):
    found = settings_of(given | {"trainer.val_before_train": False})[1]
    assert ("trainer.val_before_train False" in str(found.without)) == named


@pytest.mark.parametrize(
    ("most", "sizes"), [(-1, [0, 0, 0]), (7, [3, 2, 2]), (6, [2, 2, 2]), (2, [1, 1, 1])]
)
@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("train", ("data.train", "data.sources.train_2", "data.sources.train_3")),
        ("val", ("data.evaluation", *(f"data.evaluations.evaluation_{n}" for n in (2, 3)))),
    ],
)
def test_a_number_of_samples_is_that_of_all_files(kind, groups, most, sizes):
    """In verl these are one data set, of which so many rows are taken. Here 0 is a whole file."""
    given = {f"data.{kind}_files": ["a", "b", "c"], f"data.{kind}_max_samples": most}
    found, imported = settings_of(given)
    assert [found[f"{group}.size"] for group in groups] == sizes
    assert any("set weight and size" in text for text in imported.remarks) == (kind == "train")


@pytest.mark.parametrize(
    ("path", "setting"),
    [("a/mine.py", "a/mine.py:Mine"), ("pkg://my.samplers", "my.samplers:Mine")],
)
def test_a_sampler_of_verl_is_named_and_what_it_lacks(path, setting):
    given = {"data.sampler.class_path": path, "data.sampler.class_name": "Mine"}
    found, imported = settings_of(given)
    assert found["data.sampler"] == setting and not imported.unknown
    (said,) = (text for text in imported.remarks if "data.sampler" in text)
    assert "(data_source, data_config)" in said and "__init__(prompts, seed)" in said
    absent = {"data.sampler.class_path": None, "data.sampler.class_name": None}
    found, imported = settings_of(absent)
    assert "data.sampler" not in found and not imported.unknown


def test_a_batch_of_0_is_that_of_an_asynchronous_trainer():
    with pytest.raises(
        UserError, match=r"data\.train_batch_size 0 .*require_batches 2.*; write 64"
    ):
        convert_settings(
            {
                "data.train_batch_size": 0,
                f"{ACTOR}.ppo_mini_batch_size": 32,
                "async_training.require_batches": 2,
            }
        )
