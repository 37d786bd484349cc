"""Reads settings of verl: a YAML file of OmegaConf, or a shell script with a Hydra command line.

    python3 -m verl.trainer.main_ppo data.train_batch_size=1024 +data.seed=1 "data.train_files=[$a,$b]"

A script is run by bash, with recorders in place of programs (`verl_script`). Each call of a program with
settings of verl is one file of settings.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from jaxrl.errors import UserError
from jaxrl.files import read_text
from jaxrl_verl.verl_script import Call, ScriptRun, run_script

_ABSENT = "name a YAML file of verl, or a shell script that starts it"
_ROOTS = ("actor_rollout_ref", "algorithm", "critic", "data", "reward", "reward_model", "trainer")

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/:-]*)(?:=(.*))?", re.DOTALL)
# Without braces inside: the innermost is resolved first.
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
# Of bash, left over where a variable is not set; and the word that stands for a program's output.
_LEFT_OVER = re.compile(r"\$(?:\w+|\{\w+\})|\bOUTPUT_OF_\w+")
_READS = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[^]]*\])?\})")
# Of awk and getopts.
_SET_BY_OTHERS = ("NF", "NR", "FNR", "FS", "OFS", "OPTARG", "OPTIND")
_IN_ARITHMETIC = re.compile(r"\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_KEY_IN_BRACES = re.compile(r"""([{,]\s*["']?[\w.]+["']?)\s*:\s*""")

# Programs of verl that do something else, by the last part of their module.
_OTHER_PROGRAMS = (
    (
        "sft",
        "supervised fine-tuning: set data and sft in a recipe, and run.num_steps 0 for it alone "
        "(docs/rewards.md, supervised examples)",
    ),
    (r"gen(eration)?(_server)?$|rollout_only", "generation: `jaxrl evaluate` samples and grades answers"),
    ("eval", "evaluation: `jaxrl evaluate` (docs/evaluation.md)"),
    ("distill|gkd|opd", 'distillation: algorithm.dataflow = "distill" (docs/distillation.md)'),
    ("reward_model|rm_train|_rm$", "training of a reward model: preference.loss (docs/algorithms.md)"),
    ("dpo|spin|sppo|prime|flowrl|diffusion|flow_?grpo|raft|sdpo", "another algorithm than PPO's family"),
)  # fmt: skip
_PPO = re.compile(r"(main_ppo\w*|main_dapo|fully_async_main|main_entropy)")


class VerlFile(NamedTuple):
    """Settings of verl.

    Attributes:
      settings: values by dotted name.
      unresolved: the text of each value that the file does not say: a variable that is not set, the output
        of a program, an interpolation of a setting that the file does not have.
      remarks: what else a reader should know about the file.
      is_script: whether each setting was written by a person, and not composed by Hydra.
    """

    settings: dict[str, Any]
    unresolved: dict[str, str]
    remarks: list[str]
    is_script: bool


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf and Hydra read it: 1e-6 is a number, and yes, 017 and 2025-01-01 are texts."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _rule, _first in (
    ("bool", r"(?i:true|false)", "tTfF"),
    ("null", r"~|(?i:null)|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][\d_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\d[\d_]*(?:\.[\d_]*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)|\.\d[\d_]*(?:[eE][-+]?\d+)?|\.?(?i:inf|nan))",
        "-+.0123456789iInN",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_rule})$"), list(_first)
    )


def read_verl(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    call: int = 0,
    confined: bool = True,
) -> VerlFile:
    """Reads the settings in a file of verl.

    Args:
      path: a YAML file (.yaml, .yml), or a shell script (all other names).
      arguments: arguments of the script.
      call: which start of verl is meant, from 1, if the script has several; 0 if it has one.
      confined: whether the script runs in a sandbox.

    Raises:
      UserError: the file cannot be read, is malformed, has no setting of verl, has several starts, or starts
        a program of verl that is not for reinforcement learning.
    """
    text = read_text(path, absent=_ABSENT)
    shown = os.fspath(path)
    # bash would stop there in silence.
    if "\0" in text:
        raise UserError(f"{shown} is no text; {_ABSENT}")
    is_script = pathlib.Path(path).suffix.lower() not in (".yaml", ".yml")
    file = VerlFile({}, {}, [], is_script)
    given = (
        _script_settings(path, text, arguments, call, confined, file)
        if is_script
        else _yaml_settings(text, shown)
    )
    roots = {name.split(".")[0] for name in given}
    if not roots & {*_ROOTS}:
        raise UserError(f"{shown} has no setting of verl, such as data.train_batch_size; {_ABSENT}")
    # The groups of verl's fine-tuning, which also has data and trainer.
    if roots & {"model", "optim", "engine"} and not roots & {"actor_rollout_ref", "algorithm"}:
        raise UserError(f"{shown} has settings of {_OTHER_PROGRAMS[0][1]}")
    if given.get("distillation.enabled") in (True, "True", "true"):
        raise UserError(f"{shown} has distillation.enabled, which is {_OTHER_PROGRAMS[3][1]}")
    for name, value in given.items():
        try:
            # An empty value of a script is most often that of a variable.
            if value == "" and is_script:
                raise KeyError(name)
            file.settings[name] = _resolved(value, name, given)
        except KeyError:
            file.unresolved[name] = str(value) or "(empty)"
        except RecursionError as error:
            raise UserError(
                f"{shown}: the interpolations of {name} do not end; write its value"
            ) from error
    return file


# YAML.


def _yaml_settings(text: str, shown: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _Loader)
        leaves = dict(_leaves(tree, "")) if isinstance(tree, dict) else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise UserError(f"{shown}{line} is no YAML ({problem}); write the file again") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{shown} is no YAML that can be read; write the file again") from error
    if not leaves:
        raise UserError(f"{shown} has no groups of settings; {_ABSENT}")
    return leaves


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolved(value: Any, name: str, given: Mapping[str, Any]) -> Any:
    """`value` of the setting `name` without OmegaConf's interpolations; KeyError if one leads nowhere."""
    if isinstance(value, list):
        return [_resolved(item, name, given) for item in value]
    if not isinstance(value, str):
        return value
    if whole := _INTERPOLATION.fullmatch(value):
        return _looked_up(whole[1], name, given)
    text = value
    # Several in one text, or one whose name is made by another.
    while found := _INTERPOLATION.search(text):
        inner = _looked_up(found[1], name, given)
        text = f"{text[: found.start()]}{inner}{text[found.end() :]}"
    if "${" in text or _LEFT_OVER.search(text):
        raise KeyError(name)
    return _scalar(text) if text != value and text.startswith("[") else text


def _looked_up(reference: str, name: str, given: Mapping[str, Any]) -> Any:
    resolver, is_call, arguments = reference.strip().partition(":")
    default: list[str] = []
    if is_call:
        reference, *default = (part.strip() for part in arguments.split(",", 1))
        if resolver.strip() == "oc.env":
            if reference not in os.environ and not default:
                raise KeyError(reference)
            return _scalar(os.environ.get(reference, *default))
        if resolver.strip() != "oc.select":
            raise KeyError(reference)
    reference = reference.strip()
    # A relative one: ".lr" is a neighbour of the setting, "..lr" of its group.
    if dots := len(reference) - len(reference.lstrip(".")):
        reference = ".".join([*name.split(".")[:-dots], reference[dots:]])
    # A value may be an interpolation itself; a ring ends in RecursionError.
    if reference in given:
        return _resolved(given[reference], reference, given)
    if default:
        return _scalar(default[0])
    raise KeyError(reference)


# Shell scripts.


class _Start(NamedTuple):
    """A start of a program with settings: its module or file, the words after it, and the call."""

    module: str
    words: list[str]
    call: Call

    @property
    def other(self) -> str:
        """What it is, if it is not reinforcement learning."""
        last = self.module.removesuffix(".py").replace("/", ".").rpartition(".")[2].lower()
        if _PPO.fullmatch(last):
            return ""
        return next((what for rule, what in _OTHER_PROGRAMS if re.search(rule, last)), "")


def _start_of(call: Call) -> _Start | None:
    words = call.words
    # The last one: launchers such as torchrun come before the program that they start.
    at = [
        number
        for number, word in enumerate(words)
        if (word.endswith(".py") and "=" not in word)
        or (number and words[number - 1] in ("-m", "--module") and "=" not in word)
    ]
    if not at:
        return None
    start = _Start(words[at[-1]], words[at[-1] + 1 :], call)
    names = [found[2] for word in start.words if (found := _OVERRIDE.fullmatch(word)) and found[3]]
    # A program of somebody's own counts if it is given settings of verl.
    is_trainer = re.search(r"verl[./].*trainer[./]|main_ppo|main_dapo", start.module)
    has_settings = any(name.split(".")[0] in _ROOTS and "." in name for name in names)
    return start if is_trainer or has_settings else None


def _starts(calls: Sequence[Call]) -> list[_Start]:
    """The starts of verl, each once."""
    found: dict[tuple[str, ...], _Start] = {}
    for call in calls:
        if start := _start_of(call):
            found.setdefault((start.module, *start.words), start)
    return list(found.values())


def _script_settings(
    path: str | os.PathLike[str],
    text: str,
    arguments: Sequence[str],
    number: int,
    confined: bool,
    file: VerlFile,
) -> dict[str, Any]:
    """The settings of a start; adds to the remarks of `file` and to its unresolved values."""
    shown, files_exist = os.fspath(path), False
    ran = functools.partial(run_script, os.fspath(path), confined=confined)
    run = ran(arguments)
    starts = _starts(run.calls)
    if not starts and run.failure and confined:
        # A script that stops since its data or model is not here goes on if it seems to be.
        with_files = ran(arguments, files_exist=True)
        if starts := _starts(with_files.calls):
            run, files_exist = with_files, True
    if not starts:
        absent = _absent_before_end(text, arguments, run)
        raise _no_start(shown, run, absent, _starts_with_texts(ran, absent, arguments))
    chosen = _chosen(starts, number, shown)
    if chosen.other:
        raise UserError(f"{shown} starts {chosen.module}, which is {chosen.other}")
    given = _overrides(chosen, file.remarks)
    # Once more with a text in each variable that is not set, to see which settings it reaches.
    for call in run.calls:
        sourced = pathlib.Path(call.folder, call.words[-1])
        if call.words[0] == "source" and sourced.is_file():
            text += read_text(sourced, absent=_ABSENT)
    if absent := _absent(text, arguments, chosen.call):
        again = _starts_with_texts(
            functools.partial(ran, files_exist=files_exist), absent, arguments
        )
        other = _overrides(again[starts.index(chosen)], []) if len(again) == len(starts) else {}
        changed = {name for name in given if str(other.get(name)) != str(given[name])}
        reached = {n for n in changed if _LEFT_OVER.search(str(other.get(n)))}
        file.unresolved.update((name, str(other[name])) for name in given if name in reached)
        # Arguments are read by functions too, so they are named only if something changes with them.
        elsewhere = changed - reached or other.keys() - given.keys()
        variables = {name for name in absent if not name.isdecimal()}
        if elsewhere or variables:
            names = sorted(absent if elsewhere else variables)
            file.remarks.append(
                f"Set by nobody, and so empty: {', '.join(f'${name}' for name in names)}. The "
                "script may take another way with them: give variables before the command, arguments "
                "after FILE."
            )
        given = {name: value for name, value in given.items() if name not in reached}
    _remark_on_run(run, starts, chosen, file.remarks)
    return given


def _no_start(shown: str, run: ScriptRun, absent: set[str], others: Sequence[_Start]) -> UserError:
    """The error of a script that starts nothing; `others` are its starts with a text in all of `absent`."""
    names = ", ".join(f"${name}" for name in sorted(absent))
    if others and others[0].other:
        return UserError(f"{shown} starts {others[0].module}, which is {others[0].other}")
    if others:
        return UserError(
            f"{shown} {run.failure}; it starts {others[0].module} if somebody sets {names}: give variables "
            "before the command, arguments after FILE"
        )
    begun = "; ".join(_short(call.words) for call in run.calls[:5])
    return UserError(
        f"{shown} starts no program with settings of verl"
        + (f", and {run.failure}" if run.failure else f"; it starts {begun}" if begun else "")
        + (f"; set by nobody: {names}" if names else "")
        + f"; {_ABSENT}, and give a script its variables before the command and its arguments after FILE"
    )


def _starts_with_texts(
    ran: Callable[..., ScriptRun], absent: set[str], arguments: Sequence[str]
) -> list[_Start]:
    """The starts if each variable and argument that is not set has its own name for its text."""
    texts = {name: f"${name}" for name in absent if not name.isdecimal()}
    last = max([0, *map(int, absent - texts.keys())])
    extra = [f"${n}" for n in range(len(arguments) + 1, last + 1)]
    try:
        return _starts(ran([*arguments, *extra], texts).calls)
    except UserError:
        return []


def _chosen(starts: Sequence[_Start], number: int, shown: str) -> _Start:
    # A stage of fine-tuning before PPO is no choice.
    fitting = [start for start in starts if not start.other] or starts
    if number:
        if number > len(fitting):
            raise UserError(f"--call {number}: {shown} starts verl {len(fitting)} times")
        return fitting[number - 1]
    if len(fitting) == 1:
        return fitting[0]
    # Only what differs, or the line would have a thousand words.
    common = set.intersection(*({start.module, *start.words} for start in fitting))
    which = "; ".join(
        f"{n} {_short([w for w in (s.module, *s.words) if w not in common])}"
        for n, s in enumerate(fitting, 1)
    )
    raise UserError(
        f"{shown} starts verl {len(fitting)} times; choose one by --call: {which[:600]}"
    )


def _short(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _absent(text: str, arguments: Sequence[str], call: Call) -> set[str]:
    """Variables and arguments that the script reads without a default and that are not set."""
    # Comments often name variables that somebody may set.
    text = re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE)
    names = {found[1] or found[2] for found in _READS.finditer(text)}
    for found in _IN_ARITHMETIC.finditer(text):
        names |= {*re.findall(r"(?<![\w$'\"{])[A-Za-z_]\w*", found[1])}
    absent = {name for name in names - call.variables - {*_SET_BY_OTHERS} if not name.isdecimal()}
    return absent | {n for n in names if n.isdecimal() and len(arguments) < int(n) < 10}


def _absent_before_end(text: str, arguments: Sequence[str], run: ScriptRun) -> set[str]:
    """`_absent` of a script that ended early, so that what it sets itself may not be set yet."""
    last = run.calls[-1] if run.calls else Call([], "", "", frozenset(os.environ))
    absent = {
        name
        for name in _absent(text, arguments, last)
        if not re.search(rf"(?<![\w$]){name}(\+?=| in )", text)
    }
    required = set(re.findall(r"\$\{(\w+):?\?", text)) - os.environ.keys()
    return absent | required | set(re.findall(r"(\w+): unbound variable", run.failure))


def _overrides(start: _Start, remarks: list[str]) -> dict[str, Any]:
    """The settings of a Hydra command line, with those of its config file below them."""
    given: dict[str, Any] = {}
    config_name, config_path, odd, removed = "", "", [], []
    words = iter(start.words)
    for word in words:
        option, _, value = word.partition("=")
        if option in ("--config-name", "-cn"):
            config_name = value or next(words, "")
        elif option in ("--config-path", "-cp", "--config-dir", "-cd"):
            config_path = value or next(words, "")
        elif not (found := _OVERRIDE.fullmatch(word)) or (found[3] is None and found[1] != "~"):
            odd.append(word)
        elif found[1] == "~":
            removed.append(found[2])
        # verl's group of configs, which sets the engine.
        elif found[2] == "model_engine":
            given.setdefault("actor_rollout_ref.actor.strategy", found[3])
        elif "." not in found[2] or "@" in found[2] or "/" in found[2]:
            odd.append(word)
        else:
            # A table on the command line is as many settings: data={seed: 1}.
            value = _scalar(found[3])
            leaves = (
                _leaves(value, f"{found[2]}.")
                if isinstance(value, dict) and value
                else [(found[2], value)]
            )
            given |= dict(leaves)
    given = {
        name: value
        for name, value in given.items()
        if not any(name == gone or name.startswith(f"{gone}.") for gone in removed)
    }
    if removed:
        remarks.append(
            f"Removed by ~, so that verl's own default counts here: {', '.join(removed)}."
        )
    if odd:
        remarks.append(
            f"Not settings, and not imported: {', '.join(_short([word]) for word in odd)}."
        )
    last = start.module.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if not _PPO.fullmatch(last):
        remarks.append(
            f"{start.module} is no program of verl that is known here; what it does itself is not imported."
        )
    return _with_config_file(
        given, config_name.removesuffix(".yaml"), config_path, start.call, remarks
    )


def _with_config_file(
    given: dict[str, Any], name: str, folder: str, call: Call, remarks: list[str]
) -> dict[str, Any]:
    # verl has one config for each engine.
    if "megatron" in name:
        given.setdefault("actor_rollout_ref.actor.strategy", "megatron")
    if name in ("", "ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer"):
        return given
    file = pathlib.Path(call.folder, folder, f"{name}.yaml")
    if not file.is_file():
        remarks.append(
            f"The config {name} is not here ({file}), and its settings are not imported. Let verl write "
            "it whole (the command with --cfg job) and import that."
        )
        return given
    below = _yaml_settings(read_text(file, absent=_ABSENT), str(file))
    lists = [value for key, value in below.items() if key.split(".")[0] == "defaults"]
    remarks.append(
        f"Settings of {file} are below those of the command line. It is based on {lists}, not imported."
    )
    return {key: value for key, value in below.items() if key not in ("defaults", "hydra")} | given


_SAID = {
    "check made": "The script looks for files that are not here, and is imported as if they were",
    "check of nothing": "The script looks for files that are not here; it may take another way with them",
    "source of nothing": "Files that are not here, so what they set is not known",
    "output": "Programs whose output the script uses; they were not run, so values made of it are wrong",
    "lost": "Settings after the end of the command (a comment, an empty line, or a blank after the backslash "
    "ends it), which verl does not see",
    "trap on DEBUG": "Traps on DEBUG, which were not set, so what they do at each command is not known",
    "begun": "Started too, and not imported",
}


def _remark_on_run(
    run: ScriptRun, starts: Sequence[_Start], chosen: _Start, remarks: list[str]
) -> None:
    said: dict[str, list[str]] = {kind: [] for kind in _SAID}
    for call in run.calls:
        first = call.words[0]
        if start := _start_of(call):
            if start.other and start.module != chosen.module:
                said["begun"].append(_short(call.words))
        elif first in _SAID:
            said[first].append(_short(call.words[1:]))
        elif (found := _OVERRIDE.fullmatch(first)) and found[3]:
            said["lost"].append(" ".join(call.words))
        elif first not in ("source", "sleep"):
            took = call.output and "verl" not in " ".join(call.words)
            said["output" if took else "begun"].append(_short(call.words))
    for kind, text in _SAID.items():
        if names := list(dict.fromkeys(said[kind])):
            more = f", and {len(names) - 12} more" if len(names) > 12 else ""
            remarks.append(f"{text}: {', '.join(names[:12])}{more}.")
    others = sum(not start.other for start in starts) - 1
    if others > 0:
        remarks.append(f"The script starts verl {others} more times, with other settings (--call).")
    if run.failure:
        remarks.append(f"The script {run.failure}.")


def _scalar(text: Any) -> Any:
    """A value as Hydra reads it on a command line; text that is no YAML is itself."""
    if not isinstance(text, str):
        return text
    text = text.strip()
    if not text:
        return text
    if text.startswith("{"):
        text = _KEY_IN_BRACES.sub(r"\1: ", text)
    # Hydra reads what has these signs as a text, YAML would not.
    elif not text.startswith(("[", "'", '"')) and re.search(r"[:#,]", text):
        return text
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value
