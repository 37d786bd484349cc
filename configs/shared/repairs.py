"""One-line repairs of small programs by mini-swe-agent, another project's harness, which is not changed here.

    system      Repair f.py.
    user        def f(a, b):
                    return a - b
                f(24, 3) == 27
    assistant   ```sh
                sed -i 's|-|+|' f.py
                ```                                  the harness runs it in its sandbox, and goes on
    user        exit 0
    assistant   ```sh
                echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
                ```                                  the harness ends; hidden tests decide about f.py

    rollout.agent = "shared/repairs.py:agent"        runs the harness, and scores what it has left
    data.train.path = "shared/repairs.py:make"       tasks, each with an example of a turn for SFT

Most examples repair the program without a look at its test. Reinforcement learning has to discover that the
test decides. Commands of the model run in bubblewrap, by mini-swe-agent's own environment for it: with the
workspace, the system's programs to read, and nothing else. The repaired program runs in the sandbox of jaxrl.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import contextlib
import functools
import os
import random
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import UserError
from jaxrl_agents.adapters.packages import package
from jaxrl_code.sandbox import choose_sandbox
from jaxrl_code.sandbox.native import SandboxLimits

OPERATORS = ("+", "-", "*", "and", "or")
# Share of the examples that do what the test asks for, and of those in no form that the harness takes.
LOOKS, WRONG_FORM = 0.3, 0.1
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
STEPS = 3

# What the harness says. Its own templates are long, and made for large models.
SYSTEM = "Repair f.py."
_AGENT = {
    "system_template": SYSTEM,
    "instance_template": "{{task}}",
    "step_limit": STEPS,
    # An answer without a command ends it.
    "max_consecutive_format_errors": 1,
    "wall_time_limit_seconds": 300,
}
_MODEL = {
    "model_name": "openai/policy",
    "action_regex": r"```sh\n(.*?)\n```",
    "observation_template": "{{output.output[:40]}}exit {{output.returncode}}",
    "cost_tracking": "ignore_errors",
}
# Namespaces of every kind without a network, no capabilities, no variables of this process; /usr to read.
# bwrap is started by prlimit: seconds of processor time, bytes of memory and of a file, for each process.
_ENVIRONMENT = {
    "executable": "prlimit",
    "wrapper_args": shlex.split(
        "--cpu=2 --as=268435456 --fsize=65536 --core=0 --nofile=64 bwrap --unshare-all --unshare-user "
        "--uid 65534 --gid 65534 --cap-drop ALL --die-with-parent --new-session --clearenv --setenv PATH "
        "/usr/bin:/bin --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib "
        "--symlink usr/lib64 /lib64 --dev-bind /dev/null /dev/null"
    ),
    "timeout": 5,
}
_LIMITS = SandboxLimits(seconds=2.0, memory_bytes=1 << 28)


def program(operator: str) -> str:
    """The program with an operator."""
    return f"def f(a, b):\n    return a {operator} b\n"


def value(operator: str, a: int, b: int) -> int:
    """What the program should return."""
    return {"+": a + b, "-": a - b, "*": a * b, "and": a and b, "or": a or b}[operator]


def edit(old: str, new: str) -> str:
    """The command that repairs."""
    return f"sed -i 's|{old}|{new}|' f.py"


def block(command: str) -> str:
    """A command in the form that the harness takes."""
    return f"```sh\n{command}\n```"


def make(index: int, rng: np.random.Generator, *, held_out: bool = False) -> dict[str, Any]:
    """A task, and a turn of someone who works on it.

    Args:
      index: number of the task; only `rng` decides what it is.
      rng: source of all choices.
      held_out: whether the numbers of the test are among the fifth that other tasks never have.
    """
    del index
    choose = random.Random(int(rng.integers(2**63)))
    broken, wanted = choose.sample(OPERATORS, 2)
    a, b = choose.choice([pair for pair in _PAIRS if (sum(pair) % 5 == 0) == held_out])
    test = f"f({a}, {b}) == {value(wanted, a, b)}"
    messages = _said(("system", SYSTEM), ("user", f"{program(broken)}{test}"))
    new = wanted
    if choose.random() >= LOOKS:
        new = choose.choice([each for each in OPERATORS if each != broken])
    says = block(edit(broken, new))
    if choose.random() < 0.2:
        messages += _said(("assistant", says), ("user", "exit 0"))
        says = block(SUBMIT)
    elif choose.random() < WRONG_FORM:
        says = edit(broken, new)
    hidden = choose.sample([pair for pair in _PAIRS if pair != (a, b)], 3)
    return {
        "problem": messages,
        "answer": str(value(wanted, a, b)),
        "solution": says,
        "task": f"{program(broken)}{test}",
        "program": program(broken),
        "hidden": [[x, y, value(wanted, x, y)] for x, y in hidden],
    }


async def agent(client: Any, problem: Any) -> float:
    """Runs mini-swe-agent on a task: 1 if the policy submits a program that passes the hidden tests."""
    # Here, because imports in several threads at once may find half of a module.
    mini, litellm = mini_swe_agent()
    task, url = problem.extra, str(client.base_url)
    loop = asyncio.get_running_loop()
    # A thread for each: most of them wait for the policy.
    left = await loop.run_in_executor(
        _threads(512), repair, mini, litellm, task, url, client.api_key
    )
    # One at a time: a sandbox limits the time on the clock, too.
    return float(await loop.run_in_executor(_threads(1), passes, left, task["hidden"]))


@functools.cache
def mini_swe_agent() -> tuple[Any, Any]:
    """The modules minisweagent and litellm. Importing them takes seconds, so a process does it once."""
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    # What the policy refuses once it refuses again.
    os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
    # No look on the network for what models cost.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    names = (
        "",
        ".agents.default",
        ".environments.extra.bubblewrap",
        ".models.litellm_textbased_model",
    )
    mini, *_ = (package(f"minisweagent{name}", "mini-swe-agent>=2.4,<3") for name in names)
    litellm = package("litellm", "mini-swe-agent>=2.4,<3")
    # It prints hints on models that it has no price for.
    litellm.suppress_debug_info = True
    # It takes a sandbox that is not there for a command that has failed.
    sandbox = mini.environments.extra.bubblewrap.BubblewrapEnvironment(**_ENVIRONMENT)
    if (said := sandbox.execute({"command": "echo ready"}))["output"] != "ready\n":
        raise UserError(
            f"commands of the policy run in bubblewrap, which does not work here: {said}; install bwrap and "
            "prlimit (apt install bubblewrap util-linux), on a machine that allows user namespaces"
        )
    return mini, litellm


def repair(mini: Any, litellm: Any, task: Mapping[str, Any], url: str, key: str) -> str:
    """Has mini-swe-agent repair a program; returns what was submitted, "" for nothing."""
    workspace = mini.environments.extra.bubblewrap.BubblewrapEnvironment(**_ENVIRONMENT)
    (workspace.working_dir / "f.py").write_text(task["program"])
    policy = mini.models.litellm_textbased_model.LitellmTextbasedModel(
        model_kwargs={"api_base": url, "api_key": key}, **_MODEL
    )
    ended = {}
    # No room for another turn.
    with contextlib.suppress(litellm.ContextWindowExceededError):
        ended = mini.agents.default.DefaultAgent(policy, workspace, **_AGENT).run(task["task"])
    if ended.get("exit_status") != "Submitted":
        return ""
    # Read in the sandbox: the model may have put a link in its place.
    left = ""
    with contextlib.suppress(mini.exceptions.Submitted):
        left = workspace.execute({"command": "head -c 1000 f.py"})["output"]
    return left


def passes(source: str, tests: Sequence[Sequence[int]]) -> bool:
    """Whether a program's f(a, b) returns what the tests say, in a sandbox that does not know it."""
    calls = [list(test[:2]) for test in tests]
    return bool(source) and _returned(source, str(calls)) == [test[2] for test in tests]


@functools.lru_cache(4096)
def _returned(source: str, calls: str) -> Any:
    done = _sandbox().run(f"{source}\nprint([f(*each) for each in {calls}])", b"", _LIMITS)
    try:
        return ast.literal_eval(done.stdout.decode())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


@functools.cache
def _sandbox():
    return choose_sandbox("auto")


@functools.cache
def _threads(count: int) -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(count)


def _said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


# Numbers on which no two operators agree.
_PAIRS = [
    (a, b)
    for a in range(20, 60)
    for b in range(2, 10)
    if len({value(each, a, b) for each in OPERATORS}) == len(OPERATORS)
]
