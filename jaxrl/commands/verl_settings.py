"""Converts settings of verl to settings of jaxrl (docs/from_verl.md has the same as tables).

`SAME` has the settings with one counterpart each. The functions after it convert those that belong
together: batches, layouts, losses, KL, correction, data, schedules. Where a file does not have a setting,
verl's default counts if ours differs, so that the recipe trains what verl would train. Names leave out
"actor_rollout_ref.".
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
    "actor.optim.clip_grad": "actor.grad_clip",
    "actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "actor.fsdp_config.ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "model.lora.target_modules": "model.target_modules",
}


class Counterpart(NamedTuple):
    """A setting of verl with one counterpart.

    Attributes:
      verl: its name.
      jaxrl: the setting of jaxrl.
      default: verl's default, which is written if the file has no value; None writes nothing.
      convert: from verl's value to ours; raises ValueError for a value without counterpart.
    """

    verl: str
    jaxrl: str
    default: Any = None
    convert: Callable[[Any], Any] = lambda value: value


def _path(value: Any) -> str:
    if str(value).startswith("hdfs://"):
        raise ValueError("hdfs:// is not read; copy the files to a directory")
    return os.path.expanduser(str(value).removeprefix("file://"))


def _name(value: Any) -> str:
    # The name is also that of a folder.
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in str(value)) or "run"


SAME = (
    Counterpart("trainer.experiment_name", "name", None, _name),
    Counterpart("trainer.default_local_dir", "run.output"),
    Counterpart("trainer.max_actor_ckpt_to_keep", "run.keep_checkpoints"),
    Counterpart("trainer.critic_warmup", "critic.warmup_steps"),
    Counterpart("model.path", "weights", None, _path),
    Counterpart("model.lora_adapter_path", "adapter", None, _path),
    Counterpart("model.lora_alpha", "model.lora.alpha", None, float),
    Counterpart(
        "model.enable_gradient_checkpointing",
        "train.remat",
        True,
        lambda on: "full" if on else "none",
    ),
    Counterpart("data.max_prompt_length", "data.max_prompt_tokens", 512),
    Counterpart("data.max_response_length", "rollout.max_response_tokens", 512),
    Counterpart("data.train_max_samples", "data.train.size", None, lambda n: max(n, 0)),
    Counterpart("data.val_max_samples", "data.evaluation.size", None, lambda n: max(n, 0)),
    Counterpart(
        "data.apply_chat_template_kwargs.enable_thinking", "data.chat_options.enable_thinking"
    ),
    Counterpart("data.seed", "seed"),
    Counterpart("data.train_batch_size", "rollout.num_prompts", 1024),
    Counterpart("rollout.n", "rollout.num_samples", 1),
    Counterpart("rollout.temperature", "rollout.temperature"),
    Counterpart("rollout.top_k", "rollout.top_k", None, lambda k: max(k, 0)),
    Counterpart("rollout.top_p", "rollout.top_p"),
    Counterpart("rollout.dtype", "rollout.dtype", "bfloat16", str),
    Counterpart("rollout.val_kwargs.n", "evaluation.num_samples", 1),
    Counterpart("rollout.val_kwargs.top_k", "evaluation.top_k", None, lambda k: max(k, 0)),
    Counterpart("rollout.val_kwargs.top_p", "evaluation.top_p"),
    Counterpart("actor.ppo_epochs", "algorithm.epochs"),
    Counterpart("actor.entropy_coeff", "algorithm.entropy_coef", None, float),
    Counterpart("actor.grad_clip", "optim.grad_clip", None, float),
    Counterpart("actor.optim.lr", "optim.lr", 1e-6, float),
    Counterpart("actor.optim.weight_decay", "optim.weight_decay", 0.01, float),
    Counterpart("critic.optim.lr", "critic.lr", None, float),
    Counterpart("critic.model.path", "critic.weights", None, _path),
    Counterpart("critic.cliprange_value", "critic.clip", None, float),
)

# Why settings have no counterpart, and patterns of their names. The first pattern that fits counts.
NO_COUNTERPART = {
    "always so": "rollout.calculate_log_probs hybrid_engine",
    "always evaluated before the first step": "trainer.val_before_train",
    "prompts are always shuffled, by the seed": "data.shuffle actor.shuffle",
    "rows of a fixed length are packed (train.rows x train.row_tokens), for every pass": """
        rollout.log_prob* actor.*_batch_size* actor.use_remove_padding actor.*pad_to_length*
        model.use_remove_padding trainer.balance_batch""",
    "rollout.memory_fraction counts the weights of all roles; its default stands": """
        rollout.gpu_memory_utilization""",
    'rollout.slots="auto" takes as many as fit': "rollout.max_num_seqs data.val_batch_size",
    "rollout.prefill_prompts, rollout.prefill_chunk_tokens": """
        rollout.*chunked_prefill rollout.max_num_batched_tokens""",
    "rollout.environment: a function that answers turns (docs/rollout.md)": """
        rollout.multi_turn.* rollout.agent.* data.tool_config_path""",
    "rollout.temperature": "rollout.do_sample",
    "rollout.generation_prompts, with dynamic sampling alone": "data.gen_batch_size",
    "rollout.partial, with a pool for the role rollout": "async_training.* trainer.v1.*",
    "no speculative sampling": "model.mtp.*",
    "jaxrl samples with its own engine in the same program": "rollout.*",
    "mesh.offload_training_state, while sampling": "actor.*offload*",
    "entropy is always measured, a chunk of positions at a time": "actor.*entropy*",
    "measured if the advantage needs it": "actor.calculate_sum_pi_squared",
    "XLA compiles and fuses everything": """
        actor.use_torch_compile actor.use_fused_kernels model.*kernel* model.use_liger""",
    "train.share_prompts, by default where it is faster": "actor.use_prefix_grouper",
    "rollout.num_samples": "actor.rollout_n",
    "a checkpoint always has all that a run goes on from (docs/runs.md)": "actor.checkpoint.*",
    "optim: AdamW, constant or cosine (jaxrl train --help optim)": "actor.optim.*",
    "mesh.fsdp and mesh.sharding; XLA schedules gathers": "actor.fsdp_config.*",
    "mesh (docs/placement.md)": "actor.megatron.*",
    "seed": "actor.*seed*",
    "jax.profiler traces a run (docs/learning.md)": "actor.profiler.* global_profiler.*",
    "options of losses that are not used": "actor.policy_loss.*",
    "sampler and trainer route by the same program": "actor.router_replay.*",
    "no quantised training": "actor.qat.*",
    "train.remat": "model.enable_activation_offload model.tiled_mlp.*",
    "code of models is never executed": """
        model.trust_remote_code model.external_lib data.trust_remote_code""",
    "the model's config.json": "model.override_config*",
    "model.lora": "model.lora.*",
    "hosts.lost_after_s": "nccl_timeout",
    "the role has the actor's optimiser, layout and rows; docs/placement.md for others": """
        ref.* critic.*""",
    "reward.grader and reward.functions (docs/rewards.md)": "reward.reward_manager.*",
    "rollout.max_response_tokens is the end of the buffer": "reward.reward_kwargs.max_resp_len",
    "reward.grader_timeout_s": "reward.* reward_model.*",
    "images, videos and audio are not supported": "data.*image* data.*video* data.*audio*",
    "files are read by their layout (docs/data.md)": "data.return_* data.reward_fn_key",
    "data.train.path takes a function of yours (docs/data.md)": "data.custom_cls.*",
    "tokenizer.path": "data.tokenizer",
    "there are no workers, Ray or pools of processes to set up": """
        model.use_shm data.*num_workers data.filter_overlong_prompts_workers trainer.ray_* trainer.use_v1
        skip.* ray_kwargs.* ray_init.* transfer_queue.*""",
    "PF-PPO is not implemented": "algorithm.pf_ppo.* algorithm.use_pf_ppo",
    "rollouts/ in the run's folder (run.rollouts_every), and jaxrl browse": """
        trainer.log_val_generations trainer.*data_dir""",
    "run.keep_checkpoints: one checkpoint has all roles": "trainer.max_critic_ckpt_to_keep",
    "JAX takes the accelerators that it finds (JAX_PLATFORMS)": "trainer.device",
    "run.output is a directory": "trainer.default_hdfs_dir",
    "SIGTERM saves the run (docs/runs.md)": "trainer.esi_redundant_time",
    "jaxrl evaluate": "trainer.val_only",
    "run.num_steps": "trainer.total_epochs",
    "run.loggers": "trainer.project_name",
    "dataflow distill (docs/distillation.md)": "distillation.*",
}
# Turning these off changes what verl trains, and cannot be done here.
_TRUE_IN_VERL = ("data.shuffle", "trainer.val_before_train")
# Composition and launching of Hydra, and the classes that values belong to.
_IGNORED = ("hydra.*", "*._target_", "defaults", "_self_")

_LORA_TARGETS = {
    **{f"{name}_proj": (name,) for name in ("q", "k", "v", "o", "gate", "up", "down")},
    "linear_qkv": ("q", "k", "v"),
    "linear_proj": ("o",),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": ("down",),
}
_KL_ESTIMATES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {
    name: name for name in ("k1", "k2", "k3", "abs")
}
ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"} | {
    name: name
    for name in (
        *("gae", "grpo", "grpo_passk", "gdpo", "rloo", "opo", "gpg", "remax"),
        *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline"),
    )
}
LOSSES = {"vanilla": "clipped"} | {
    name: name
    for name in (
        *("gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"),
        *("dppo_tv", "dppo_kl"),
    )
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
        for long, value in given.items():
            name = _renamed(long)
            # A composed file has old names too, with null.
            if not self._given.get(name):
                self._given[name] = value
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
    """The name as it is written here: without "actor_rollout_ref.", and as the newest release has it."""
    short = name.removeprefix("actor_rollout_ref.")
    if short == name and name.split(".")[0] in ("actor", "rollout", "ref", "model"):
        return f"/{name}"  # of asynchronous trainers
    for old, new in _ALIASES.items():
        if short == old or (old.endswith(".") and short.startswith(old)):
            return new + short[len(old) :]
    return short


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
    strategy = verl.text("actor.strategy", "megatron" if verl.has("actor.megatron.") else "fsdp")
    megatron = strategy == "megatron"
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        result.remarks.append(f"Layout: the engine {strategy} is taken for FSDP; check mesh.")
    verl.get("critic.strategy")
    t_g = verl.whole("rollout.tensor_model_parallel_size", 2 if devices > 1 else 1)
    width = verl.whole("actor.ulysses_sequence_parallel_size", 1)
    p, context, expert = 1, 1, 1
    if megatron:
        prefix = "actor.megatron"
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
        size = verl.whole("actor.fsdp_config.fsdp_size", -1)
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
    names = [f"actor.fsdp_config.{what}_offload" for what in ("param", "optimizer")]
    if any([verl.get(name) for name in names]):
        result.set("mesh.offload_training_state", True, verl.origin(*names))
    _rows(verl, result, d=d, replicas=d // context * p, width=1 if megatron else width)


def _rows(verl: _Verl, result: Import, *, d: int, replicas: int, width: int) -> None:
    """Rows of a microbatch: as many tokens on each device as verl's micro-batches have.

    Activations are split over d. A tensor group holds the same rows, so its size does not count.
    """
    limits = (verl.whole(f"data.max_{what}_length", 512) for what in ("prompt", "response"))
    longest = sum(limits)
    tokens_name = "actor.ppo_max_token_len_per_gpu"
    size_name = "actor.ppo_micro_batch_size_per_gpu"
    tokens, size = verl.whole(tokens_name, 16384), verl.whole(size_name)
    if verl.get("actor.use_dynamic_bsz", False):
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
    names = ("model.tokenizer_path", "model.path")
    path = verl.get(names[0]) or verl.get(names[1])
    if path:
        result.set("tokenizer.path", _path(path), verl.origin(*names))
        result.shape = _shape(str(verl.get(names[1], "")))
    else:
        result.remarks.append("No model is named; set weights and tokenizer.path.")
    rank = verl.whole("model.lora_rank", 0)
    targets = verl.get("model.target_modules", "all-linear")
    if rank:
        result.set("model.lora.rank", rank, verl.origin("model.lora_rank"))
        if targets != "all-linear":
            names = targets if isinstance(targets, list) else [targets]
            known = tuple(target for name in names for target in _LORA_TARGETS.get(str(name), ()))
            if any(str(name) not in _LORA_TARGETS for name in names):
                result.remarks.append(
                    f"target_modules {targets!r}: only {', '.join(_LORA_TARGETS)} can have adapters."
                )
            if known:
                result.set("model.lora.targets", known, verl.origin("model.target_modules"))
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
                why = f"data.prompt_key {prompt_key!r}"
                result.set(f"{group}.fields.prompt", str(prompt_key), why)
                result.set(f"{group}.fields.answer", "reward_model.ground_truth", "verl's layout")
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
        if path:
            result.remarks.append(
                f"Reward model {model}: called by the reward function; see reward.judge."
            )
        else:
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
        epochs = verl.whole("critic.ppo_epochs", verl.whole("actor.ppo_epochs", 1))
        result.set("critic.epochs", epochs, verl.origin("critic.ppo_epochs", "actor.ppo_epochs"))
    _group_filter(verl, result, on=filters and dataflow == "dapo")
    if filters and dataflow != "dapo":
        result.remarks.append(
            f"Dynamic sampling (filter_groups) is left out: {estimator} has no groups of its own."
        )
    batch, mini = (
        verl.whole("data.train_batch_size", 1024),
        verl.whole("actor.ppo_mini_batch_size", 256),
    )
    if min(batch, mini) < 1 or batch % mini:
        raise UserError(
            f"data.train_batch_size {batch} of verl does not divide by ppo_mini_batch_size {mini}; "
            "both are at least 1, and the second is a divisor"
        )
    names = ("data.train_batch_size", "actor.ppo_mini_batch_size")
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
    mode = verl.text("actor.policy_loss.loss_mode", "vanilla")
    if mode not in LOSSES:
        raise UserError(
            f"policy_loss.loss_mode {mode!r} of verl has no counterpart; choose one of {', '.join(LOSSES)}"
        )
    width = verl.number("actor.clip_ratio", 0.2)
    low = float(verl.number("actor.clip_ratio_low", width))
    high = float(verl.number("actor.clip_ratio_high", width))
    highest = float(verl.number("actor.clip_ratio_c", 3.0))
    clip = {"clip_low": low, "clip_high": high}
    limits = {"limit_low": low, "limit_high": high, "max_ratio": highest}
    setting = "actor.policy_loss"
    options = {
        "vanilla": {**clip, "dual_clip": highest},
        **dict.fromkeys(("gspo", "cispo", "geo_mean"), clip),
        **dict.fromkeys(("dppo_tv", "dppo_kl"), limits),
        "sapo": {
            "tau_positive": float(verl.number("actor.tau_pos", 1.0)),
            "tau_negative": float(verl.number("actor.tau_neg", 1.05)),
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
    names = ("actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high")
    why = verl.origin(*names, "actor.clip_ratio_c") if options.keys() & {"clip_low"} else setting
    result.set("algorithm.loss_options", options, why)
    aggregation = verl.text("actor.loss_agg_mode", "token-mean")
    aggregation = "seq-mean-token-mean" if mode == "sapo" else str(aggregation)
    result.set("algorithm.aggregation", aggregation, verl.origin("actor.loss_agg_mode"))
    scale = verl.number("actor.loss_scale_factor", verl.whole("data.max_response_length", 512))
    if aggregation == "seq-mean-token-sum-norm":
        why = verl.origin("actor.loss_scale_factor", "data.max_response_length")
        result.set("algorithm.aggregation_options", {"scale": float(scale)}, why)
    if verl.number("rollout.top_k", -1) > 0 or verl.number("rollout.top_p", 1.0) < 1:
        result.remarks.append(
            "top_k and top_p: verl trains on log-probabilities of the whole vocabulary, jaxrl on those of "
            "the tokens that these keep."
        )


def _kl(verl: _Verl, result: Import) -> None:
    coef, kind = (
        verl.number("actor.kl_loss_coef", 0.001),
        verl.get("actor.kl_loss_type", "low_var_kl"),
    )
    if verl.get("actor.use_kl_loss", False):
        result.set("algorithm.kl.loss_coef", float(coef), verl.origin("actor.kl_loss_coef"))
        name = "actor.kl_loss_type"
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
        why = verl.origin(f"{_CORRECTION}.rollout_is_threshold")
        result.set(f"{ours}.bounds", (low, high), why)
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
    prefix = "rollout.val_kwargs"
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
    prefix = "actor.optim"
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
        beta1, beta2 = map(float, betas)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{prefix}.betas = {betas!r} of verl: expected two numbers; correct them"
        ) from error
    result.set("optim.betas", (beta1, beta2), verl.origin(f"{prefix}.betas"))
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
            (
                why
                for why, patterns in NO_COUNTERPART.items()
                if any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split())
            ),
            None,
        )
        if reason is None:
            result.unknown.append(name)
        else:
            shown = f"{name} False" if name in _TRUE_IN_VERL else name
            result.without.setdefault(reason, []).append(shown)
