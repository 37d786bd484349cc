"""What makes two runs the same: the settings in config.txt, and the contents of the files that they name."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib.version

from jaxrl.config.config_tree import flatten_config, format_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.files import fingerprint, open_file
from jaxrl.rollout.rollout_config import FROZEN_ROLE
from jaxrl.tracking.run_folder import CONTENT, parse_config
from jaxrl.user_code import bundled_file, names_function, source_digest

# The settings that a later call of a run may change: where and how fast it runs, how it packs, and what it
# keeps. All others change what is trained or measured. docs/runs.md lists them.
_FREE = (
    "name",
    "run.",
    "hosts.",
    "mesh.",
    "placement",
    "evaluation.every",
    "sft.save_every",
    "rollout.slots",
    "rollout.memory_fraction",
    "rollout.prefill_prompts",
    "rollout.tokens_per_dispatch",
    "rollout.cache",
    "rollout.agent_host",
    "rollout.agent_seconds",
    "reward.code_sandbox",
    "train.rows",
    "train.row_tokens",
    "train.share_prompts",
    "train.logprob_chunk_tokens",
    "train.remat",
    "train.pipeline_microbatches",
)
# Limits of time fit the machine.
_FREE_ENDS = "timeout_s"
# A decay that ends with the run ends later in a longer run.
_LENGTHS = {"optim.lr_decay_steps": "run.num_steps", "sft.optim.lr_decay_steps": "sft.num_steps"}
# Settings whose text names a folder, if it does; a folder here may have the name of a grader.
_FOLDERS = ("weights", "adapter", "path", "evaluation_path", "model")
# What a run reads of a folder; a note beside it does no harm.
_READ = (
    *("*.json", "*.jsonl", "*.safetensors", "*.parquet", "*.arrow", "*.csv", "*.tsv", "*.gz"),
    *("*.jinja", "additional_chat_templates/*.jinja"),
)
# What the weights of the SFT stage depend on. `DemonstrationStream` compares the tokens of its examples.
_OF_SFT = (
    *("sft.", "model.", "weights", "adapter", "tokenizer.", "train.dtype", "train.load_balancing"),
    *("optim.moments", "optim.betas", "optim.epsilon", "optim.grad_clip"),
)
_NOT_OF_SFT = ("sft.run", "sft.save_every")
MADE_WITH = ("jaxrl", "jax", "jaxlib", "python", "XLA_FLAGS", "devices")
"""Keys of `made_with`."""

_AUTO = repr("auto")
_MAX_SHOWN = 120
# Differences that a message names.
_NAMED = 4


def run_settings(config: Config, contents: Mapping[str, str]) -> str:
    """The text of `RunFolder.config`: all settings, and `contents_of` them."""
    lines = (f"{CONTENT}{name} = {digest!r}\n" for name, digest in contents.items())
    return format_config(config) + "".join(lines)


def contents_of(config: Config) -> dict[str, str]:
    """A digest of what each setting names, if it is here: a file, a folder, the source of a function."""
    inputs = config.run_folder.inputs
    found = {}
    for name, value in flatten_config(config).items():
        if isinstance(value, str) and value and not _is_free(name):
            is_folder = name.endswith(_FOLDERS) or name.startswith(FROZEN_ROLE)
            found[name] = _digest(value, inputs, may_be_folder=is_folder)
    return {name: digest for name, digest in found.items() if digest}


def made_with() -> dict[str, str]:
    """Versions, code and devices, further entries of `contents_of`. With others a run is still the same."""
    # No version of the package: a checkout may not be installed.
    code = fingerprint(pathlib.Path(__file__).parents[1], "**/*.py")
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    versions = jax.__version__, jaxlib.version.__version__, platform.python_version()
    found = code, *versions, os.environ.get("XLA_FLAGS", ""), devices
    return dict(zip(MADE_WITH, found, strict=True))


def sft_settings(config: Config, contents: Mapping[str, str]) -> dict[str, str]:
    """The entries of `run_settings` that the weights of the SFT stage depend on."""
    texts = parse_config(run_settings(config, contents))
    names = {name: name.removeprefix(CONTENT) for name in texts}
    return {
        name: texts[name]
        for name, setting in names.items()
        if setting.startswith(_OF_SFT) and setting not in _NOT_OF_SFT
    }


def check_sft_stage(config: Config, before: Mapping[str, str], contents: Mapping[str, str]) -> None:
    """Raises UserError if the SFT stage in `config.sft_folder` was made with other settings, `before`."""
    changed = differences(before, sft_settings(config, contents))
    if changed and config.run.resume != "accept_other_settings":
        raise UserError(
            f"the SFT stage in {config.sft_folder} was made with other settings ({listed(changed)}); "
            "use its settings, train a stage for this run alone (an empty sft.run), or take that one by "
            "run.resume=accept_other_settings"
        )


def _is_free(name: str) -> bool:
    return name.startswith(_FREE) or name.endswith(_FREE_ENDS)


def _digest(value: str, inputs: pathlib.Path, *, may_be_folder: bool) -> str:
    where = value.rpartition(":")[0] if names_function(value) else value
    if os.path.dirname(where) == str(inputs):
        # Kept by `jaxrl.api` under the digest of its content.
        return os.path.basename(where)
    if names_function(value) and not where.endswith(".pkl"):
        return "" if bundled_file(where) != where else source_digest(where)
    if os.path.isfile(where):
        status = os.stat(where)
        return _file_digest(where, status.st_size, status.st_mtime_ns)
    return (
        fingerprint(pathlib.Path(where), *_READ) if may_be_folder and os.path.isdir(where) else ""
    )


@functools.cache
def _file_digest(path: str, size: int, changed_ns: int) -> str:
    """A digest of a whole file, which is read once: a run asks twice."""
    opened: Any = open_file(path, absent="restore it")
    with opened as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """How two runs differ, one text for each setting; empty if they are the same run.

    Args:
      before, now: texts of settings and contents by name, from `run_settings`. A setting that did not exist
        before had its default.
    """
    before = {name: text for name, text in _defaults().items() if name in now} | {**before}
    found = []
    for name in dict.fromkeys([*now, *before]):
        if name.startswith(CONTENT) or _is_free(name) or _same(name, before, now):
            continue
        old, new = (_cut(texts.get(name, "none")) for texts in (before, now))
        found.append(f"{name}: {old} -> {new}" if old != new else f"{name} {new} has other content")
    return found


@functools.cache
def _defaults() -> dict[str, str]:
    return parse_config(format_config(Config()))


def listed(changed: list[str]) -> str:
    """The first of the texts of `differences`, and how many more there are."""
    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    return "; ".join(changed[:_NAMED]) + more


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _same(name: str, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    old, new = before.get(name), now.get(name)
    contents = before.get(CONTENT + name), now.get(CONTENT + name)
    if None not in contents:
        # What is in a file counts, and not where it is.
        return contents[0] == contents[1]
    # The file has the choice of the program in the place of "auto".
    if old == new or new == _AUTO:
        return True
    if "{}" in (old, new) and None in (old, new):
        # A table that has been empty, or is now: its entries are compared.
        return True
    length = _LENGTHS.get(name)
    return length is not None and (old, new) == (before.get(length), now.get(length))
