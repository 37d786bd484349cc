"""Maps names of settings in verl, TRL and Hugging Face to our settings with the same meaning.

Only names with a certain meaning are listed. They are suggestions in error messages; recipes must use our
own names.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

_LR = ("optim.lr", "critic.lr", "sft.optim.lr")
_WARMUP = ("optim.lr_warmup_steps", "sft.optim.lr_warmup_steps")
_GRAD_CLIP = ("optim.grad_clip",)
_STEPS = ("run.num_steps", "sft.num_steps")
_SAMPLES = ("rollout.num_samples", "evaluation.num_samples")
_RESPONSE = ("rollout.max_response_tokens",)
_CLIP_LOW = ("algorithm.loss_options.clip_low",)
_CLIP_HIGH = ("algorithm.loss_options.clip_high",)
_CLIP = (*_CLIP_LOW, *_CLIP_HIGH, "algorithm.loss_options")
_LAYOUT = ("mesh.train", "mesh.generate")

SYNONYMS: dict[str, tuple[str, ...]] = {
    # optimiser
    "learning_rate": _LR,
    "warmup_steps": _WARMUP,
    "num_warmup_steps": _WARMUP,
    "max_grad_norm": _GRAD_CLIP,
    "adam_beta1": ("optim.beta1",),
    "adam_beta2": ("optim.beta2",),
    "adam_epsilon": ("optim.epsilon",),
    # a step
    "max_steps": _STEPS,
    "total_training_steps": _STEPS,
    "batch_size": ("rollout.num_prompts",),
    "train_batch_size": ("rollout.num_prompts",),
    "gen_batch_size": ("rollout.generation_prompts",),
    "max_num_gen_batches": ("rollout.max_generation_batches",),
    "num_mini_batches": ("algorithm.updates_per_step",),
    "num_minibatches": ("algorithm.updates_per_step",),
    "ppo_mini_batch_size": ("algorithm.updates_per_step",),
    "micro_batch_size": ("train.rows",),
    "ppo_micro_batch_size_per_gpu": ("train.rows",),
    "ppo_max_token_len_per_gpu": ("train.row_tokens",),
    "ppo_epochs": ("algorithm.epochs", "critic.epochs"),
    "num_ppo_epochs": ("algorithm.epochs", "critic.epochs"),
    "num_iterations": ("algorithm.epochs",),
    # sampling
    "n": _SAMPLES,
    "num_generations": _SAMPLES,
    "num_return_sequences": _SAMPLES,
    "max_prompt_length": ("data.max_prompt_tokens",),
    "max_response_length": _RESPONSE,
    "max_completion_length": _RESPONSE,
    "max_new_tokens": _RESPONSE,
    "stop": ("rollout.stop_strings",),
    "max_num_seqs": ("rollout.slots",),
    "gpu_memory_utilization": ("rollout.memory_fraction",),
    "filter_groups": ("rollout.keep_groups",),
    # losses
    "adv_estimator": ("algorithm.advantage",),
    "gae_lambda": ("algorithm.advantage_options.lam", "algorithm.advantage_options"),
    "gamma": ("algorithm.advantage_options.gamma", "algorithm.advantage_options"),
    "loss_agg_mode": ("algorithm.aggregation",),
    "clip_ratio": _CLIP,
    "clip_range": _CLIP,
    "cliprange": _CLIP,
    "clip_ratio_low": (*_CLIP_LOW, "algorithm.loss_options"),
    "clip_ratio_high": (*_CLIP_HIGH, "algorithm.loss_options"),
    "epsilon_high": (*_CLIP_HIGH, "algorithm.loss_options"),
    "clip_ratio_c": ("algorithm.loss_options.dual_clip", "algorithm.loss_options"),
    "cliprange_value": ("critic.clip",),
    "entropy_coeff": ("algorithm.entropy_coef",),
    "kl_coef": ("algorithm.kl.reward_coef", "algorithm.kl.loss_coef"),
    "kl_loss_coef": ("algorithm.kl.loss_coef",),
    "use_kl_loss": ("algorithm.kl.loss_coef",),
    "kl_loss_type": ("algorithm.kl.loss_estimate",),
    "kl_penalty": ("algorithm.kl.reward_estimate",),
    "target_kl": ("algorithm.kl.target",),
    "beta": ("algorithm.kl.loss_coef", "preference.options"),
    "critic_warmup": ("critic.warmup_steps",),
    "mask_truncated_completions": ("reward.mask_truncated",),
    # devices
    "tensor_parallel_size": _LAYOUT,
    "tensor_model_parallel_size": _LAYOUT,
    "pipeline_model_parallel_size": _LAYOUT,
    "fsdp_size": ("mesh.fsdp",),
    "ulysses_sequence_parallel_size": ("mesh.context",),
    "gradient_checkpointing": ("train.remat",),
    "enable_gradient_checkpointing": ("train.remat",),
    "bf16": ("train.dtype", "rollout.dtype"),
    # models and data
    "model_name_or_path": ("weights",),
    "model_path": ("weights",),
    "tokenizer_name": ("tokenizer.path",),
    "hidden_size": ("model.d_model",),
    "intermediate_size": ("model.d_ff",),
    "num_hidden_layers": ("model.num_layers",),
    "num_attention_heads": ("model.num_heads",),
    "num_key_value_heads": ("model.num_kv_heads",),
    "tie_word_embeddings": ("model.tie_embeddings",),
    "lora_rank": ("model.lora.rank",),
    "lora_r": ("model.lora.rank",),
    "lora_alpha": ("model.lora.alpha",),
    "target_modules": ("model.lora.targets",),
    "train_files": ("data.train.path",),
    "val_files": ("data.evaluation.path",),
    "prompt_key": ("data.train.prompt_field", "data.evaluation.prompt_field"),
    # output of a run
    "output_dir": ("run.output",),
    "run_name": ("name",),
    "experiment_name": ("name",),
    "project_name": ("run.loggers",),
    "report_to": ("run.loggers",),
    "logger": ("run.loggers",),
    "save_steps": ("run.save_every",),
    "save_freq": ("run.save_every",),
    "save_total_limit": ("run.keep_checkpoints",),
    "eval_steps": ("evaluation.every",),
    "test_freq": ("evaluation.every",),
    "resume_from_checkpoint": ("run.resume",),
    "resume_mode": ("run.resume",),
}


def synonyms_of(name: str, known: Collection[str]) -> list[str]:
    """Known settings that mean the same as a foreign dotted name, most similar group first."""
    group, _, word = name.rpartition(".")

    def likeness(setting: str) -> float:
        return difflib.SequenceMatcher(None, group, setting.rpartition(".")[0]).ratio()

    found = [setting for setting in SYNONYMS.get(word, ()) if setting in known]
    return sorted(found, key=likeness, reverse=True)
