"""Converts settings of verl to settings of jaxrl (docs/from_verl.md has the same as tables).

`SAME` has the settings with one counterpart each. The functions after it convert those that belong
together: batches, layouts, losses, KL, correction, data, schedules. Where a file does not have a setting,
verl's default counts if ours differs, so that the recipe trains what verl would train.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl.config.model_shape import is_here
from jaxrl.errors import UserError
from jaxrl.models.shapes import SHAPES

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
_CORRECTION = "algorithm.rollout_correction"

# Names of other releases and recipes.
_ALIASES = {
    "reward_model.overlong_buffer.": f"{_OVERLONG}.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": f"{_OVERLONG}.",
    "reward_model.reward_kwargs.max_resp_len": "reward.reward_kwargs.max_resp_len",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "custom_reward_function.": "reward.custom_reward_function.",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
}


class Counterpart(NamedTuple):
    """A setting of verl with one counterpart.

    Attributes:
      verl: its name.
      jaxrl: the setting of jaxrl.
      default: verl's default, which is written if the file has no value; None writes nothing.
      convert: from verl's value to ours; raises ValueError for a value without counterpart.
      conversion: the same in words, for the tables.
    """

    verl: str
    jaxrl: str
    default: Any = None
    convert: Callable[[Any], Any] = lambda value: value
    conversion: str = "the same"


def _path(value: Any) -> str:
    if str(value).startswith("hdfs://"):
        raise ValueError("hdfs:// is not read; copy the files to a directory")
    return os.path.expanduser(str(value).removeprefix("file://"))


def _name(value: Any) -> str:
    # The name is also that of a folder.
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in str(value)) or "run"


SAME = (
    Counterpart("trainer.experiment_name", "name", None, _name, "other characters become _"),
    Counterpart("trainer.default_local_dir", "run.output"),
    Counterpart("trainer.max_actor_ckpt_to_keep", "run.keep_checkpoints"),
    Counterpart("trainer.critic_warmup", "critic.warmup_steps"),
    Counterpart(f"{_MODEL}.path", "weights", None, _path, "a directory or a name on the hub"),
    Counterpart(f"{_MODEL}.lora_adapter_path", "adapter", None, _path),
    Counterpart(f"{_MODEL}.lora_alpha", "model.lora.alpha", None, float),
    Counterpart(
        f"{_MODEL}.enable_gradient_checkpointing",
        "train.remat",
        True,
        lambda on: "full" if on else "none",
        "True is full, False is none",
    ),
    Counterpart("data.max_prompt_length", "data.max_prompt_tokens", 512),
    Counterpart("data.max_response_length", "rollout.max_response_tokens", 512),
    Counterpart("data.train_max_samples", "data.train.size", None, lambda n: max(n, 0), "-1 is 0"),
    Counterpart(
        "data.val_max_samples", "data.evaluation.size", None, lambda n: max(n, 0), "-1 is 0"
    ),
    Counterpart(
        "data.apply_chat_template_kwargs.enable_thinking", "data.chat_options.enable_thinking"
    ),
    Counterpart("data.seed", "seed"),
    Counterpart("data.train_batch_size", "rollout.num_prompts", 1024),
    Counterpart(f"{_ROLLOUT}.n", "rollout.num_samples", 1),
    Counterpart(f"{_ROLLOUT}.temperature", "rollout.temperature"),
    Counterpart(f"{_ROLLOUT}.top_k", "rollout.top_k", None, lambda k: max(k, 0), "-1 is 0"),
    Counterpart(f"{_ROLLOUT}.top_p", "rollout.top_p"),
    Counterpart(f"{_ROLLOUT}.dtype", "rollout.dtype", "bfloat16", str, "float16 has none"),
    Counterpart(f"{_ROLLOUT}.val_kwargs.n", "evaluation.num_samples", 1),
    Counterpart(
        f"{_ROLLOUT}.val_kwargs.top_k", "evaluation.top_k", None, lambda k: max(k, 0), "-1 is 0"
    ),
    Counterpart(f"{_ROLLOUT}.val_kwargs.top_p", "evaluation.top_p"),
    Counterpart(f"{_ACTOR}.ppo_epochs", "algorithm.epochs"),
    Counterpart(f"{_ACTOR}.entropy_coeff", "algorithm.entropy_coef", None, float),
    Counterpart(f"{_ACTOR}.grad_clip", "optim.grad_clip", None, float),
    Counterpart(f"{_ACTOR}.optim.lr", "optim.lr", 1e-6, float),
    Counterpart(f"{_ACTOR}.optim.weight_decay", "optim.weight_decay", 0.01, float),
    Counterpart("critic.optim.lr", "critic.lr", None, float),
    Counterpart(
        "critic.model.path", "critic.weights", None, _path, "a directory or a name on the hub"
    ),
    Counterpart("critic.cliprange_value", "critic.clip", None, float),
)

_OWN_SAMPLER = "jaxrl samples with its own engine in the same program"
_PACKED = "rows of a fixed length are packed (train.rows x train.row_tokens), for every pass"
_NO_WORKERS = "there are no workers, Ray or pools of processes to set up"
_COMPILED = "XLA compiles and fuses everything"
_ENVIRONMENT = "rollout.environment: a function that answers turns (docs/rollout.md)"
_BY_LAYOUT = "files are read by their layout (docs/data.md)"
# Patterns of names, and why they have no counterpart. The first that fits counts.
NO_COUNTERPART = (
    (
        f"{_ROLLOUT}.gpu_memory_utilization",
        "rollout.memory_fraction counts the weights of all roles; its default stands",
    ),
    (f"{_ROLLOUT}.max_num_seqs", 'rollout.slots="auto" takes as many as fit'),
    (f"{_ROLLOUT}.*chunked_prefill", "rollout.prefill_chunk_tokens, for long prompts"),
    (
        f"{_ROLLOUT}.max_num_batched_tokens",
        "rollout.prefill_prompts and rollout.prefill_chunk_tokens",
    ),
    (f"{_ROLLOUT}.multi_turn.*", _ENVIRONMENT),
    (f"{_ROLLOUT}.agent.*", _ENVIRONMENT),
    (f"{_ROLLOUT}.log_prob*", _PACKED),
    (f"{_ROLLOUT}.calculate_log_probs", "always on"),
    (f"{_ROLLOUT}.do_sample", "rollout.temperature"),
    (f"{_ROLLOUT}.*", _OWN_SAMPLER),
    (f"{_REF}.*", "the reference has the actor's layout and rows; docs/placement.md for others"),
    (
        f"{_ACTOR}.*offload*",
        "mesh.offload_training_state keeps the training state on the host while sampling",
    ),
    (f"{_ACTOR}.shuffle", "a step's samples are shuffled by the seed"),
    (f"{_ACTOR}.*_batch_size*", _PACKED),
    (f"{_ACTOR}.use_remove_padding", _PACKED),
    (f"{_ACTOR}.*pad_to_length*", _PACKED),
    (f"{_ACTOR}.*entropy*", "entropy is always measured, a chunk of positions at a time"),
    (f"{_ACTOR}.calculate_sum_pi_squared", "measured if the advantage needs it"),
    (f"{_ACTOR}.use_torch_compile", _COMPILED),
    (f"{_ACTOR}.use_fused_kernels", _COMPILED),
    (f"{_ACTOR}.use_prefix_grouper", "train.share_prompts, by default where it is faster"),
    (f"{_ACTOR}.rollout_n", "rollout.num_samples"),
    (
        f"{_ACTOR}.checkpoint.*",
        "a checkpoint always has all that a run goes on from (docs/runs.md)",
    ),
    (f"{_ACTOR}.optim.*", "optim: AdamW, constant or cosine (jaxrl train --help optim)"),
    (f"{_ACTOR}.fsdp_config.*", "mesh.fsdp and mesh.sharding; XLA schedules gathers"),
    (f"{_ACTOR}.megatron.*", "mesh (docs/placement.md)"),
    (f"{_ACTOR}.*seed*", "seed"),
    (f"{_ACTOR}.profiler.*", "jaxrl profile traces one step"),
    (f"{_ACTOR}.policy_loss.*", "options of losses that are not used"),
    (f"{_ACTOR}.router_replay.*", "sampler and trainer route by the same program"),
    (f"{_ACTOR}.qat.*", "train.matmuls has int8 and fp8"),
    (f"{_MODEL}.use_remove_padding", _PACKED),
    (f"{_MODEL}.*kernel*", _COMPILED),
    (f"{_MODEL}.use_liger", _COMPILED),
    (f"{_MODEL}.use_shm", _NO_WORKERS),
    (f"{_MODEL}.enable_activation_offload", "train.remat"),
    (f"{_MODEL}.trust_remote_code", "code of models is never executed"),
    (f"{_MODEL}.external_lib", "code of models is never executed"),
    (f"{_MODEL}.override_config*", "the model's config.json"),
    (f"{_MODEL}.lora.*", "model.lora"),
    (f"{_MODEL}.tiled_mlp.*", "train.remat"),
    (f"{_MODEL}.mtp.*", "no speculative sampling"),
    (f"{_MODEL}.fused_kernel_options.*", _COMPILED),
    ("actor_rollout_ref.hybrid_engine", "always: one program for training and sampling"),
    ("actor_rollout_ref.nccl_timeout", "hosts.lost_after_s"),
    (
        "critic.*",
        "the critic has the actor's optimiser, layout and rows; docs/placement.md for others",
    ),
    ("reward_model.*", "reward.functions_timeout_s and reward.grader_workers"),
    ("reward.reward_manager.*", "reward.grader and reward.functions (docs/rewards.md)"),
    ("reward.reward_kwargs.max_resp_len", "rollout.max_response_tokens is the end of the buffer"),
    (f"{_OVERLONG}.log", "rewards/overlong is always logged"),
    ("reward.*", "reward.functions_timeout_s and reward.grader_workers"),
    ("data.*image*", "images are not supported"),
    ("data.*video*", "videos are not supported"),
    ("data.*audio*", "audio is not supported"),
    ("data.return_*", _BY_LAYOUT),
    ("data.reward_fn_key", _BY_LAYOUT),
    ("data.*num_workers", _NO_WORKERS),
    ("data.filter_overlong_prompts_workers", _NO_WORKERS),
    ("data.shuffle", "prompts are always shuffled, by the seed"),
    ("data.val_batch_size", "evaluation samples as many at a time as fit"),
    ("data.gen_batch_size", "rollout.generation_prompts, with dynamic sampling alone"),
    ("data.custom_cls.*", "data.train.path takes a function of yours (docs/data.md)"),
    ("data.trust_remote_code", "code of models is never executed"),
    ("data.tokenizer", "tokenizer.path"),
    ("data.tool_config_path", _ENVIRONMENT),
    ("algorithm.pf_ppo.*", "PF-PPO is not implemented"),
    ("algorithm.use_pf_ppo", "PF-PPO is not implemented"),
    ("trainer.balance_batch", "packing evens out the work (perf/imbalance)"),
    ("trainer.val_before_train", "always evaluated before the first step"),
    ("trainer.log_val_generations", "run.rollouts_every, and jaxrl browse"),
    ("trainer.*data_dir", "rollouts/ in the run's folder, and jaxrl browse"),
    ("trainer.max_critic_ckpt_to_keep", "one checkpoint has all roles: run.keep_checkpoints"),
    ("trainer.v1.*", "rollout.partial, with a pool for the role rollout"),
    ("trainer.ray_*", _NO_WORKERS),
    ("trainer.use_v1", _NO_WORKERS),
    ("trainer.device", "JAX takes the accelerators that it finds (JAX_PLATFORMS)"),
    ("trainer.default_hdfs_dir", "run.output is a directory"),
    ("trainer.esi_redundant_time", "SIGTERM saves the run (docs/runs.md)"),
    ("trainer.val_only", "jaxrl evaluate"),
    ("trainer.total_epochs", "run.num_steps"),
    ("trainer.project_name", "run.loggers"),
    ("skip.*", _NO_WORKERS),
    ("async_training.*", "rollout.partial, with a pool for the role rollout"),
    ("ray_kwargs.*", _NO_WORKERS),
    ("ray_init.*", _NO_WORKERS),
    ("global_profiler.*", "jaxrl profile traces one step"),
    ("transfer_queue.*", _NO_WORKERS),
    ("distillation.*", "dataflow distill (docs/distillation.md)"),
)
# Turning these off changes what verl trains, and cannot be done here.
_TRUE_IN_VERL = ("data.shuffle", "trainer.val_before_train")
# Composition and launching of Hydra, and the classes that values belong to.
_IGNORED = ("hydra.*", "*._target_", "defaults", "_self_")

_LORA_TARGETS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_KL_ESTIMATES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo_passk",
    "gdpo": "gdpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "optimal_token_baseline": "optimal_token_baseline",
}
LOSSES = {
    "vanilla": "clipped",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "geo_mean",
    "dro": "dro",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}


class Line(NamedTuple):
    """A line of the recipe: a setting, its value, and what it was made of."""

    setting: str
    value: Any
    why: str


@dataclasses.dataclass
class Import:
    """The result: settings of jaxrl, and remarks for the reader of the recipe.

    Attributes:
      lines: settings, in the order of the conversion.
      remarks: differences that a reader should know.
      without: names of verl's settings without counterpart, by reason.
      unknown: names that this command does not know.
      shape: name of the model's shape; "" if it is not known, or the model's config.json is here.
    """

    lines: list[Line] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)
    without: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)
    shape: str = ""

    def set(self, setting: str, value: Any, why: str) -> None:
        """Adds a setting."""
        self.lines.append(Line(setting, value, why))


class _Verl:
    """Settings of verl by name, with a record of those that were read."""

    def __init__(self, given: Mapping[str, Any], *, every: bool):
        self._given = {}
        for name, value in given.items():
            # A composed file has old names too, with null.
            if not self._given.get(_renamed(name)):
                self._given[_renamed(name)] = value
        self.unread = {
            name
            for name, value in self._given.items()
            if (value is False if name in _TRUE_IN_VERL else every or _asks(value))
        }

    def get(self, name: str, default: Any = None) -> Any:
        """The value; the default if the file has none or null."""
        self.unread.discard(name)
        value = self._given.get(name)
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{name} = nan of verl: expected a number; correct it")
        return default if value is None else value

    def text(self, name: str, default: Any = None) -> Any:
        """As `get`; raises UserError if the value is no text."""
        value = self.get(name, default)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{name} = {value!r} of verl: expected a text; correct it")
        return value

    def number(self, name: str, default: Any = None) -> Any:
        """As `get`; raises UserError if the value is no number."""
        value = self.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{name} = {value!r} of verl: expected a number; correct it")
        return value

    def whole(self, name: str, default: Any = None) -> Any:
        """As `get`; raises UserError if the value is no whole number."""
        value = self.number(name, default)
        if value is not None and (math.isinf(value) or value != int(value)):
            raise UserError(f"{name} = {value!r} of verl: expected a whole number; correct it")
        return None if value is None else int(value)

    def has(self, prefix: str) -> bool:
        """Whether the file has a setting of this group."""
        return any(name.startswith(prefix) for name in self._given)

    def origin(self, *names: str) -> str:
        """What a line was made of, for its comment: values of the file and defaults of verl."""
        parts = [f"{n} {self._given[n]!r}" for n in names if self._given.get(n) is not None]
        return ", ".join(parts) or "verl's default"


def convert_settings(
    given: Mapping[str, Any], *, num_train_prompts: int = 0, every: bool = False
) -> Import:
    """Converts settings of verl.

    Args:
      given: values by dotted name; names of older releases are understood.
      num_train_prompts: prompts of the training files, which verl counts epochs by; 0 if not known.
      every: whether to name every setting without counterpart. Otherwise those that ask for nothing (null,
        False, empty) are not named, of which a composed file has hundreds.

    Returns:
      Settings of jaxrl and remarks.

    Raises:
      UserError: a value has the wrong type, or values contradict each other.
    """
    verl, result = _Verl(given, every=every), Import()
    for row in SAME:
        _convert_same(row, verl, result)
    _layout(verl, result)
    for convert in (_model, _data, _rewards, _dataflow, _loss, _kl, _correction, _evaluation):
        convert(verl, result)
    _schedule(verl, result, num_train_prompts)
    _explain_unread(verl, result)
    return result


def _renamed(name: str) -> str:
    for old, new in _ALIASES.items():
        if name == old or (old.endswith(".") and name.startswith(old)):
            return new + name[len(old) :]
    return name


def _asks(value: Any) -> bool:
    """False for values that turn something off: null, False, "", [] and {}."""
    return value not in (None, False, "", "???") and value != [] and value != {}


def _convert_same(row: Counterpart, verl: _Verl, result: Import) -> None:
    value = verl.get(row.verl, row.default)
    if value is None:
        return
    try:
        result.set(row.jaxrl, row.convert(value), verl.origin(row.verl))
    except (TypeError, ValueError) as error:
        raise UserError(f"{row.verl} = {value!r} of verl: {error}; correct it") from error


# Devices.


def _layout(verl: _Verl, result: Import) -> None:
    """Layout and rows.

    verl's FSDP over W devices with a rollout TP of t is "1-t-W/t" with fsdp W/t here: the t devices of a
    generation shard hold tensor shards in training too, and t x fsdp devices hold one copy of the state.
    """
    devices = verl.whole("trainer.nnodes", 1) * verl.whole("trainer.n_gpus_per_node", 8)
    strategy = verl.text(
        f"{_ACTOR}.strategy", "megatron" if verl.has(f"{_ACTOR}.megatron.") else "fsdp"
    )
    megatron = strategy == "megatron"
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        result.remarks.append(f"Layout: the engine {strategy} is taken for FSDP; check mesh.")
    verl.get("critic.strategy")
    t_g = verl.whole(f"{_ROLLOUT}.tensor_model_parallel_size", 2 if devices > 1 else 1)
    width = verl.whole(f"{_ACTOR}.ulysses_sequence_parallel_size", 1)
    p, context, expert = 1, 1, 1
    if megatron:
        prefix = f"{_ACTOR}.megatron"
        width = verl.whole(f"{prefix}.tensor_model_parallel_size", 1)
        p = verl.whole(f"{prefix}.pipeline_model_parallel_size", 1)
        context = verl.whole(f"{prefix}.context_parallel_size", 1)
        expert = verl.whole(f"{prefix}.expert_model_parallel_size", 1)
    if min(devices, t_g, width, p, context, expert) < 1:
        raise UserError(
            "verl's numbers of devices and parallel sizes must be at least 1; correct them"
        )
    t = math.lcm(t_g, width)
    if devices % (p * t * context * expert):
        raise UserError(
            f"{devices} devices of verl do not divide into pipeline {p} x tensor {t} (the least common "
            f"multiple of {width} in training and {t_g} in rollout) x context {context} x expert {expert}; "
            "change trainer.nnodes, trainer.n_gpus_per_node or the parallel sizes"
        )
    d = devices // (p * t)
    why = f"{devices} devices, rollout TP {t_g}"
    if not megatron and width > 1:
        why += f", Ulysses {width} as tensor parallel (or mesh.context)"
    result.set("mesh.train", f"{p}-{t}-{d}", why)
    result.set("mesh.generate", f"1-{t_g}-{p * t // t_g}-{d}", why)
    if megatron:
        result.set("mesh.context", context, "context_parallel_size")
        result.set("mesh.expert", expert, "expert_model_parallel_size")
        result.set("mesh.sharding", "ZeRO-1", "Megatron's distributed optimizer")
    else:
        size = verl.whole(f"{_ACTOR}.fsdp_config.fsdp_size", -1)
        fsdp = math.gcd(d, max(1, size // t)) if size > 0 else d
        result.set(
            "mesh.fsdp", fsdp, f"tensor {t} x fsdp {fsdp} devices hold one copy of the state"
        )
    if t > 1 and not megatron:
        result.remarks.append(
            f"Layout: verl shards the training state over {t * d} devices by FSDP and samples with TP {t_g}. "
            f"Here a generation shard is a union of training shards, so training has the tensor axis too: "
            f"mesh.train 1-{t}-{d}, not 1-1-{t * d}, with mesh.fsdp. The bytes of a device are the same."
        )
    names = [f"{_ACTOR}.fsdp_config.{what}_offload" for what in ("param", "optimizer")]
    if any([verl.get(name) for name in names]):
        result.set("mesh.offload_training_state", True, verl.origin(*names))
    _rows(verl, result, d=d, replicas=d // context * p, width=1 if megatron else width)


def _rows(verl: _Verl, result: Import, *, d: int, replicas: int, width: int) -> None:
    """Rows of a microbatch: as many tokens on each device as verl's micro-batches have.

    Activations are split over d. A tensor group holds the same rows, so its size does not count.
    """
    limits = (verl.whole(f"data.max_{what}_length", 512) for what in ("prompt", "response"))
    longest = sum(limits)
    tokens_name = f"{_ACTOR}.ppo_max_token_len_per_gpu"
    size_name = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    tokens, size = verl.whole(tokens_name, 16384), verl.whole(size_name)
    if verl.get(f"{_ACTOR}.use_dynamic_bsz", False):
        rows, why = tokens * d // longest, f"{verl.origin(tokens_name)}, x {d} replicas"
    elif size:
        rows, why = size * d // width, f"{verl.origin(size_name)}, x {d} replicas"
    else:
        rows, why = replicas, "one for each replica"
    result.set("train.row_tokens", longest, "the longest prompt and response")
    result.set("train.rows", max(1, rows // replicas) * replicas, why)
    result.set("train.logprob_chunk_tokens", min(longest, 2048), "logits at a time")
    result.set("train.dtype", "bfloat16", "verl's mixed precision; master weights are float32")
    result.set("rollout.slots", "auto", "as many samples at a time as fit")


# The model and its data.


def _model(verl: _Verl, result: Import) -> None:
    names = (f"{_MODEL}.tokenizer_path", f"{_MODEL}.path")
    path = verl.get(names[0]) or verl.get(names[1])
    if path:
        result.set("tokenizer.path", _path(path), verl.origin(*names))
        result.shape = _shape(str(verl.get(names[1], "")))
    else:
        result.remarks.append("No model is named; set weights and tokenizer.path.")
    rank = verl.whole(f"{_MODEL}.lora_rank", 0)
    targets = verl.get(f"{_MODEL}.target_modules", "all-linear")
    if rank:
        result.set("model.lora.rank", rank, verl.origin(f"{_MODEL}.lora_rank"))
        if targets != "all-linear":
            names = targets if isinstance(targets, list) else [targets]
            known = tuple(_LORA_TARGETS[str(name)] for name in names if str(name) in _LORA_TARGETS)
            if len(known) < len(names):
                result.remarks.append(
                    f"target_modules {targets!r}: only {', '.join(_LORA_TARGETS)} can have adapters."
                )
            if known:
                result.set("model.lora.targets", known, verl.origin(f"{_MODEL}.target_modules"))
    else:
        result.lines = [line for line in result.lines if not line.setting.startswith("model.lora")]


def _shape(path: str) -> str:
    """The published shape of the model that a path ends with; "" if its config.json is here or unknown."""
    name = path.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    if is_here(os.path.expanduser(path)):
        return ""
    # The larger Qwen2.5 have another epsilon in their instruct models.
    fits = [name, *([] if "14b" in name or "32b" in name else [name.removesuffix("-instruct")])]
    return next(
        (n for n in (*fits, name.removesuffix("-base"), name.removesuffix("-it")) if n in SHAPES),
        "",
    )


def _data(verl: _Verl, result: Import) -> None:
    prompt_key = verl.text("data.prompt_key", "prompt")
    for files, first, others in (
        ("data.train_files", "data.train", "data.sources"),
        ("data.val_files", "data.evaluation", "data.evaluations"),
    ):
        paths = verl.get(files)
        paths = [paths] if isinstance(paths, str) else paths or []
        if not isinstance(paths, list):
            raise UserError(f"{files} = {paths!r} of verl: expected a path or a list of them")
        if not paths:
            result.remarks.append(f"No {files} are named; set {first}.path.")
        for number, path in enumerate(paths):
            group = first if not number else f"{others}.{first.split('.')[-1]}_{number + 1}"
            result.set(f"{group}.path", _path(path), files)
            if prompt_key != "prompt":
                result.set(
                    f"{group}.prompt_field", str(prompt_key), f"data.prompt_key {prompt_key!r}"
                )
                result.set(f"{group}.answer_field", "reward_model.ground_truth", "verl's layout")
    result.set("data.chat", True, "verl renders every prompt with the chat template")
    drops = verl.get("data.filter_overlong_prompts", False)
    truncation = str(verl.get("data.truncation", "error"))
    names = ("data.filter_overlong_prompts", "data.truncation")
    result.set("data.overlong", "drop" if drops else truncation, verl.origin(*names))


def _rewards(verl: _Verl, result: Import) -> None:
    train = verl.get("data.train_files") or ""
    is_math = "math" in str(train).lower() and "dapo" not in str(train).lower()
    result.set(
        "reward.grader", "math" if is_math else "answer", "by the name of the training files"
    )
    result.remarks.append(
        "Graders: verl scores by the data_source of a row, 1 or 0 for most and 1 or -1 for DAPO's; "
        "reward.grader gives 1 or -1. The scale matters where an advantage is not divided by its deviation."
    )
    on = verl.get(f"{_OVERLONG}.enable", False)
    length = verl.whole(f"{_OVERLONG}.len", 0)
    factor = verl.number(f"{_OVERLONG}.penalty_factor", 1.0)
    names = (f"{_OVERLONG}.enable", f"{_OVERLONG}.len")
    result.set("reward.overlong_buffer_tokens", length if on else 0, verl.origin(*names))
    if on:
        result.set(
            "reward.overlong_penalty", float(factor), verl.origin(f"{_OVERLONG}.penalty_factor")
        )
    path = verl.get("reward.custom_reward_function.path")
    function = verl.get("reward.custom_reward_function.name", "compute_score")
    if path:
        result.remarks.append(
            f"Reward function {path}:{function}: its signature is verl's. Write one of jaxrl "
            '(docs/rewards.md), and set reward.functions = {"mine": {"path": "FILE.py:NAME", "weight": 1.0}}.'
        )
    model = verl.get("reward.reward_model.model_path")
    if verl.get("reward.reward_model.enable", False) and model:
        result.set("reward.model", _path(model), verl.origin("reward.reward_model.model_path"))


# The algorithm.


def _dataflow(verl: _Verl, result: Import) -> None:
    estimator = verl.text("algorithm.adv_estimator", "gae")
    if estimator not in ADVANTAGES:
        raise UserError(
            f"algorithm.adv_estimator {estimator!r} of verl has no counterpart; choose one of "
            f"{', '.join(ADVANTAGES)}"
        )
    filters = bool(verl.get("algorithm.filter_groups.enable", False))
    by_estimator = {"gae": "ppo", "remax": "remax"}
    dataflow = by_estimator.get(estimator, "dapo" if filters else "grpo")
    why = verl.origin("algorithm.adv_estimator", "algorithm.filter_groups.enable")
    result.set("algorithm.dataflow", dataflow, why)
    result.set("algorithm.advantage", ADVANTAGES[estimator], verl.origin("algorithm.adv_estimator"))
    gamma, lam = verl.number("algorithm.gamma", 1.0), verl.number("algorithm.lam", 1.0)
    by_std = bool(verl.get("algorithm.norm_adv_by_std_in_grpo", True))
    options = {
        "gae": {"gamma": float(gamma), "lam": float(lam)},
        "reinforce_plus_plus": {"gamma": float(gamma)},
        "grpo": {"normalize_std": by_std},
        "grpo_passk": {"normalize_std": by_std},
    }.get(ADVANTAGES[estimator], {})
    result.set("algorithm.advantage_options", options, "gamma, lam, norm_adv_by_std_in_grpo")
    if estimator == "gae":
        result.set("algorithm.whiten", True, "verl whitens the advantages of gae")
        epochs = verl.whole("critic.ppo_epochs", verl.whole(f"{_ACTOR}.ppo_epochs", 1))
        result.set(
            "critic.epochs", epochs, verl.origin("critic.ppo_epochs", f"{_ACTOR}.ppo_epochs")
        )
    _group_filter(verl, result, on=filters and dataflow == "dapo")
    if filters and dataflow != "dapo":
        result.remarks.append(
            f"Dynamic sampling (filter_groups) is left out: {estimator} has no groups of its own."
        )
    batch, mini = (
        verl.whole("data.train_batch_size", 1024),
        verl.whole(f"{_ACTOR}.ppo_mini_batch_size", 256),
    )
    if min(batch, mini) < 1 or batch % mini:
        raise UserError(
            f"data.train_batch_size {batch} of verl does not divide by ppo_mini_batch_size {mini}; "
            "both are at least 1, and the second is a divisor"
        )
    names = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")
    result.set(
        "algorithm.updates_per_step", batch // mini, f"{batch} / {mini} ({verl.origin(*names)})"
    )


def _group_filter(verl: _Verl, result: Import, *, on: bool) -> None:
    prefix = "algorithm.filter_groups"
    metric = verl.get(f"{prefix}.metric", "acc")
    most = verl.whole(f"{prefix}.max_num_gen_batches", 0)
    generated = verl.whole("data.gen_batch_size", verl.whole("data.train_batch_size", 1024))
    if not on:
        return
    keep = "correctness" if metric == "acc" else "score"
    result.set("rollout.keep_groups", keep, verl.origin(f"{prefix}.metric"))
    result.set("rollout.max_generation_batches", most, verl.origin(f"{prefix}.max_num_gen_batches"))
    result.set("rollout.generation_prompts", generated, verl.origin("data.gen_batch_size"))


def _loss(verl: _Verl, result: Import) -> None:
    mode = verl.text(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode not in LOSSES:
        raise UserError(
            f"policy_loss.loss_mode {mode!r} of verl has no counterpart; choose one of {', '.join(LOSSES)}"
        )
    width = verl.number(f"{_ACTOR}.clip_ratio", 0.2)
    low = float(verl.number(f"{_ACTOR}.clip_ratio_low", width))
    high = float(verl.number(f"{_ACTOR}.clip_ratio_high", width))
    highest = float(verl.number(f"{_ACTOR}.clip_ratio_c", 3.0))
    clip = {"clip_low": low, "clip_high": high}
    limits = {"limit_low": low, "limit_high": high, "max_ratio": highest}
    setting = f"{_ACTOR}.policy_loss"
    options = {
        "vanilla": {**clip, "dual_clip": highest},
        **dict.fromkeys(("gspo", "cispo", "geo_mean"), clip),
        **dict.fromkeys(("dppo_tv", "dppo_kl"), limits),
        "sapo": {
            "tau_positive": float(verl.number(f"{_ACTOR}.tau_pos", 1.0)),
            "tau_negative": float(verl.number(f"{_ACTOR}.tau_neg", 1.05)),
        },
        "gpg": {},
        "dro": {"beta": float(verl.number(f"{setting}.dro_beta", 0.0))},
        "clip_cov": {
            **clip,
            "fraction": float(verl.number(f"{setting}.clip_cov_ratio", 2e-4)),
            "lowest": float(verl.number(f"{setting}.clip_cov_lb", 1.0)),
            "highest": float(verl.number(f"{setting}.clip_cov_ub", 5.0)),
        },
        "kl_cov": {
            "fraction": float(verl.number(f"{setting}.kl_cov_ratio", 2e-4)),
            "kl_coef": float(verl.number(f"{setting}.ppo_kl_coef", 0.1)),
        },
    }[mode]
    result.set("algorithm.loss", LOSSES[mode], verl.origin(f"{setting}.loss_mode"))
    names = (f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high")
    why = (
        verl.origin(*names, f"{_ACTOR}.clip_ratio_c") if options.keys() & {"clip_low"} else setting
    )
    result.set("algorithm.loss_options", options, why)
    aggregation = verl.text(f"{_ACTOR}.loss_agg_mode", "token-mean")
    aggregation = "seq-mean-token-mean" if mode == "sapo" else str(aggregation)
    result.set("algorithm.aggregation", aggregation, verl.origin(f"{_ACTOR}.loss_agg_mode"))
    scale = verl.number(f"{_ACTOR}.loss_scale_factor", verl.whole("data.max_response_length", 512))
    if aggregation == "seq-mean-token-sum-norm":
        why = verl.origin(f"{_ACTOR}.loss_scale_factor", "data.max_response_length")
        result.set("algorithm.aggregation_options", {"scale": float(scale)}, why)


def _kl(verl: _Verl, result: Import) -> None:
    coef, kind = (
        verl.number(f"{_ACTOR}.kl_loss_coef", 0.001),
        verl.get(f"{_ACTOR}.kl_loss_type", "low_var_kl"),
    )
    if verl.get(f"{_ACTOR}.use_kl_loss", False):
        result.set("algorithm.kl.loss_coef", float(coef), verl.origin(f"{_ACTOR}.kl_loss_coef"))
        name = f"{_ACTOR}.kl_loss_type"
        result.set("algorithm.kl.loss_estimate", _estimate(name, kind), verl.origin(name))
    control = "algorithm.kl_ctrl"
    coef, kind = verl.number(f"{control}.kl_coef", 0.001), verl.get("algorithm.kl_penalty", "kl")
    adaptive = verl.text(f"{control}.type", "fixed") == "adaptive"
    target, horizon = (
        verl.number(f"{control}.target_kl", 0.1),
        verl.number(f"{control}.horizon", 10000),
    )
    if not verl.get("algorithm.use_kl_in_reward", False) or not coef:
        return
    result.set("algorithm.kl.reward_coef", float(coef), verl.origin(f"{control}.kl_coef"))
    estimate = _estimate("algorithm.kl_penalty", kind)
    result.set("algorithm.kl.reward_estimate", estimate, verl.origin("algorithm.kl_penalty"))
    if adaptive:
        result.set("algorithm.kl.target", float(target), verl.origin(f"{control}.target_kl"))
        result.set("algorithm.kl.horizon", float(horizon), verl.origin(f"{control}.horizon"))


def _estimate(name: str, kind: Any) -> str:
    plain = str(kind).removesuffix("+")
    if plain not in _KL_ESTIMATES:
        raise UserError(
            f"{name} {kind!r} of verl has no counterpart; choose one of {', '.join(_KL_ESTIMATES)}"
        )
    return _KL_ESTIMATES[plain] + str(kind)[len(plain) :]


def _correction(verl: _Verl, result: Import) -> None:
    get = lambda leaf, default=None: verl.get(f"{_CORRECTION}.{leaf}", default)  # noqa: E731
    ours = "algorithm.correction"
    weights, threshold = get("rollout_is"), get("rollout_is_threshold", 2.0)
    normalize, rules = get("rollout_is_batch_normalize", False), get("rollout_rs")
    bounds, bypass = get("rollout_rs_threshold"), get("bypass_mode", False)
    loss_type = get("loss_type", "ppo_clip")
    if weights:
        # A single number cuts weights from above alone.
        low, high = _bounds(threshold) if "_" in str(threshold) else (0.0, _bound(threshold))
        result.set(f"{ours}.weights", str(weights), verl.origin(f"{_CORRECTION}.rollout_is"))
        result.set(f"{ours}.highest", high, verl.origin(f"{_CORRECTION}.rollout_is_threshold"))
        result.set(f"{ours}.lowest", low, "IcePop sets weights outside of both bounds to 0")
        result.set(f"{ours}.normalize", bool(normalize), "rollout_is_batch_normalize")
    names = [rule.strip() for rule in str(rules).split(",")] if rules else []
    each = [bound.strip() for bound in str(bounds).split(",")]
    for name, bound in zip(
        names, each if len(each) == len(names) else each * len(names), strict=False
    ):
        over, _, by = name.rpartition("_")
        if by == "k1":
            # verl bounds pi_rollout / pi_train.
            low, high = _bounds(bound)
            result.set(
                f"{ours}.reject.{over}_ratio", (1 / high, 1 / low), f"{name} {bound}, inverted"
            )
        else:
            result.set(f"{ours}.reject.{name}", _bound(bound), f"{name} {bound}")
    if bypass:
        result.set(f"{ours}.bypass", True, verl.origin(f"{_CORRECTION}.bypass_mode"))
        if loss_type == "reinforce":
            result.set("algorithm.loss", "policy_gradient", verl.origin(f"{_CORRECTION}.loss_type"))
            result.set("algorithm.loss_options", {}, "a policy gradient has no clip")


def _bounds(text: Any) -> tuple[float, float]:
    """(lowest, highest) of "lo_hi"; of a single number c it is (1/c, c)."""
    low, _, high = str(text).partition("_")
    if not high:
        return 1 / _bound(low), _bound(low)
    if _bound(low) > _bound(high):
        raise UserError(f"bound {text!r} of verl's rollout_correction: write the lower one first")
    return _bound(low), _bound(high)


def _bound(text: Any) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = 0.0
    if not value >= 1e-30:
        raise UserError(
            f"bound {text!r} of verl's rollout_correction: expected a number above 0; correct it"
        )
    return value


# Schedules.


def _evaluation(verl: _Verl, result: Import) -> None:
    prefix = f"{_ROLLOUT}.val_kwargs"
    temperature = float(verl.number(f"{prefix}.temperature", 0.0))
    samples = verl.get(f"{prefix}.do_sample", False)
    why = verl.origin(f"{prefix}.do_sample", f"{prefix}.temperature")
    result.set("evaluation.temperature", temperature if samples else 0.0, why)


def _schedule(verl: _Verl, result: Import, num_train_prompts: int) -> None:
    steps = verl.whole("trainer.total_training_steps")
    epochs = verl.whole("trainer.total_epochs", 30)
    batch = verl.whole("data.train_batch_size", 1024)
    why = verl.origin("trainer.total_training_steps")
    if steps is None and num_train_prompts:
        steps = max(1, num_train_prompts // batch * epochs)
        why = f"{epochs} epochs of {num_train_prompts} prompts / {batch}"
    if steps is None:
        result.remarks.append(
            f"Steps: verl trains {epochs} epochs, that is {epochs} x prompts / {batch} steps, and the file "
            "does not say how many prompts there are. Set run.num_steps, or give --num_train_prompts."
        )
    else:
        result.set("run.num_steps", steps, why)
    for frequency, setting in (("save_freq", "run.save_every"), ("test_freq", "evaluation.every")):
        every = verl.whole(f"trainer.{frequency}", -1)
        if every > 0:
            result.set(setting, every, verl.origin(f"trainer.{frequency}"))
        elif steps:
            result.set(setting, steps, f"trainer.{frequency} {every}: at the end only")
    _learning_rate(verl, result, steps)
    resume = verl.text("trainer.resume_mode", "auto")
    if resume in ("auto", "disable"):
        value = "auto" if resume == "auto" else "never"
        result.set("run.resume", value, verl.origin("trainer.resume_mode"))
    else:
        verl.get("trainer.resume_from_path")
        result.remarks.append(
            "resume_path: a run goes on from its own folder; verl's checkpoints are not read."
        )
    loggers = verl.get("trainer.logger", ["console"])
    project = verl.get("trainer.project_name", "verl_examples")
    loggers = [loggers] if isinstance(loggers, str) else loggers
    if isinstance(loggers, list):
        entries = ("tensorboard", *(f"{x}:{project}" for x in ("wandb", "trackio") if x in loggers))
        if others := [
            str(x) for x in loggers if x not in ("console", "tensorboard", "wandb", "trackio")
        ]:
            result.remarks.append(f"Loggers without a counterpart: {', '.join(others)}.")
        if len(entries) > 1:
            result.set("run.loggers", entries, verl.origin("trainer.logger"))
    if (hosts := verl.whole("trainer.nnodes", 1)) > 1:
        result.remarks.append(
            f"{hosts} hosts: start the same command on each with hosts.coordinator (docs/placement.md)."
        )


def _learning_rate(verl: _Verl, result: Import, steps: int | None) -> None:
    prefix = f"{_ACTOR}.optim"
    warmup, ratio = (
        verl.whole(f"{prefix}.lr_warmup_steps", -1),
        verl.number(f"{prefix}.lr_warmup_steps_ratio", 0),
    )
    why = verl.origin(f"{prefix}.lr_warmup_steps", f"{prefix}.lr_warmup_steps_ratio")
    if warmup < 0 and ratio and steps is None:
        result.remarks.append(
            f"Warm-up: {ratio:g} of all steps, which are not known; set optim.lr_warmup_steps."
        )
    warmup = warmup if warmup >= 0 else int(ratio * (steps or 0))
    result.set("optim.lr_warmup_steps", warmup, why)
    if warmup:
        result.remarks.append(
            f"Warm-up: verl's first step trains at rate 0; here it trains at 1/{warmup} of optim.lr."
        )
    betas = verl.get(f"{prefix}.betas", [0.9, 0.999])
    try:
        for name, beta in zip(("optim.beta1", "optim.beta2"), betas, strict=True):
            result.set(name, float(beta), verl.origin(f"{prefix}.betas"))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{prefix}.betas = {betas!r} of verl: expected two numbers; correct them"
        ) from error
    schedule = verl.get(f"{prefix}.lr_scheduler_type", "constant")
    if schedule not in ("constant", "cosine"):
        result.remarks.append(
            f"The schedule {schedule} of the rate has no counterpart; it is constant here."
        )
    if schedule == "cosine":
        if steps is None:
            result.remarks.append("Cosine: set optim.lr_decay_steps to run.num_steps.")
        else:
            result.set("optim.lr_decay_steps", steps, verl.origin(f"{prefix}.lr_scheduler_type"))
        final = float(verl.number(f"{prefix}.min_lr_ratio", 0.0))
        result.set("optim.lr_final", final, verl.origin(f"{prefix}.min_lr_ratio"))


def _explain_unread(verl: _Verl, result: Import) -> None:
    for name in sorted(verl.unread):
        if any(fnmatch.fnmatch(name, pattern) for pattern in _IGNORED):
            continue
        reason = next(
            (why for pattern, why in NO_COUNTERPART if fnmatch.fnmatch(name, pattern)), None
        )
        if reason is None:
            result.unknown.append(name)
        else:
            shown = f"{name} False" if name in _TRUE_IN_VERL else name
            result.without.setdefault(reason, []).append(shown)
