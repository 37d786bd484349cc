"""Makes the pages of this folder again: runs the command on each page and replaces its old output.

    python docs/plans/make.py                                       # all
    python docs/plans/make.py docs/plans/dapo_qwen32b_h100-128.md   # one

Compiles for minutes. TPUs need the extra `aot`, GPUs `aot-gpu`.
"""

import datetime
import pathlib
import re
import shlex
import subprocess
import sys

import jax

FOLDER = pathlib.Path(__file__).parent
# The page up to the date of its output.
HEAD = re.compile(r"(.*?Compiled ahead of time on )\S+ \(jax \S+\)(;[^\n]*\n\n)", re.DOTALL)


def make(page: pathlib.Path) -> None:
    match = HEAD.match(page.read_text())
    if match is None:
        raise SystemExit(
            f"{page.name} has no line 'Compiled ahead of time on DATE (jax VERSION); ...'"
        )
    command = next(line for line in match[1].splitlines() if "launch/plan.py" in line)
    _, *arguments = shlex.split(command, comments=True)
    plan = subprocess.run(
        [sys.executable, *arguments], cwd=FOLDER.parents[1], stdout=subprocess.PIPE, text=True
    )
    if plan.returncode:
        raise SystemExit(f"{command.strip()}: exit status {plan.returncode}")
    output = "".join(f"    {line.rstrip()}\n" for line in plan.stdout.splitlines())
    page.write_text(f"{match[1]}{datetime.date.today()} (jax {jax.__version__}){match[2]}{output}")


for page in map(pathlib.Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.md")):
    print(page.name)
    make(page)
