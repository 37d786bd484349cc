"""Converts settings of verl to settings of jaxrl (docs/from_verl.md has the same as tables).

`verl_same.txt` has the settings with one counterpart each, `verl_without.txt` those without, and
`verl_tables.yaml` the names of losses, advantages and the like. The functions here convert settings that
belong together: batches, layouts, losses, KL, correction, data, schedules. Where a file does not have a
setting, verl's default counts if ours differs, so that the recipe trains what verl would train. Names leave
out "actor_rollout_ref.".
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

from jaxrl.config.shapes import is_here
from jaxrl.errors import UserError
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.shapes import SHAPES

_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
_CORRECTION = "algorithm.rollout_correction"


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
    default: Any
    convert: Callable[[Any], Any]


def _lines_of(name: str) -> list[str]:
    return pathlib.Path(__file__).with_name(name).read_text("utf-8").splitlines()


def _path(value: Any) -> str:
    if str(value).startswith("hdfs://"):
        raise ValueError("hdfs:// is not read; copy the files to a directory")
    return os.path.expanduser(str(value).removeprefix("file://"))


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    # A conversion raises ValueError or TypeError for a value without counterpart.
    "same": lambda value: value,
    "float": float,
    "text": str,
    "path": _path,
    # The name is also that of a folder.
    "name": lambda x: "".join(c if c.isalnum() or c in "._-" else "_" for c in str(x)) or "run",
    # 0 and less is "all" or "no limit" in verl.
    "count": lambda n: max(n, 0),
    # verl counts steps from 1, and the actor learns in this one.
    "before": lambda n: max(n - 1, 0),
    "remat": lambda on: "full" if on else "none",
}
# A line has the name of verl's setting, that of ours, verl's default, and the conversion.
SAME = tuple(
    Counterpart(verl, jaxrl, ast.literal_eval(default), _CONVERSIONS[conversion])
    for verl, jaxrl, default, conversion in map(str.split, _lines_of("verl_same.txt"))
)

# A reason why settings have no counterpart, and patterns of their names. The first pattern that fits counts.
NO_COUNTERPART = tuple(
    (patterns.split(), reason)
    for patterns, _, reason in (line.partition(" = ") for line in _lines_of("verl_without.txt"))
)
# Turning these off changes what verl trains, and cannot be done here.
_TRUE_IN_VERL = ("data.shuffle", "trainer.val_before_train")
# Composition and launching of Hydra, and the classes that values belong to.
_IGNORED = ("hydra.*", "*._target_", "defaults", "_self_")

_TABLES = yaml.safe_load(pathlib.Path(__file__).with_name("verl_tables.yaml").read_text("utf-8"))


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


class _Verl(Import):
    """Settings of verl by name, with a record of those that were read, and what they become."""

    def __init__(self, given: Mapping[str, Any], *, every: bool):
        super().__init__()
        self._given = {}
        for long, value in given.items():
            name = long.removeprefix("actor_rollout_ref.")
            # Without the prefix these are other settings, of asynchronous trainers.
            if name == long and name.split(".")[0] in ("actor", "rollout", "ref", "model"):
                name = f"/{name}"
            for old, new in _TABLES["aliases"].items():
                if name == old or (old.endswith(".") and name.startswith(old)):
                    name = new + name[len(old) :]
                    break
            # A composed file has old names too, with null.
            if not self._given.get(name):
                self._given[name] = value
        # Values that turn something off ask for nothing, but for those that verl has turned on.
        off = (None, False, "", "???", [], {})
        self.unread = {
            name
            for name, value in self._given.items()
            if (value is False if name in _TRUE_IN_VERL else every or value not in off)
        }

    def get(self, name: str, default: Any = None, kind: type | None = None) -> Any:
        """The value; the default if the file has none or null.

        Args:
          name: name of the setting.
          default: verl's default.
          kind: str, float (any number) or int (a whole number), which the value must be; None takes any.

        Raises:
          UserError: the value is not of that kind.
        """
        self.unread.discard(name)
        value = self._given.get(name)
        expected = ""
        if isinstance(value, float) and math.isnan(value):
            expected = "a number"
        elif (value := default if value is None else value) is None or kind is None:
            return value
        elif kind is str:
            expected = "" if isinstance(value, str) else "a text"
        elif isinstance(value, bool) or not isinstance(value, int | float):
            expected = "a number"
        elif kind is int and (math.isinf(value) or value != int(value)):
            expected = "a whole number"
        if expected:
            raise UserError(f"{name} = {value!r} of verl: expected {expected}; correct it")
        return kind(value) if kind else value

    def is_null(self, name: str) -> bool:
        """Whether the file has this setting with null."""
        return name in self._given and self._given[name] is None

    def has(self, prefix: str) -> bool:
        """Whether the file has a setting of this group."""
        return any(name.startswith(prefix) for name in self._given)

    def put(self, setting: str, value: Any, *names: str, why: str = "") -> None:
        """Adds a setting, with the settings of verl or the reason that it comes from."""
        self.lines.append(Line(setting, value, why or self.origin(*names)))

    def say(self, remark: str) -> None:
        self.remarks.append(remark)

    def origin(self, *names: str) -> str:
        """The verl settings that a line comes from, for its comment."""
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
    verl = _Verl(given, every=every)
    for row in SAME:
        value = verl.get(row.verl, row.default)
        if value is not None:
            try:
                verl.put(row.jaxrl, row.convert(value), row.verl)
            except (TypeError, ValueError) as error:
                raise UserError(f"{row.verl} = {value!r} of verl: {error}; correct it") from error
    for convert in (_layout, _model, _data, _rewards, _dataflow, _loss, _kl, _correction):
        convert(verl)
    _schedule(verl, num_train_prompts)
    fits = lambda name, patterns: any(fnmatch.fnmatch(name, p) for p in patterns)  # noqa: E731
    for name in sorted(name for name in verl.unread if not fits(name, _IGNORED)):
        reason = next((why for patterns, why in NO_COUNTERPART if fits(name, patterns)), None)
        if reason is None:
            verl.unknown.append(name)
        else:
            shown = f"{name} False" if name in _TRUE_IN_VERL else name
            verl.without.setdefault(reason, []).append(shown)
    return verl


# Devices.

_DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
_ROLLOUT_TP = "rollout.tensor_model_parallel_size"


def _layout(verl: _Verl) -> None:
    hosts, of_host = (verl.get(name, n, int) for name, n in zip(_DEVICES, (1, 8), strict=True))
    devices = hosts * of_host
    strategy = verl.get("actor.strategy", "fsdp", str)
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        verl.say(f"Layout: the engine {strategy} is taken for FSDP; check mesh.")
    # The critic has the layout of the actor.
    verl.get("critic.strategy")
    t_g = verl.get(_ROLLOUT_TP, 2 if devices > 1 else 1, int)
    _check_sizes(dict(zip((*_DEVICES, _ROLLOUT_TP), (hosts, of_host, t_g), strict=True)))
    if _is_megatron(verl):
        _megatron_layout(verl, devices, t_g)
    else:
        _fsdp_layout(verl, devices, t_g)
    names = [
        f"actor.{engine}.{what}_offload"
        for engine in ("fsdp_config", "megatron")
        for what in ("param", "optimizer")
    ]
    # A list, so that all are read.
    if any([verl.get(name) for name in names]):
        verl.put("mesh.offload_training_state", True, *names)


def _is_megatron(verl: _Verl) -> bool:
    # Recipes for Megatron name its sizes, and the engine only in the config file.
    by_sizes = "megatron" if verl.has("actor.megatron.") else "fsdp"
    return verl.get("actor.strategy", by_sizes) == "megatron"


def _fsdp_layout(verl: _Verl, devices: int, t_g: int) -> None:
    """FSDP over W devices with a rollout TP of t is "1-t-W/t" with fsdp W/t here.

    The t devices of a generation shard hold tensor shards in training too, and t x fsdp devices hold one copy
    of the state.
    """
    ulysses = "actor.ulysses_sequence_parallel_size"
    width = verl.get(ulysses, 1, int)
    _check_sizes({ulysses: width})
    # Training and generation share a mesh: both sizes divide its tensor groups.
    t = math.lcm(t_g, width)
    if devices % t:
        raise UserError(
            f"{_shown_devices(verl, devices)} are no multiple of {t}, the least common multiple of {ulysses} "
            f"{width} and {_ROLLOUT_TP} {t_g}; change one of these"
        )
    d = devices // t
    why = f"{devices} devices, rollout TP {t_g}"
    if width > 1:
        why += f", Ulysses {width} as tensor parallel (or mesh.context)"
    verl.put("mesh.train", f"1-{t}-{d}", why=why)
    verl.put("mesh.generate", f"1-{t_g}-{t // t_g}-{d}", why=why)
    size = verl.get("actor.fsdp_config.fsdp_size", -1, int)
    # fsdp_size counts devices, of which a copy of the state has t x fsdp here. Below 1, and from their number
    # on, it is all of them.
    fsdp = math.gcd(d, max(1, size // t)) if 0 < size < devices else d
    verl.put("mesh.fsdp", fsdp, why=f"tensor {t} x fsdp {fsdp} devices hold one copy of the state")
    if t > 1:
        verl.say(
            f"Layout: verl shards the training state over {t * d} devices by FSDP and samples with TP {t_g}. "
            f"Here a generation shard is a union of training shards, so training has the tensor axis too: "
            f"mesh.train 1-{t}-{d}, not 1-1-{t * d}, with mesh.fsdp. The bytes of a device are the same."
        )
    _rows(verl, d=d, replicas=d, width=width)


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} {size} of verl: expected 1 or more; correct it")


def _shown_devices(verl: _Verl, devices: int) -> str:
    sizes = (verl.get(name, n, int) for name, n in zip(_DEVICES, (1, 8), strict=True))
    shown = " x ".join(f"{name} {size}" for name, size in zip(_DEVICES, sizes, strict=True))
    return f"{shown} = {devices} devices of verl"


def _megatron_layout(verl: _Verl, devices: int, t_g: int) -> None:
    """Layout of Megatron's sizes.

    Its experts lie over all devices of a pipeline stage, and rollout has groups of its own. Here experts lie
    over tensor and expert devices, and a tensor group of generation over a tensor group of training and
    replicas. Where these are too few, pipeline stages, context devices or replicas become tensor devices.
    """
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
    sizes = {name: verl.get(name, 1, int) for name in map(_megatron_size, kinds)}
    parts = verl.get(_megatron_size("expert_tensor"), None, int)
    _check_sizes(sizes | {_megatron_size("expert_tensor"): 1 if parts is None else parts})
    t, p, context, expert = sizes.values()
    if parts is None:
        # Megatron's default, where there are as many devices.
        parts = t if devices % (p * expert * t) == 0 else 1
    fitting = functools.partial(
        _fitting_layout, devices, t=t, p=p, context=context, experts=expert * parts
    )
    found = fitting(t_g)
    if found is None:
        shown = _shown_devices(verl, devices)
        product = " x ".join(f"{name} {size}" for name, size in list(sizes.items())[:3])
        if devices % (t * p * context):
            raise UserError(
                f"{shown} are no multiple of {t * p * context}, the product of {product}; change one of these"
            )
        others = [str(n) for n in range(1, min(devices, 64) + 1) if devices % n == 0 and fitting(n)]
        raise UserError(
            f"{_ROLLOUT_TP} {t_g} of verl: a shard of generation is a union of training shards, and {shown} "
            f"with {product} have none of this size; use {' or '.join(others)}"
        )
    layout, whole = found
    why = f"{devices} devices, rollout TP {t_g}"
    verl.put("mesh.train", f"{layout.p}-{layout.t}-{layout.d}", why=why)
    verl.put("mesh.generate", layout.generate, why=why)
    if layout.fsdp > 1:
        verl.put("mesh.fsdp", layout.fsdp, why="replicas that share a tensor group of rollout")
    verl.put("mesh.context", layout.context, why="context_parallel_size")
    verl.put(
        "mesh.expert", layout.expert, why="expert_model_parallel_size over tensor devices first"
    )
    if whole:
        verl.put("mesh.sharding", "ZeRO-1", why="Megatron's distributed optimizer")
    else:
        verl.put("mesh.sharding", "ZeRO-3", why="context devices share the weights")
        verl.say(
            f"Layout: Megatron has the experts of a stage on {expert * parts} devices, of a context group "
            f"too. Here {layout.expert * layout.t} hold them, so ZeRO-3 splits all weights over the rest."
        )
    if layout.t > t:
        verl.say(
            f"Layout: rollout has tensor parallel {t_g}, and verl trains with pipeline {p}, tensor {t}, "
            f"context {context} and {devices // (p * t * context)} replicas. Here training has pipeline "
            f"{layout.p}, tensor {layout.t}, context {layout.context} and {layout.row_shards} replicas; a "
            "device holds no more weights."
        )
    _rows(verl, d=layout.d, replicas=layout.row_parts, width=1)


def _megatron_size(kind: str) -> str:
    return f"actor.megatron.{kind}_parallel_size"


def _fitting_layout(
    devices: int, t_g: int, *, t: int, p: int, context: int, experts: int
) -> tuple[ParallelLayout, bool] | None:
    """The layout nearest to Megatron's, and whether as many devices as there hold the experts.

    Args:
      devices, t_g: all devices, and tensor parallel size of rollout.
      t, p, context: sizes of training.
      experts: number of devices that hold the experts of a stage.
    """
    found = []
    most = min(max(t, t_g), devices)
    ranges = (range(1, min(size, most) + 1) for size in (p, context, devices // t))
    # How many stages, context devices and replicas become one tensor device.
    for stages, contexts, copies in itertools.product(*ranges):
        tensor = t * stages * contexts * copies
        if p % stages or context % contexts or tensor > max(t, t_g):
            continue
        here = p // stages * tensor, context // contexts
        if devices % math.prod(here):
            continue
        replicas = devices // math.prod(here)
        wanted = experts // math.gcd(experts, tensor)
        expert = math.gcd(wanted, replicas)
        fsdp = t_g // math.gcd(tensor, t_g)
        if replicas // expert % fsdp == 0:
            layout = ParallelLayout(
                p // stages, tensor, replicas * here[1], 1, t_g, fsdp, expert, here[1]
            )
            found.append((expert < wanted, copies, stages * contexts, contexts, layout))
    if not found:
        return None
    # First of all as many devices hold the experts; then as few replicas, stages and contexts as possible
    # become tensor devices, and of these stages before contexts.
    fewer, *_, layout = min(found, key=lambda entry: entry[:4])
    return layout, not fewer


def _rows(verl: _Verl, *, d: int, replicas: int, width: int) -> None:
    """Rows of a microbatch: as many tokens on each device as verl's micro-batches have.

    Activations are split over d. A tensor group holds the same rows, so its size does not count.
    """
    longest = sum(verl.get(f"data.max_{what}_length", 512, int) for what in ("prompt", "response"))
    tokens_name = "actor.ppo_max_token_len_per_gpu"
    size_name = "actor.ppo_micro_batch_size_per_gpu"
    tokens, size = verl.get(tokens_name, 16384, int), verl.get(size_name, None, int)
    if verl.get("actor.use_dynamic_bsz", False):
        rows, why = tokens * d // longest, f"{verl.origin(tokens_name)}, x {d} replicas"
    elif size:
        rows, why = size * d // width, f"{verl.origin(size_name)}, x {d} replicas"
    else:
        rows, why = replicas, "one for each replica"
    # Packing fills rows of this length, so none is longer than one sample.
    verl.put("train.row_tokens", longest, why="the longest prompt and response")
    # A multiple of the replicas, which divide the rows.
    verl.put("train.rows", max(1, rows // replicas) * replicas, why=why)
    verl.put("train.logprob_chunk_tokens", min(longest, 2048), why="logits at a time")
    verl.put("train.dtype", "bfloat16", why="verl's mixed precision; master weights are float32")
    verl.put("rollout.slots", "auto", why="as many samples at a time as fit")


# The model and its data.


def _model(verl: _Verl) -> None:
    names = ("model.tokenizer_path", "model.path")
    if path := verl.get(names[0]) or verl.get(names[1]):
        verl.put("tokenizer.path", _path(path), *names)
        model = str(verl.get(names[1], ""))
        if not is_here(os.path.expanduser(model)):
            # A published shape, by the last part of the path.
            name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
            # The larger Qwen2.5 have another epsilon in their instruct models.
            ends = ["", "-base", "-it"]
            ends += [] if "14b" in name or "32b" in name else ["-instruct"]
            verl.shape = next((n for end in ends if (n := name.removesuffix(end)) in SHAPES), "")
    else:
        verl.say("No model is named; set weights and tokenizer.path.")
    rank = verl.get("model.lora_rank", 0, int)
    targets = verl.get("model.target_modules", "all-linear")
    if rank <= 0:
        # lora_alpha has a value in most files, with or without adapters.
        verl.lines = [line for line in verl.lines if not line.setting.startswith("model.lora")]
        return
    verl.put("model.lora.rank", rank, "model.lora_rank")
    if targets != "all-linear":
        modules = [str(name) for name in (targets if isinstance(targets, list) else [targets])]
        if not set(modules) <= _TABLES["lora_targets"].keys():
            verl.say(
                f"target_modules {targets!r}: only {', '.join(_TABLES['lora_targets'])} can have adapters."
            )
        if known := tuple(
            ours for name in modules for ours in _TABLES["lora_targets"].get(name, ())
        ):
            verl.put("model.lora.targets", known, "model.target_modules")


def _data(verl: _Verl) -> None:
    prompt_key = verl.get("data.prompt_key", "prompt", str)
    for files, first, others, limit in (
        ("data.train_files", "data.train", "data.sources", "data.train_max_samples"),
        ("data.val_files", "data.evaluation", "data.evaluations", "data.val_max_samples"),
    ):
        paths = verl.get(files)
        paths = [paths] if isinstance(paths, str) else paths or []
        if not isinstance(paths, list):
            raise UserError(f"{files} = {paths!r} of verl: expected a path or a list of them")
        if not paths:
            verl.say(f"No {files} are named; set {first}.path.")
        # Our first source has settings of its own, further ones are a table.
        more = (f"{others}.{first.split('.')[-1]}_{n}" for n in range(2, len(paths) + 1))
        groups, most = [first, *more], verl.get(limit, None, int)
        for number, group in enumerate(groups):
            if most is not None:
                # verl's number is that of all files. A size of 0 would be a whole file.
                size = max(-(-(most - number) // len(groups)), min(most, 1))
                verl.put(f"{group}.size", max(size, 0), limit)
        if len(paths) > 1 and first == "data.train":
            verl.say(
                f"{files}: verl draws from all rows alike, and here each file gives as many as the others; "
                "set weight and size of each source by its rows."
            )
        for group, path in zip(groups, paths, strict=False):
            verl.put(f"{group}.path", _path(path), why=files)
            if prompt_key != "prompt":
                why = f"data.prompt_key {prompt_key!r}"
                verl.put(f"{group}.fields.prompt", prompt_key, why=why)
                verl.put(f"{group}.fields.answer", "reward_model.ground_truth", why="verl's layout")
    options = "data.apply_chat_template_kwargs."
    for name in sorted(name for name in verl.unread if name.startswith(options)):
        if (value := verl.get(name)) is not None:
            verl.put(f"data.chat_options.{name.removeprefix(options)}", value, name)
    if (most := verl.get("data.train_max_samples", -1, int)) > 0:
        verl.say(
            f"data.train_max_samples {most}: verl draws these rows, and here they are the first ones."
        )
    names = ("data.sampler.class_path", "data.sampler.class_name")
    path, name = verl.get(names[0], "", str), verl.get(names[1], "", str)
    if path:
        verl.put("data.sampler", f"{_path(path).removeprefix('pkg://')}:{name}", *names)
        verl.say(
            f"data.sampler {name}: verl makes it of (data_source, data_config), iterates over it, and calls "
            "update(batch). A run refuses it until it has __init__(prompts, seed), next, update(groups), "
            "state and restore (docs/data.md)."
        )
    verl.put("data.chat", True, why="verl renders every prompt with the chat template")
    names = ("data.filter_overlong_prompts", "data.truncation")
    # Read both, so that neither is named as unread.
    drops, truncation = verl.get(names[0], False), str(verl.get(names[1], "error"))
    verl.put("data.overlong", "drop" if drops else truncation, *names)


def _rewards(verl: _Verl) -> None:
    train = str(verl.get("data.train_files") or "").lower()
    # verl chooses by the data_source of each row, which a name of a file often holds.
    grader = "math" if "math" in train and "dapo" not in train else "answer"
    verl.put("reward.grader", grader, why="by the name of the training files")
    verl.say(
        "Graders: verl scores by the data_source of a row, 1 or 0 for most and 1 or -1 for DAPO's; "
        "reward.grader gives 1 or -1. The scale matters where an advantage is not divided by its deviation."
    )
    enable, length, factor = (f"{_OVERLONG}.{leaf}" for leaf in ("enable", "len", "penalty_factor"))
    on, tokens, penalty = verl.get(enable), verl.get(length, 0, int), verl.get(factor, 1.0, float)
    verl.put("reward.overlong_buffer_tokens", tokens if on else 0, enable, length)
    if on:
        verl.put("reward.overlong_penalty", penalty, factor)
    path = verl.get("reward.custom_reward_function.path")
    function = verl.get("reward.custom_reward_function.name", "compute_score")
    if path:
        verl.say(
            f"Reward function {path}:{function}: its signature is verl's. Write one of jaxrl "
            '(docs/rewards.md), and set reward.functions = {"mine": {"path": "FILE.py:NAME", "weight": 1.0}}.'
        )
    model = verl.get("reward.reward_model.model_path")
    if verl.get("reward.reward_model.enable", False) and model:
        if path:
            verl.say(f"Reward model {model}: called by the reward function; see reward.judge.")
        else:
            verl.put("reward.model", _path(model), "reward.reward_model.model_path")


# The algorithm.


def _counterpart(name: str, value: Any, known: Mapping[str, str]) -> str:
    if str(value) not in known:
        raise UserError(
            f"{name} {value!r} of verl has no counterpart; choose one of {', '.join(known)}"
        )
    return known[value]


def _dataflow(verl: _Verl) -> None:
    estimator = verl.get("algorithm.adv_estimator", "gae", str)
    advantage = _counterpart("algorithm.adv_estimator", estimator, _TABLES["advantages"])
    filters = bool(verl.get("algorithm.filter_groups.enable", False))
    dataflow = {"gae": "ppo", "remax": "remax"}.get(estimator, "dapo" if filters else "grpo")
    names = ("algorithm.adv_estimator", "algorithm.filter_groups.enable")
    verl.put("algorithm.dataflow", dataflow, *names)
    verl.put("algorithm.advantage", advantage, names[0])
    gamma, lam = (verl.get(f"algorithm.{name}", 1.0, float) for name in ("gamma", "lam"))
    by_std = {"normalize_std": bool(verl.get("algorithm.norm_adv_by_std_in_grpo", True))}
    options = {
        "gae": {"gamma": gamma, "lam": lam},
        "reinforce_plus_plus": {"gamma": gamma},
        "grpo": by_std,
        "grpo_passk": by_std,
    }.get(advantage, {})
    verl.put("algorithm.advantage_options", options, why="gamma, lam, norm_adv_by_std_in_grpo")
    if estimator == "gae":
        verl.put("algorithm.whiten", True, why="verl whitens the advantages of gae")
        names = ("critic.ppo_epochs", "actor.ppo_epochs")
        # verl's critic has the actor's epochs by default.
        epochs = verl.get(names[0], verl.get(names[1], 1, int), int)
        verl.put("critic.epochs", epochs, *names)
    size, part = "data.train_batch_size", "actor.ppo_mini_batch_size"
    batch, mini = verl.get(size, 1024, int), verl.get(part, 256, int)
    prefix = "algorithm.filter_groups"
    # Read in any case: a file may have them with enable=False.
    metric = verl.get(f"{prefix}.metric", "acc")
    most = verl.get(f"{prefix}.max_num_gen_batches", 0, int)
    generated = verl.get("data.gen_batch_size", 0, int) or batch
    # Dynamic sampling needs groups, which gae and remax do not have.
    if dataflow == "dapo":
        keep = "correctness" if metric == "acc" else "score"
        verl.put("rollout.keep_groups", keep, f"{prefix}.metric")
        verl.put("rollout.max_generation_batches", max(most, 0), f"{prefix}.max_num_gen_batches")
        verl.put("rollout.generation_prompts", generated, "data.gen_batch_size")
    elif filters:
        verl.say(
            f"Dynamic sampling (filter_groups) is left out: {estimator} has no groups of its own."
        )
    if not batch:
        whole = verl.get("async_training.require_batches", 1, int)
        raise UserError(
            f"{size} 0 of verl belongs to its fully asynchronous trainer, which trains {part} {mini} x "
            f"async_training.require_batches {whole} prompts at a time; write {mini * whole} instead of 0"
        )
    if min(batch, mini) < 1 or batch % mini:
        raise UserError(
            f"{size} {batch} of verl is no multiple of {part} {mini}; make the second a divisor of the first"
        )
    why = f"{batch} / {mini} ({verl.origin(size, part)})"
    verl.put("algorithm.updates_per_step", batch // mini, why=why)


def _loss(verl: _Verl) -> None:
    number = lambda name, default: verl.get(f"actor.{name}", default, float)  # noqa: E731
    # At 0 Megatron does not clip. FSDP clips to a norm of 0, which is refused.
    if _is_megatron(verl) and number("grad_clip", 1.0) <= 0:
        verl.put("optim.grad_clip", math.inf, "actor.grad_clip")
    mode = verl.get("actor.policy_loss.loss_mode", "vanilla", str)
    loss = _counterpart("policy_loss.loss_mode", mode, _TABLES["losses"])
    width = number("clip_ratio", 0.2)
    low, high = number("clip_ratio_low", width), number("clip_ratio_high", width)
    if width != 0.2 and not verl.has("actor.clip_ratio_"):
        verl.say(
            "clip_ratio is taken for both bounds. verl from 0.4 on reads clip_ratio_low and clip_ratio_high, "
            "0.2 by default, instead."
        )
    highest = number("clip_ratio_c", 3.0)
    clip = {"clip_low": low, "clip_high": high}
    limits = {"limit_low": low, "limit_high": high, "max_ratio": highest}
    by_mode = {
        "vanilla": {**clip, "dual_clip": highest},
        **dict.fromkeys(("gspo", "cispo", "geo_mean", "clip_cov"), clip),
        **dict.fromkeys(("dppo_tv", "dppo_kl"), limits),
    }
    # All are read, so that those of another loss are not named as unknown.
    options = {
        kind: {ours: number(*theirs) for ours, theirs in table.items()}
        for kind, table in _TABLES["loss_options"].items()
    }
    options = {**by_mode.get(mode, {}), **options.get(mode, {})}
    verl.put("algorithm.loss", loss, "actor.policy_loss.loss_mode")
    # The comment of a line without clip names the group of settings alone.
    names = [f"actor.clip_ratio{end}" for end in ("", "_low", "_high", "_c")]
    why = verl.origin(*names) if "clip_low" in options else "actor.policy_loss"
    verl.put("algorithm.loss_options", options, why=why)
    aggregation = verl.get("actor.loss_agg_mode", "token-mean", str)
    # verl's sapo ignores the setting.
    aggregation = "seq-mean-token-mean" if mode == "sapo" else aggregation
    verl.put("algorithm.aggregation", aggregation, "actor.loss_agg_mode")
    names = ("actor.loss_scale_factor", "data.max_response_length")
    scale = verl.get(names[0], verl.get(names[1], 512, int), float)
    if aggregation == "seq-mean-token-sum-norm":
        verl.put("algorithm.aggregation_options", {"scale": scale}, *names)
    if verl.get("rollout.top_k", -1, float) > 0 or verl.get("rollout.top_p", 1.0, float) < 1:
        verl.say(
            "top_k and top_p: verl trains on log-probabilities of the whole vocabulary; set "
            "algorithm.truncated_logprobs = False for that."
        )


def _kl(verl: _Verl) -> None:
    def estimate(name: str, kind: Any) -> str:
        plain = str(kind).removesuffix("+")
        known = _TABLES["kl_estimates"]
        if plain not in known:
            _counterpart(name, kind, known)
        return known[plain] + str(kind)[len(plain) :]

    names = ("actor.kl_loss_coef", "actor.kl_loss_type")
    coef, kind = verl.get(names[0], 0.001, float), verl.get(names[1], "low_var_kl")
    if verl.get("actor.use_kl_loss", False):
        verl.put("algorithm.kl.loss_coef", coef, names[0])
        verl.put("algorithm.kl.loss_estimate", estimate(names[1], kind), names[1])
    control, penalty = "algorithm.kl_ctrl", "algorithm.kl_penalty"
    coef, kind = verl.get(f"{control}.kl_coef", 0.001, float), verl.get(penalty, "kl")
    # All are read first: a KL term that is off leaves nothing to explain.
    adaptive = verl.get(f"{control}.type", "fixed", str) == "adaptive"
    target = verl.get(f"{control}.target_kl", 0.1, float)
    horizon = verl.get(f"{control}.horizon", 10000, float)
    if not verl.get("algorithm.use_kl_in_reward", False) or not coef:
        return
    verl.put("algorithm.kl.reward_coef", coef, f"{control}.kl_coef")
    verl.put("algorithm.kl.reward_estimate", estimate(penalty, kind), penalty)
    if adaptive:
        verl.put("algorithm.kl.target", target, f"{control}.target_kl")
        verl.put("algorithm.kl.horizon", horizon, f"{control}.horizon")


def _correction(verl: _Verl) -> None:
    leaves = {
        leaf: verl.get(f"{_CORRECTION}.{leaf}", default)
        for leaf, default in (
            ("rollout_is", None),
            ("rollout_is_threshold", 2.0),
            ("rollout_is_batch_normalize", False),
            ("rollout_rs", None),
            ("rollout_rs_threshold", None),
            ("bypass_mode", False),
            ("loss_type", "ppo_clip"),
        )
    }
    weights, threshold, normalize, rules, bounds, bypass, loss_type = leaves.values()
    ours = "algorithm.correction"
    # Without a threshold verl has no weights: null is not the default.
    if weights and not verl.is_null(f"{_CORRECTION}.rollout_is_threshold"):
        # A single number cuts weights from above alone.
        low, high = _bounds(threshold) if "_" in str(threshold) else (0.0, _bound(threshold))
        verl.put(f"{ours}.weights", str(weights), f"{_CORRECTION}.rollout_is")
        verl.put(f"{ours}.bounds", (low, high), f"{_CORRECTION}.rollout_is_threshold")
        verl.put(f"{ours}.normalize", bool(normalize), why="rollout_is_batch_normalize")
    names = [rule.strip() for rule in str(rules).split(",")] if rules else []
    each = [bound.strip() for bound in str(bounds).split(",")]
    # One bound may be for all rules.
    each = each if len(each) == len(names) else each * len(names)
    for name, bound in zip(names, each, strict=False):
        over, _, by = name.rpartition("_")
        if by == "k1":
            # verl bounds pi_rollout / pi_train.
            low, high = _bounds(bound)
            why = f"{name} {bound}, inverted"
            verl.put(f"{ours}.reject.{over}_ratio", (1 / high, 1 / low), why=why)
        else:
            verl.put(f"{ours}.reject.{name}", _bound(bound), why=f"{name} {bound}")
    if bypass:
        verl.put(f"{ours}.bypass", True, f"{_CORRECTION}.bypass_mode")
        # Last value of a setting counts, so this replaces the loss above.
        if loss_type == "reinforce":
            verl.put("algorithm.loss", "policy_gradient", f"{_CORRECTION}.loss_type")
            verl.put("algorithm.loss_options", {}, why="a policy gradient has no clip")


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
    # Written so that NaN is refused too; the inverse of a smaller one overflows.
    if not value >= 1e-30:
        raise UserError(
            f"bound {text!r} of verl's rollout_correction: expected a number above 0; correct it"
        )
    return value


# Schedules.


def _schedule(verl: _Verl, num_train_prompts: int) -> None:
    # do_sample counted for engines that verl no longer has: its servers read the temperature alone.
    verl.get("rollout.val_kwargs.do_sample")
    name = "rollout.val_kwargs.temperature"
    verl.put("evaluation.temperature", verl.get(name, 0.0, float), name)
    _learning_rate(verl, _steps(verl, num_train_prompts))
    only_last = "never, and here the last step alone"
    _interval(verl, "save_freq", -1, "run.save_every", only_last)
    _interval(verl, "max_actor_ckpt_to_keep", 0, "run.keep_checkpoints", "all")
    tests = _interval(verl, "test_freq", -1, "evaluation.every", "never")
    if not tests and verl.get("trainer.val_before_train", True):
        verl.put(
            "evaluation.every", -1, why="trainer.val_before_train: before the first step alone"
        )
    resume = verl.get("trainer.resume_mode", "auto", str)
    verl.get("trainer.resume_from_path")
    if value := {"auto": "auto", "disable": "never"}.get(resume):
        verl.put("run.resume", value, "trainer.resume_mode")
    else:
        verl.say("resume_path: a run goes on from its own folder; verl's checkpoints are not read.")
    loggers = verl.get("trainer.logger", ["console"])
    project = verl.get("trainer.project_name", "verl_examples")
    loggers = [loggers] if isinstance(loggers, str) else loggers
    if isinstance(loggers, list):
        ours = [f"{name}:{project}" for name in ("wandb", "trackio") if name in loggers]
        known = ("console", "tensorboard", "wandb", "trackio")
        if others := [str(name) for name in loggers if name not in known]:
            verl.say(f"Loggers without a counterpart: {', '.join(others)}.")
        if ours:
            verl.put("run.loggers", ("tensorboard", *ours), "trainer.logger")
    if (hosts := verl.get("trainer.nnodes", 1, int)) > 1:
        verl.say(
            f"{hosts} hosts: start the same command on each with hosts.coordinator (docs/mesh.md)."
        )


def _interval(verl: _Verl, name: str, default: int, setting: str, below_1: str) -> int:
    """Puts a number of steps or files that verl reads as `below_1` below 1, as we do 0; returns it."""
    name = f"trainer.{name}"
    given = verl.get(name, default, int)
    verl.put(setting, max(given, 0), name, why="" if given > 0 else f"{name} {given}: {below_1}")
    return max(given, 0)


def _steps(verl: _Verl, num_train_prompts: int) -> int | None:
    """Puts the number of steps; returns that of the schedule of the rate, None if it is not known."""
    given = verl.get("trainer.total_training_steps", None, int)
    epochs = verl.get("trainer.total_epochs", 30, int)
    batch = verl.get("data.train_batch_size", 1024, int)
    most = verl.get("data.train_max_samples", -1, int)
    steps, why = given, verl.origin("trainer.total_training_steps")
    if num_train_prompts:
        prompts = min(num_train_prompts, most) if most > 0 else num_train_prompts
        # verl drops the rest of an epoch that fills no batch.
        if prompts < batch:
            raise UserError(
                f"{prompts} prompts are fewer than data.train_batch_size {batch} of verl, which has no step "
                "then; correct --num_train_prompts, data.train_max_samples or the batch"
            )
        of_epochs = prompts // batch * epochs
        # verl ends with the first of both, and its schedule does not.
        if given is None or of_epochs < given:
            steps, why = of_epochs, f"{epochs} epochs of {prompts} prompts / {batch}"
    elif given is None:
        verl.say(
            f"Steps: verl trains {epochs} epochs, that is {epochs} x prompts / {batch} steps, and the file "
            "does not say how many prompts there are. Set run.num_steps, or give --num_train_prompts."
        )
    elif verl.get("trainer.total_epochs") is not None:
        verl.say(
            f"Steps: verl ends after {epochs} epochs, {epochs} x prompts / {batch} steps, if these are fewer "
            f"than {given}; --num_train_prompts tells."
        )
    if steps is not None:
        verl.put("run.num_steps", steps, why=why)
    return steps if given is None else given


def _learning_rate(verl: _Verl, steps: int | None) -> None:
    prefix = "actor.optim"
    names = (f"{prefix}.lr_warmup_steps", f"{prefix}.lr_warmup_steps_ratio")
    warmup, ratio = verl.get(names[0], -1, int), verl.get(names[1], 0, float)
    if warmup <= 0 and ratio and steps is None:
        verl.say(
            f"Warm-up: {ratio:g} of all steps, which are not known; set optim.lr_warmup_steps."
        )
    # 0 and less leave it to the ratio.
    warmup = warmup if warmup > 0 else int(ratio * (steps or 0))
    verl.put("optim.lr_warmup_steps", warmup, *names)
    betas = verl.get(f"{prefix}.betas", [0.9, 0.999])
    try:
        beta1, beta2 = map(float, betas)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{prefix}.betas = {betas!r} of verl: expected two numbers; correct them"
        ) from error
    verl.put("optim.betas", (beta1, beta2), f"{prefix}.betas")
    name, end = f"{prefix}.lr_scheduler_type", f"{prefix}.lr_decay_steps"
    schedule, decay_steps = verl.get(name, "constant"), verl.get(end, steps, int)
    if schedule not in ("constant", "cosine", "linear", "wsd"):
        verl.say(f"The schedule {schedule} of the rate has no counterpart; it is constant here.")
        schedule = "constant"
    elif schedule != "constant" and decay_steps is None:
        verl.say(
            f"The schedule {schedule}: set optim.lr_schedule to it, optim.lr_decay_steps to run.num_steps."
        )
        return
    # A run that ends with its warm-up has no decay. Without both a rate is the same by all definitions.
    decays = schedule != "constant" and decay_steps > warmup
    if decays or warmup:
        verl.put("optim.lr_schedule", schedule if decays else "constant", name)
    if not decays:
        return
    verl.put("optim.lr_decay_steps", decay_steps, end)
    # Megatron's is a rate, not a share.
    share = verl.get(f"{prefix}.min_lr", 0.0, float) / (verl.get(f"{prefix}.lr", 1e-6, float) or 1)
    for setting, theirs, default in (
        ("optim.lr_final", "min_lr_ratio", share),
        ("optim.lr_cycles", "num_cycles", 0.5),
    ):
        value = verl.get(f"{prefix}.{theirs}", default, float)
        verl.put(setting, value, f"{prefix}.{theirs}", f"{prefix}.min_lr")
