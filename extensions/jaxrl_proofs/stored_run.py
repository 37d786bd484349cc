"""A run as its folder has it: its settings as a `Config`, its rows of metrics, its kept samples."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jaxrl.config import config_tree
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.files import read_text
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_folder import CONTENT, RunFolder, StageFolder, parse_config

STAGES = ("sft", "preference", "rl")
_NO_RUN = "name the folder of a run, such as runs/dapo_tiny/seed0"
# Floats that Python prints, but does not read.
_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """The folder of a run, which is only read."""

    folder: RunFolder

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The text of each setting, and the digests of what they name.

        Raises:
          UserError: the folder holds no run.
        """
        text = read_text(self.folder.config, absent=_NO_RUN)
        try:
            return parse_config(text)
        except ValueError as error:
            raise UserError(f"{self.folder.config} is damaged ({error}); restore it") from error

    def rows(self, stage: str) -> dict[int, dict[str, Any]]:
        """The rows of a stage by step; empty if it has none."""
        folder: StageFolder = getattr(self.folder, stage)
        if not folder.metrics.exists():
            return {}
        return {row["step"]: row for row in read_metrics(folder.metrics)}

    @property
    def config(self) -> Config:
        """The settings that the run was made with.

        Raises:
          UserError: this version of jaxrl does not have one of them.
        """
        return config_of(self.texts, origin=str(self.folder.config))


def config_of(texts: Mapping[str, str], *, origin: str) -> Config:
    """The config whose `format_config` has these texts; entries that are no settings are left out.

    Raises:
      UserError: a setting is not one of this version, or its text cannot be read.
    """
    tree = config_tree.to_config_dict(Config())
    _empty_tables(tree)
    with tree.unlocked():
        for name, text in texts.items():
            if not name.startswith(CONTENT):
                try:
                    value = _WORDS[text] if text in _WORDS else ast.literal_eval(text)
                except (ValueError, SyntaxError) as error:
                    raise UserError(
                        f"{origin}: {name} = {text} cannot be read; restore the file"
                    ) from error
                _put(tree, name, value)
    try:
        return config_tree.from_config_dict(Config, tree)
    except UserError as error:
        raise UserError(
            f"{origin}: {error}; take the version of jaxrl that made the run"
        ) from error


def _empty_tables(tree: Any) -> None:
    """A table of the run has its own entries, and none of the defaults."""
    for value in tree.values():
        if isinstance(value, config_tree.Table):
            for name in list(value):
                del value[name]
        elif isinstance(value, config_tree.Group):
            _empty_tables(value)


def _put(tree: Any, name: str, value: Any) -> None:
    *groups, leaf = name.split(".")
    for depth, group in enumerate(groups, start=1):
        if group not in tree or tree[group] is None:
            kind = config_tree.group_class(
                config_tree.setting_type(Config, ".".join(groups[:depth]))
            )
            tree[group] = config_tree.to_config_dict(kind()) if kind else config_tree.Table()
        tree = tree[group]
        tree.unlock()
    tree[leaf] = config_tree.Table(value) if isinstance(value, dict) else value
