"""What a run survives: killed at random moments, and every file of its folder damaged in turn.

    python benchmarks/faults.py --record benchmarks/results/2026-11-25-faults.md    # both of these
    python benchmarks/faults.py kill --rounds 8
    python benchmarks/faults.py damage
    python benchmarks/faults.py --hosts 4 [--rounds 20] [--cut]

All train DAPO on a task that a two-layer model learns in seconds (repeat a digit).

`kill` ends the run with SIGKILL and starts the same command again, until it is done, with one checkpoint to
keep; metrics.jsonl must then be that of a run that nobody disturbed, to the last bit, clocks aside. `damage`
cuts, empties, flips a bit of, or removes each file of a run's folder, and asks for one more step: the run
must go on to the same numbers from an intact checkpoint, or refuse in one line with status 2 and change
nothing. Files of metrics are also left without their last row, or with a row twice, and the command of the
finished run is given as well. Anything else is counted as wrong, and the status is then 1.

`--hosts` starts the run in as many processes of two devices, one to learn and one to sample. One of them,
each in turn, kills itself with SIGKILL at a moment of `MOMENTS`, each in turn. All others must end within
60 s with status 75 and name it, and the same command goes on. At last rows are those of an undisturbed run.
With `--cut` each process has a network namespace of its own, and is not killed: its network is cut at that
moment, so that nothing arrives from it or at it any more. It has to end by itself, too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import io
import itertools
import json
import math
import os
import pathlib
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import jax

from jaxrl import cli
from jaxrl.config import command_line
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_TRY_AGAIN, exit_status
from jaxrl.mesh import hosts
from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.tracking.stage_checkpoints import StageCheckpoints
from jaxrl.trainer import program

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 24
SETTINGS = {
    "model.vocab_size": 288,
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.d_ff": 64,
    "model.head_dim": 8,
    "data.max_prompt_tokens": 16,
    "sft.num_steps": 40,
    "sft.save_every": 10,
    "sft.examples_per_step": 16,
    "sft.optim.lr": 1e-2,
    "rollout.num_prompts": 8,
    "rollout.num_samples": 4,
    "rollout.generation_prompts": 16,
    "rollout.max_generation_batches": 100,
    "rollout.max_response_tokens": 8,
    "rollout.slots": 32,
    "rollout.prefill_prompts": 8,
    "rollout.tokens_per_dispatch": 4,
    "reward.overlong_buffer_tokens": 2,
    "train.rows": 4,
    "train.row_tokens": 48,
    "evaluation.every": 4,
    "evaluation.num_samples": 2,
    "run.save_every": 2,
}


def write_problems(folder: pathlib.Path) -> dict[str, object]:
    """Files of problems, after a running number that says nothing; returns the settings that name them."""
    settings: dict[str, object] = {}
    for name, numbers in (("train", range(100, 400)), ("evaluation", range(400, 424))):
        path = folder / f"{name}.jsonl"
        rows = [
            {
                "problem": f"{n} repeat {n * 7 % 10}",
                "answer": n * 7 % 10,
                "solution": f"Answer: {n * 7 % 10}",
            }
            for n in numbers
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings |= {f"data.{name}.path": path, f"data.{name}.source": "repeat"}
        settings |= {f"data.{name}.size": 0}
    return settings


class Run:
    """A run's command, in an output folder of its own."""

    def __init__(self, work: pathlib.Path, name: str, **settings: object):
        self.folder = work / name / "dapo_tiny" / "seed0"
        self._settings = SETTINGS | settings | {"run.output": work / name}

    def arguments(self, steps: int = STEPS) -> list[str]:
        """Of launch/train.py."""
        settings = self._settings | {"run.num_steps": steps}
        given = [f"--config.{name}={value}" for name, value in settings.items()]
        return ["--config", str(ROOT / "configs/dapo_tiny.py"), *given]

    def start(self, cache: pathlib.Path, *, fills_cache: bool = False) -> subprocess.Popen:
        """The command in a process of its own. One that may be killed does not write to the cache."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0" if fills_cache else "1e9",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, str(ROOT / "launch/train.py"), *self.arguments()]
        log = (self.folder.parents[1]).with_suffix(".log").open("a")
        with log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def rows(self) -> dict[str, list[dict]]:
        """The metrics of each stage, clocks aside."""
        found = {}
        for stage in ("sft", "rl"):
            path = self.folder / stage / "metrics.jsonl"
            rows = read_metrics(path) if path.exists() else []
            found[stage] = [without_timings(row) for row in rows]
        return found


# Killing


def kill(args: argparse.Namespace, work: pathlib.Path) -> tuple[str, bool]:
    """Markdown about runs that were killed, and whether all went well."""
    settings = write_problems(work) | {"run.keep_checkpoints": 1}
    whole = Run(work, "whole", **settings)
    for fills_cache in (True, False):
        # The second time is how long it takes with its programs at hand, as the others do.
        shutil.rmtree(whole.folder, ignore_errors=True)
        started = time.monotonic()
        status = whole.start(work / "cache", fills_cache=fills_cache).wait()
        seconds = time.monotonic() - started
        if status:
            raise SystemExit(f"the undisturbed run failed: see {work}/whole.log")
    expected = whole.rows()
    rng = random.Random(args.seed)
    lines = ["| run | killed at (SFT, DAPO) steps | same rows |", "|---|---|---|"]
    kills, wrong, number = 0, 0, 0
    while kills < args.rounds:
        run = Run(work, f"killed{number}", **settings)
        moments = []
        while True:
            process = run.start(work / "cache")
            if kills == args.rounds or not _dies(run, process, expected, rng):
                status = process.wait()
                break
            kills += 1
            wrong += not _goes_on(run)
            at = (rows[-1]["step"] if rows else "-" for rows in run.rows().values())
            moments.append(f"({', '.join(map(str, at))})")
        same = status == 0 and run.rows() == expected
        wrong += not same
        lines.append(f"| {number} | {', '.join(moments) or 'never'} | {'yes' if same else 'NO'} |")
        print(lines[-1], flush=True)
        number += 1
    runs = f"{number} runs of {STEPS} steps, {seconds:.0f} s each undisturbed"
    summary = f"{kills} kills in {runs}; {wrong} wrong."
    return "\n".join(["## Killed at random moments", "", summary, "", *lines]), not wrong


def _dies(
    run: Run, process: subprocess.Popen, expected: dict[str, list[dict]], rng: random.Random
) -> bool:
    """Kills the process a random moment after a random row that is to come; False if it is done first.

    With a moment drawn by the clock most kills would meet imports and compilers.
    """
    have, most = (sum(map(len, rows.values())) for rows in (run.rows(), expected))
    if have == most:
        return False
    target = rng.randint(have, most)
    while process.poll() is None:
        if sum(map(len, run.rows().values())) >= target:
            # Before the first row of its own a process is a long time at work.
            time.sleep(rng.uniform(0, 10 if target == have else 1))
            process.kill()
            return process.wait() == -signal.SIGKILL
        time.sleep(0.01)
    return False


def _goes_on(run: Run) -> bool:
    """Wherever there are rows there is an intact checkpoint."""
    return all(
        StoredCheckpoints(run.folder / stage / "checkpoints").newest_intact() is not None
        for stage, rows in run.rows().items()
        if rows
    )


# Lost hosts

# Where a process dies: the phase or function that it enters, and for which time since it was started.
MOMENTS = {
    "start": ("hosts.start", 1),
    "compiling": ("generate", 1),
    "sampling": ("generate", 2),
    "moving": ("update_weights", 2),
    "learning": ("update", 2),
    "saving": ("start_saving", 2),
    "sealing": ("commit_step", 2),
}
POOLS_RECIPE = """
from jaxrl.config.command_line import load_recipe

def get_config():
    config = load_recipe({recipe!r})
    with config.unlocked():
        config.placement = {{
            "learn": {{"roles": ("actor",), "train": "1-1-{n}", "generate": "", "fsdp": {n}}},
            "sample": {{"roles": ("rollout",), "train": "1-1-{n}", "generate": "", "fsdp": 1}},
        }}
    return config
"""


class Network:
    """Hosts with a network namespace and a name each, joined by a bridge. A context manager, for root."""

    def __init__(self, num_hosts: int, work: pathlib.Path):
        self._hosts = range(num_hosts)
        self._names = work / "hosts"
        lines = [f"{self.address(i)} {self._name(i)}" for i in self._hosts]
        self._names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def __enter__(self) -> Network:
        self._ip("link add faults type bridge")
        self._ip("link set faults up")
        for i in self._hosts:
            name = self._name(i)
            self._ip(f"netns add {name}")
            self._ip(f"link add {name} type veth peer name eth0 netns {name}")
            self._ip(f"link set {name} master faults up")
            self._ip(f"-n {name} link set lo up")
            self._ip(f"-n {name} link set eth0 up")
            self._ip(f"-n {name} addr add {self.address(i)}/24 dev eth0")
        return self

    def __exit__(self, *exception: object) -> None:
        for i in self._hosts:
            # A namespace goes on while sockets have something to send, and its link with it.
            subprocess.run(["ip", "link", "del", self._name(i)], check=False)
            subprocess.run(["ip", "netns", "del", self._name(i)], check=False)
        subprocess.run(["ip", "link", "del", "faults"], check=False)

    def address(self, host: int) -> str:
        return f"10.97.0.{host + 1}"

    def on(self, host: int) -> list[str]:
        """What a command begins with that runs on a host, in one process."""
        # The mount is that of `ip netns exec`, which has a mount namespace of its own.
        script = (
            f'hostname {self._name(host)} && mount --bind {self._names} /etc/hosts && exec "$@"'
        )
        enter = ["ip", "netns", "exec", self._name(host), "unshare", "--uts"]
        return [*enter, "sh", "-c", script, "sh"]

    def cut(self, host: int) -> None:
        """Neither end notices: packets are lost, as behind a broken switch."""
        self._ip(f"link set {self._name(host)} nomaster")

    def join(self, host: int) -> None:
        self._ip(f"link set {self._name(host)} master faults")

    def _name(self, host: int) -> str:
        return f"faults{host}"

    def _ip(self, arguments: str) -> None:
        subprocess.run(["ip", *arguments.split()], check=True)


class HostsRun(Run):
    """The command in several processes, each on a host of `network` if there is one."""

    def __init__(
        self,
        work: pathlib.Path,
        name: str,
        hosts: int,
        steps: int,
        network: Network | None,
        **settings: object,
    ):
        super().__init__(work, name, **settings)
        self.steps, self.network = steps, network
        self.hosts, self.logs = hosts, work / f"{name}.logs"
        self.recipe = work / "pools.py"
        recipe = str(ROOT / "configs/dapo_tiny.py")
        self.recipe.write_text(POOLS_RECIPE.format(recipe=recipe, n=hosts))

    def start_all(
        self, cache: pathlib.Path, victim: int | None = None, moment: str = "", delay_s: float = 0.0
    ) -> list[subprocess.Popen]:
        """Starts all processes; one of them dies a moment after it has entered where `MOMENTS` says.

        With a network it lives, and leaves the file `self.cut`.
        """
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir()
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            first = self.network.address(0) if self.network else "localhost"
            address = f"{first}:{probe.getsockname()[1]}"
        processes = []
        for number in range(self.hosts):
            file = self.cut if self.network else ""
            dies = [f"{moment},{delay_s},{file}"] if number == victim else [""]
            arguments = ["--config", str(self.recipe), *self.arguments(self.steps)[2:]]
            arguments += [f"--config.hosts.coordinator={address}"]
            arguments += [f"--config.hosts.num_processes={self.hosts}"]
            arguments += [f"--config.hosts.process_id={number}"]
            environment = os.environ | {
                "PYTHONPATH": str(ROOT),
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                # A program that is at hand is not compiled.
                "JAX_ENABLE_COMPILATION_CACHE": str(moment != "compiling").lower(),
            }
            with (self.logs / str(number)).open("w") as log:
                command = [sys.executable, __file__, "process", *dies, *arguments]
                command = [*(self.network.on(number) if self.network else ()), *command]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return processes

    @property
    def cut(self) -> pathlib.Path:
        return self.logs / "cut"

    def lose(self, victim: int, processes: Sequence[subprocess.Popen]) -> None:
        """Waits until the process is dead, or until its network is to be cut, and cuts it."""
        lost = processes[victim]
        while lost.poll() is None and not self.cut.exists():
            time.sleep(0.02)
        if lost.poll() != (None if self.network else -signal.SIGKILL):
            raise SystemExit(f"process {victim} did not come to its moment: {_last_lines(self)}")
        if self.network:
            self.network.cut(victim)


def lose_hosts(args: argparse.Namespace, work: pathlib.Path) -> tuple[str, bool]:
    """Markdown about runs of which processes were killed or cut off, and whether all went well."""
    with Network(args.hosts, work) if args.cut else contextlib.nullcontext() as network:
        return _lose_hosts(args, work, network)


def _lose_hosts(
    args: argparse.Namespace, work: pathlib.Path, network: Network | None
) -> tuple[str, bool]:
    cache = args.cache or work / "cache"
    # A start makes at most one step before it dies.
    steps = args.rounds + 2
    settings = write_problems(work) | {
        "run.save_every": 1,
        "evaluation.every": 8,
        "mesh.simulated_devices": 2 * args.hosts,
        "rollout.slots": 8 * args.hosts,
        "rollout.prefill_prompts": 2 * args.hosts,
        "train.rows": args.hosts,
    }
    whole = HostsRun(work, "whole", args.hosts, steps, network, **settings)
    started_s = time.monotonic()
    if any(process.wait() for process in whole.start_all(cache)):
        raise SystemExit(f"the undisturbed run failed: {_last_lines(whole)}")
    seconds = time.monotonic() - started_s
    print(f"undisturbed: {seconds:.0f} s", flush=True)
    run = HostsRun(work, "lost", args.hosts, steps, network, **settings)
    rng = random.Random(args.seed)
    head = ["cut off" if network else "killed", "process", "last row"]
    head += ["the others end after s, with", "named", *(["itself"] if network else [])]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    wrong = 0
    for kills in range(args.rounds):
        moment = list(MOMENTS)[kills % len(MOMENTS)]
        # Other processes at a moment in each turn of all moments.
        victim = (kills + kills // len(MOMENTS)) % args.hosts
        processes = run.start_all(cache, victim, moment, rng.uniform(0, 0.3))
        run.lose(victim, processes)
        lost_s = time.monotonic()
        ended_s = dict.fromkeys(range(args.hosts), math.inf)
        while math.inf in ended_s.values() and time.monotonic() - lost_s < 120:
            time.sleep(0.1)
            for number, process in enumerate(processes):
                if process.poll() is not None:
                    ended_s[number] = min(ended_s[number], time.monotonic() - lost_s)
        for process in processes:
            process.kill()
        itself = f"{ended_s.pop(victim):.1f}, {processes[victim].wait()}"
        last_s = max(ended_s.values())
        others = [process for number, process in enumerate(processes) if number != victim]
        statuses = sorted({process.wait() for process in others})
        texts = [(run.logs / str(i)).read_text() for i in range(args.hosts) if i != victim]
        named = sum(f"error: process {victim} (host" in text for text in texts)
        good = statuses == [EXIT_TRY_AGAIN] and named == len(others) and last_s <= 60
        if network:
            network.join(victim)
            good &= itself.endswith(f" {EXIT_TRY_AGAIN}")
        wrong += not good
        rows = [f"{stage} {found[-1]['step']}" for stage, found in run.rows().items() if found]
        status = ", ".join(map(str, statuses))
        row = (moment, victim, (rows or ["none"])[-1], f"{last_s:.1f}, {status}")
        row += (f"{named} of {len(others)}", *([itself] if network else []))
        lines.append(f"| {' | '.join(map(str, row))} |")
        print(lines[-1] + ("" if good else f" WRONG: {_last_lines(run)}"), flush=True)
    statuses = {process.wait() for process in run.start_all(cache)}
    same = statuses == {0} and run.rows() == whole.rows()
    summary = (
        f"{args.rounds} {'cuts' if network else 'kills'} in one run of {run.steps} steps in {args.hosts} "
        f"processes, {seconds:.0f} s undisturbed; {wrong} answered wrong. Rows of the whole run: "
        f"{'the same' if same else 'OTHERS'}."
    )
    return "\n".join(["## Lost hosts", "", summary, "", *lines]), same and not wrong


def _last_lines(run: HostsRun) -> str:
    return "; ".join(path.read_text()[-300:] for path in sorted(run.logs.iterdir()))


def process_that_dies(moment: str, arguments: Sequence[str]) -> int:
    """`jaxrl train`, which kills itself, or leaves a file if it is to be cut off.

    `moment` is "NAME,SECONDS,FILE" with a name of `MOMENTS`, or "" to live.
    """
    if not moment:
        return cli.run("train", ["train", *arguments])
    name, delay_s, file = moment.split(",")
    wanted, times = MOMENTS[name]
    entered = itertools.count(1)

    def end() -> None:
        if file:
            pathlib.Path(file).touch()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def enter(name: str) -> None:
        if name.rpartition(", ")[-1] == wanted and next(entered) == times:
            threading.Timer(float(delay_s), end).start()

    def watched(function: Callable, name: str) -> Callable:
        def call(*args, **options):
            enter(name or args[0])
            return function(*args, **options)

        return call

    hosts.enter_phase = watched(hosts.enter_phase, "")
    start = hosts.start

    def started(config: hosts.HostsConfig) -> None:
        start(config)
        enter("hosts.start")

    hosts.start = started
    for method in ("start_saving", "commit_step"):
        setattr(StageCheckpoints, method, watched(getattr(StageCheckpoints, method), method))
    return cli.run("train", ["train", *arguments])


# Damage


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _emptied(content: bytes) -> bytes:
    return b""


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def _last_row_lost(content: bytes) -> bytes:
    return b"".join(content.splitlines(keepends=True)[:-1])


def _last_row_twice(content: bytes) -> bytes:
    return content + content.splitlines(keepends=True)[-1]


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "cut": _cut,
    "emptied": _emptied,
    "a bit flipped": _flipped,
    "removed": None,
}
OF_ROWS: dict[str, Callable[[bytes], bytes] | None] = {
    "the last row lost": _last_row_lost,
    "the last row twice": _last_row_twice,
}


def damage(args: argparse.Namespace, work: pathlib.Path) -> tuple[str, bool]:
    """Markdown about folders that were damaged, and whether all went well."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(work / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Which steps are evaluated else depends on which is the last.
    problems = write_problems(work) | {"evaluation.every": 1}
    before, after = Run(work, "before", **problems), Run(work, "after", **problems)
    for run, last in ((before, args.steps), (after, args.steps + 1)):
        status, errors = _train(run, last)
        if status:
            raise SystemExit(f"the undisturbed run failed: {errors}")
        if run is before:
            shutil.copytree(before.folder, after.folder)
    files = sorted(p.relative_to(before.folder) for p in before.folder.rglob("*") if p.is_file())
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong = []
    for number, file in enumerate(files):
        # One after the other of them, or each on every file.
        damages, last_steps = DAMAGES, [args.steps + 1]
        if file.name == "metrics.jsonl":
            damages, last_steps = DAMAGES | OF_ROWS, [args.steps, args.steps + 1]
        elif not args.each:
            name = list(DAMAGES)[number % len(DAMAGES)]
            damages = {name: DAMAGES[name]}
        for name, last in itertools.product(damages, last_steps):
            run = Run(work, "damaged", **problems)
            shutil.rmtree(work / "damaged", ignore_errors=True)
            shutil.copytree(before.folder, run.folder)
            _damage(run.folder / file, damages[name])
            outcome = _outcome(run, last, after if last > args.steps else before)
            outcomes[_kind(file)][outcome] += 1
            if outcome.startswith("WRONG"):
                wrong.append(f"* `{file}` {name}: {outcome}")
            print(f"{number + 1} of {len(files)}: {file} {name}, to {last}: {outcome}", flush=True)
    lines = ["| file | went on | refused in one line | wrong |", "|---|---|---|---|"]
    for kind, counts in outcomes.items():
        bad = sum(count for name, count in counts.items() if name.startswith("WRONG"))
        lines.append(f"| {kind} | {counts['went on']} | {counts['refused']} | {bad} |")
    total = sum(sum(counts.values()) for counts in outcomes.values())
    damages = f"{total} damages ({', '.join(DAMAGES | OF_ROWS)}{'' if args.each else ', in turn'})"
    summary = f"{len(files)} files, {damages}; {len(wrong)} wrong."
    text = "\n".join(["## Every file damaged", "", summary, "", *lines, "", *wrong])
    return text.rstrip(), not wrong


def _train(run: Run, steps: int) -> tuple[int, str]:
    """Status and stderr of the command, in this process."""
    errors = io.StringIO()

    def main(config: Config) -> int:
        """Trains."""
        return program.train(config)

    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        argv = ["faults", *run.arguments(steps)]
        status = exit_status(lambda: command_line.run(main, Config, argv=argv))
    return status, errors.getvalue()


def _damage(path: pathlib.Path, change: Callable[[bytes], bytes] | None) -> None:
    content = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(content) if content else content)


def _outcome(run: Run, steps: int, expected: Run) -> str:
    before = _contents(run.folder)
    try:
        status, errors = _train(run, steps)
    except Exception as error:  # whatever it is, it is what is looked for
        return f"WRONG: {type(error).__name__}: {error}"[:300]
    if status == 2:
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        if len(lines) != 1:
            return f"WRONG: {errors[:300]!r}"
        same = _contents(run.folder) == before
        return "refused" if same else "WRONG: refused, and changed the folder"
    rows, wanted = run.rows(), expected.rows()
    if status or rows != wanted:
        return f"WRONG: status {status}, {'the same' if rows == wanted else 'other'} rows"
    return "went on"


def _contents(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    """Of every file but the lock, which says who was there last."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path: path.read_bytes() for path in files}


def _kind(file: pathlib.Path) -> str:
    """`rl/checkpoints/24/actor/d/ab12` is one of `rl/checkpoints`."""
    return "/".join(file.parts[:2]) if len(file.parts) > 1 else file.name


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        sys.exit(process_that_dies(sys.argv[2], sys.argv[3:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("kill", "damage"), help="both by default")
    parser.add_argument("--record", type=pathlib.Path, help="Markdown file to add the result to")
    parser.add_argument("--hosts", type=int, help="processes of a run of which each is killed")
    parser.add_argument(
        "--cut", action="store_true", help="--hosts: cut networks, not kill (Linux, as root)"
    )
    parser.add_argument("--rounds", type=int, default=8, help="kill, --hosts: kills in all")
    parser.add_argument(
        "--cache",
        type=pathlib.Path,
        help="--hosts: folder of programs that an earlier call compiled",
    )
    parser.add_argument("--seed", type=int, default=0, help="kill, --hosts: of the moments")
    parser.add_argument("--steps", type=int, default=2, help="damage: of the run that is damaged")
    parser.add_argument("--each", action="store_true", help="damage: every damage on every file")
    args = parser.parse_args()
    all_well = True
    both = [args.part] if args.part else ["kill", "damage"]
    for part in ["hosts"] if args.hosts else both:
        with tempfile.TemporaryDirectory(prefix="faults") as work:
            text, well = PARTS[part](args, pathlib.Path(work))
        print(text, flush=True)
        all_well &= well
        if args.record:
            _add_to(args.record, text)
    sys.exit(not all_well)


PARTS = {"kill": kill, "damage": damage, "hosts": lose_hosts}


def _add_to(record: pathlib.Path, text: str) -> None:
    header = (
        f"# What a run survives, {datetime.date.today()}\n\n{os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, jax {jax.__version__}\n\n"
    )
    known = record.read_text() if record.exists() else header
    record.write_text(f"{known.rstrip()}\n\n{text}\n")


if __name__ == "__main__":
    main()
