"""Finds out with which settings a shell script starts verl: bash runs it, and programs are recorded.

bash itself decides about branches, loops, functions and expansions. No program runs but harmless ones
(`date`, `sed`, ...): a recorder writes the words of its call to a file and says that it was successful. All
this happens in bubblewrap, with a copy of the files around the script, without a network and for a few
seconds; without bubblewrap only if the user asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxrl.errors import UserError
from jaxrl_code.sandbox.native import READABLE, Bubblewrap, SandboxUnavailable

SECONDS = 10
"""How long a script may run. Nothing in it waits, so most end in milliseconds."""

# Limits on what a script can make this command read, and on the files that are copied for it.
_MAX_BYTES = 1 << 20
_MAX_CALLS = 2000
_MAX_COPIED = 500
_MAX_COPIED_BYTES = 1 << 16
_READERS = """
awk base64 basename bash bc cat cksum cmp comm cut date dd diff dirname du echo egrep envsubst expr false
fgrep find fold gawk getconf getopt grep head hostname id join jq ls mawk md5sum mkdir mktemp nl nproc
numfmt od paste printenv printf readlink realpath rev sed seq sha1sum sha256sum shuf sort split stat tac
tail tee test tr true tty uname uniq wc whoami xargs
""".split()  # noqa: SIM905
_WRITERS = ("chmod", "cp", "ln", "mv", "rm", "rmdir", "touch")
# What scripts look for with `command -v`, or replace themselves by with `exec`.
_RECORDED = """
accelerate apptainer conda deepspeed docker env huggingface-cli mpirun nohup nvidia-smi pip pip3 python
python3 ray setsid sleep srun torchrun uv
""".split()  # noqa: SIM905

_RECORDER = pathlib.Path(__file__).with_name("verl_recorder.sh")
# What a script leaves in the background at its end has half a second to call its program.
_START = (
    'BASH_ENV=$JAXRL_FOLDER/recorder bash -- "$@"; status=$?; '
    "for _ in 1 2 3 4 5; do kill -0 -1 2> /dev/null && sleep 0.1; done; exit $status"
)


class Call(NamedTuple):
    """A program that a script starts.

    Attributes:
      words: the program and its arguments.
      folder: the working directory.
      output: the word that the script got for the program's output; "" if it did not take the output.
      variables: names of the variables that were set.
    """

    words: list[str]
    folder: str
    output: str
    variables: frozenset[str]


class ScriptRun(NamedTuple):
    """What a script did: its calls in their order, and its last words if it failed; "" if it did not."""

    calls: list[Call]
    failure: str


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    confined: bool = True,
    files_exist: bool = False,
) -> ScriptRun:
    """Runs a shell script with recorders in place of programs.

    Args:
      path: path of the script.
      arguments: its arguments.
      variables: variables to set, besides those of the environment.
      confined: whether it runs in bubblewrap; otherwise it can do what this user can.
      files_exist: whether files that the script looks for, and that are not here, are there for it.

    Raises:
      UserError: bubblewrap does not work here, there is no bash, or the script does not end.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UserError(f"{path} is run by bash, and bash is not installed; install it")
    if confined and (reason := _fault_of_bubblewrap()):
        raise UserError(
            f"{path} is run by bash to see what it starts, and the sandbox for it does not work here "
            f"({reason}); make bubblewrap work, or read the script and add --run, which runs it with your "
            "rights (programs are recorded, not started)"
        )
    with tempfile.TemporaryDirectory(prefix="jaxrl-") as name:
        folder = pathlib.Path(name)
        _prepare(folder, bash, confined=confined)
        command = ["bash", "-c", _START, "bash", os.path.abspath(path), *arguments]
        if confined:
            command = _bubblewrap(folder, pathlib.Path(path).resolve().parent) + command
        environment = {
            # Variables of bash itself would change how the script runs.
            **{k: v for k, v in os.environ.items() if not k.startswith("BASH")},
            **(variables or {}),
            "JAXRL_FOLDER": name,
            "JAXRL_SANDBOX": "1" if confined else "",
            "JAXRL_CHECKS": "check made" if files_exist and confined else "",
            "JAXRL_RECORDED": " ".join(_RECORDED),
            "JAXRL_PYTHON": sys.executable,
            # The recorder counts nested shells by it.
            "SHLVL": "0",
        }
        status, output = _finished(command, environment)
        calls = list(_recorded(folder / "calls"))
    # A script may wait for workers after it has started verl.
    if status is None and not calls:
        raise UserError(
            f"{path} did not end within {SECONDS} seconds; name a YAML file of verl instead"
        )
    last = "".join(c for c in _last_words(output) if c.isprintable())[-300:]
    if status is None:
        failure = f"did not end within {SECONDS} seconds"
    else:
        failure = f"ended with status {status}" + (last and f": {last}")
    return ScriptRun(calls, failure if status != 0 else "")


def _last_words(output: str) -> str:
    """The last lines of an output, at most three, without those of set -x, which begin with "+"."""
    blocks = re.split(r"^\+.*$", output, flags=re.MULTILINE)
    words = next((block for block in reversed(blocks) if block.strip()), "")
    return " ".join(line.strip() for line in words.splitlines()[-3:] if line.strip())


@functools.cache
def _fault_of_bubblewrap() -> str:
    """Why bubblewrap does not work here; "" if it does."""
    try:
        Bubblewrap().check()
    except SandboxUnavailable as reason:
        return str(reason)
    return ""


def _prepare(folder: pathlib.Path, bash: str, *, confined: bool) -> None:
    """Writes the recorder, and a folder of programs that is the script's whole PATH."""
    (folder / "calls").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(_RECORDER, folder / "recorder")
    for name in (*_READERS, *(_WRITERS if confined else ())):
        if program := shutil.which(name):
            (folder / "bin" / name).symlink_to(os.path.realpath(program))
    for name in _RECORDED:
        # A file, since scripts look for it with `command -v` and call it by exec or xargs.
        (folder / "bin" / name).write_text(f'#!{bash}\njaxrl_record "${{0##*/}}" "$@"\n')
        (folder / "bin" / name).chmod(0o755)


def _bubblewrap(folder: pathlib.Path, script_folder: pathlib.Path) -> list[str]:
    """The command line of `bwrap`: memory for files, programs of the system, and copies of two folders."""
    arguments = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent"]
    arguments += ["--cap-drop", "ALL"]
    # Writes go to memory, and vanish.
    arguments += ["--size", str(1 << 26), "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
    here = pathlib.Path.cwd()
    for number, source in enumerate(sorted({here, script_folder})):
        if source != pathlib.Path("/"):
            arguments += ["--bind", str(_copied(source, folder / f"copy{number}")), str(source)]
    for path in (*READABLE, "/bin", "/etc/passwd"):
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--bind", str(folder), str(folder), "--chdir", str(here), "--"]
    return arguments


def _copied(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies the small files below a folder; of larger ones it makes empty files of the same name."""
    target.mkdir()
    folders = [source]
    left = _MAX_COPIED
    # The list grows meanwhile, so that the nearest folders come first.
    for folder in folders:
        copy = target / folder.relative_to(source)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries[:left]:
            # Links to folders may lead around in a ring, hidden ones hold histories and caches.
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                (copy / entry.name).mkdir()
                folders.append(folder / entry.name)
            elif entry.is_file() and os.access(entry.path, os.R_OK):
                small = entry.stat().st_size <= _MAX_COPIED_BYTES
                shutil.copy(entry.path if small else os.devnull, copy / entry.name)
        left -= len(entries)
        if left <= 0:
            break
    return target


def _finished(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Runs a command; returns its status, None if its time was over, and what it printed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        # What the script left in the background ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(max(0, output.tell() - _MAX_BYTES))
        return status, output.read().decode(errors="replace")


def _recorded(folder: pathlib.Path) -> Iterator[Call]:
    """The calls in a folder that the script may have written to itself."""
    for file in sorted(os.scandir(folder), key=lambda file: file.name)[:_MAX_CALLS]:
        # A link or a pipe is none of the recorder's, and could lead out of the sandbox.
        if not file.is_file(follow_symlinks=False) or file.stat().st_size > _MAX_BYTES:
            continue
        content = pathlib.Path(file.path).read_bytes().decode(errors="replace")
        where, output, variables, *words = [*content.split("\0")[:-1], "", "", ""]
        if words := words[:-3]:
            yield Call(words, where, output, frozenset(variables.split("\n")))
