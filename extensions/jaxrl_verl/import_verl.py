"""Writes a recipe from settings of verl: a YAML file, or the shell script of a run.

    jaxrl import-verl run_dapo_qwen2.5_32b.sh --out my_dapo.py
    MODEL_PATH=... jaxrl import-verl --out my_grpo.py run_grpo.sh ARGUMENT ...
    jaxrl import-verl ppo_trainer.yaml --num_train_prompts 7473 --out my_ppo.py

Each line of the recipe says which setting of verl it was made of. Settings without a counterpart are named at
its top, with the reason. bash runs the script in a sandbox (bubblewrap), where programs are recorded, not
started. docs/from_verl.md has the tables.
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
import tempfile
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import is_dict, leaf_types
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl_verl.verl_files import VerlFile, read_verl
from jaxrl_verl.verl_settings import Import, Line, convert_settings

_WIDTH = 100
_MAX_OF_A_GROUP = 4
_FUNCTION = """

def get_config():
    config = to_config_dict(Config())
"""
_SHAPE = """    # For planning without the model; a run compares it with the model's config.json.
    config.model = model_shapes("{}")
"""
_IMPORTS = """
from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("file", metavar="FILE", help="YAML file or shell script of verl")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="arguments of the script")
    parser.add_argument(
        "--run", action="store_true", help="run the script without a sandbox; read it before"
    )
    parser.add_argument(
        "--call",
        type=int,
        default=0,
        help="which start of verl to import, if the script has several",
    )
    parser.add_argument("--out", default="", help="recipe to write; standard output without it")
    parser.add_argument(
        "--num_train_prompts", type=int, default=0, help="prompts in the training files, for epochs"
    )
    args = parser.parse_args(arguments)
    for name in ("num_train_prompts", "call"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} {getattr(args, name)}: expected 0 or more")
    file = read_verl(args.file, args.arguments, call=args.call, confined=not args.run)
    _write(args.file, file, args.out, args.num_train_prompts)
    return 0


def recipe_text(source: str, file: VerlFile, found: Import) -> str:
    """The text of a recipe.

    Args:
      source: name of verl's file.
      file: its settings.
      found: what they were converted to.
    """
    names = {line.setting: line.value for line in found.lines}
    return "".join(
        [
            f'"""{names.get("name", "A recipe")}: imported from settings of verl."""\n\n',
            *(f"{line}\n" for line in _remarks(source, file, found)),
            _IMPORTS,
            "from jaxrl.models.shapes import model_shapes\n" if found.shape else "",
            _FUNCTION,
            _SHAPE.format(found.shape) if found.shape else "",
            *(f"{line}\n" for line in _assignments(found.lines)),
            "    return config.lock()\n",
        ]
    )


def _write(path: str, file: VerlFile, out: str, num_train_prompts: int) -> None:
    try:
        found = convert_settings(
            file.settings, num_train_prompts=num_train_prompts, every=file.is_script
        )
    except UserError as error:
        # A config or variable that is missing may be the cause.
        raise UserError(" ".join([f"{error}.", *file.remarks]).rstrip(".")) from error
    text = recipe_text(path, file, found)
    # Written even if it is refused: mending a line is less work than finding it.
    fault = ""
    with tempfile.TemporaryDirectory() as folder:
        recipe = pathlib.Path(folder, "imported.py")
        recipe.write_text(text)
        try:
            load_config(Config, str(recipe), {})
        except UserError as error:
            fault = str(error).removeprefix(f"{recipe}:")
    if out:
        try:
            # A recipe that somebody has changed is not overwritten.
            with pathlib.Path(out).open("x") as target:
                target.write(text)
        except FileExistsError as error:
            raise UserError(f"{out} is there already; name another file") from error
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}") from error
    else:
        print(text, end="")
    without = sum(map(len, found.without.values()))
    print(
        f"{len(found.lines)} settings; {without} of verl's have no counterpart, {len(found.unknown)} are not "
        f"known, {len(file.unresolved)} not resolved; the recipe names them",
        file=sys.stderr,
    )
    if fault:
        raise UserError(f"the recipe was written, and is refused as it stands: {fault}")


def _remarks(source: str, file: VerlFile, found: Import) -> Iterator[str]:
    yield from _comment(f"Imported from {source}.")
    for remark in (*file.remarks, *found.remarks):
        yield from _comment(remark)
    if found.without:
        yield from _comment("Without a counterpart, and why:")
    for reason, names in found.without.items():
        # A composed file of verl has 900 settings, so a long group of them is named as one.
        groups = collections.defaultdict(list)
        for name in names:
            groups[".".join(name.split(".")[:3])].append(name)
        shown = []
        for group, members in groups.items():
            is_long = len(members) > _MAX_OF_A_GROUP
            shown += [f"{group}.* ({len(members)})"] if is_long else members
        yield from _comment(f"  {reason}: {', '.join(shown)}")
    if found.unknown:
        yield from _comment("Not known to jaxrl; see docs/from_verl.md:")
        yield from _comment(f"  {', '.join(found.unknown)}")
    if file.unresolved:
        yield from _comment("Not resolved, since the file does not say their values:")
    for name, value in file.unresolved.items():
        yield from _comment(f"  {name} = {value}")


def _comment(text: str) -> Iterator[str]:
    # Names and values are those of a file: a line break in one would end the comment.
    text = "".join(c if c.isprintable() else "?" for c in text)
    indent = "# " + " " * (len(text) - len(text.lstrip()))
    yield from textwrap.wrap(
        text.strip(),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + ("  " if text.startswith(" ") else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _assignments(lines: Sequence[Line]) -> Iterator[str]:
    """The lines of `get_config`, in the order of the settings, with a blank line between groups."""
    kinds = leaf_types(Config)
    rank = {name: number for number, name in enumerate(kinds)}
    merged: dict[str, Line] = {}
    # The last value of a setting counts.
    for line in {line.setting: line for line in lines}.values():
        if line.setting in kinds:
            merged[line.setting] = line
            continue
        # Entries of a free-form dict are collected: data.sources.train_2.path is one of data.sources.
        table = next(
            name
            for name, kind in kinds.items()
            if line.setting.startswith(f"{name}.") and is_dict(kind)
        )
        *groups, leaf = line.setting.removeprefix(f"{table}.").split(".")
        entry = merged.setdefault(table, Line(table, {}, "")).value
        for name in groups:
            entry = entry.setdefault(name, {})
        entry[leaf] = line.value
    group = ""
    for line in sorted(merged.values(), key=lambda x: rank[x.setting]):
        if line.setting.rpartition(".")[0] and line.setting.partition(".")[0] != group:
            group = line.setting.partition(".")[0]
            yield ""
        code = f"    config.{line.setting} = {_literal(line.value, kinds[line.setting])}"
        # A value of the file may hold a line break, which would end the comment.
        why = "".join(c if c.isprintable() else "?" for c in line.why)
        if why and len(code) + len(why) + 4 <= _WIDTH:
            code += f"  # {why}"
        elif why:
            indent = "    # "
            yield from textwrap.wrap(
                why, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
            )
        yield code


def _literal(value: Any, kind: Any) -> str:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    kinds = (kind, *typing.get_args(kind))
    # A recipe is strict about types, YAML is not.
    if is_whole and float in kinds and int not in kinds:
        value = float(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    # As ruff would write it, so that the recipe passes a formatter unchanged.
    text = repr(value)
    text = text if '"' in text or "\\" in text else text.replace("'", '"')
    return f'float("{text}")' if text in ("inf", "-inf") else text
