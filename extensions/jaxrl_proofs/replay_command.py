"""Makes a step of a run again, from the newest checkpoint before it, and says whether it is equal.

    jaxrl replay runs/dapo_tiny/seed0 --step 17
    jaxrl replay runs/dapo_tiny/seed0 --step 17 --config.mesh.simulated_devices=4 --config.mesh.train=1-1-4
    jaxrl replay runs/dapo_tiny/seed0 --step 11 --sample 3

Steps from the checkpoint to this one are made again and compared: metrics, samples where the run kept them,
and weights if the run has a checkpoint of the step. Settings come from its config.txt. The run is only read.
Equal gives status 0; otherwise the first difference is named, the new run is kept, and the status is 1. On
another mesh or machine numbers round differently, and tokens follow in time; on the same ones all are equal.
A run of several processes is made again in one, with as many simulated devices; one whose sampler ran free
repeats its schedule from the start.

`--sample` makes one of the kept samples of the step again, alone, with the weights before the step.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.commands.run_commands import prepared
from jaxrl.config.command_line import load_config, take_overrides
from jaxrl.config.config_tree import to_config_dict
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.run_folder import CONTENT, RunFolder, parse_config
from jaxrl.trainer import program
from jaxrl.trainer.identity import contents_of, made_with, run_settings
from jaxrl.trainer.open_settings import resolved
from jaxrl_proofs.diff_command import changed, told
from jaxrl_proofs.parting import compared
from jaxrl_proofs.sample_again import drawn_again, kept_sample
from jaxrl_proofs.stored_run import StoredRun


def main(argv: Sequence[str]) -> int:
    """Replays a step; returns 0 if it is equal, else 1."""
    name, *arguments = argv
    overrides, rest = take_overrides(arguments, Config)
    parser = command_parser(name, __doc__)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=int, required=True, help="the step to make again")
    parser.add_argument(
        "--sample",
        type=int,
        help="make only this one of the step's kept samples again, counted from 0",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="new folder for the run made again (default: temporary)"
    )
    args = parser.parse_args(rest)
    run = StoredRun(RunFolder(args.run.absolute()))
    check_step(run, args.step)
    here, start = _in_its_folder(run), checkpoint_before(run, args.step)
    kept = None if args.sample is None else kept_sample(run, here, args.step, args.sample, start)
    out = (args.out or pathlib.Path(tempfile.mkdtemp(prefix="jaxrl_replay_"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; a step is made again in a new folder")
    config = replayed_config(run, args.step, out, overrides)
    copy_start(run, here, config, start)
    begins = f"the checkpoint of step {start}" if start else "the start"
    print(f"step {args.step} of {run.folder}, from {begins}; in {config.run_folder}")
    config = prepared(config)
    config = resolved(config, jax.devices(), kind=program.training_of(config).kind)
    # Before the training, which may refuse what has changed.
    texts = parse_config(run_settings(here, contents_of(here) | made_with()))
    for line in changed(run.texts, texts):
        print(line)
    if kept is not None:
        line, equal = drawn_again(kept, config, args.step, start)
        print(line)
    elif status := program.train(config):
        return status
    else:
        equal = _compare(run, StoredRun(config.run_folder), start, args.step)
    if not equal:
        print(f"the run made again is kept in {config.run_folder}")
    elif args.out is None:
        shutil.rmtree(out)
    return int(not equal)


def _compare(run: StoredRun, again: StoredRun, start: int, step: int) -> bool:
    """Prints how the steps after `start` differ; returns whether they are equal."""
    if step not in again.rows("rl"):
        raise UserError(
            f"{again.folder.rl.metrics} has lost the row of step {step}; replay it again"
        )
    # Beside a sampler that runs free, an evaluation at the end has other weights than one on the way.
    apart = ("val-",) if _repeats(run) else ()
    found = compared(run, again, steps=range(start + 1, step + 1), ignored=apart)
    weights = list(weights_apart(run, again, step))
    print(*told(found), *weights, sep="\n")
    return found.parting is None and not any("differ" in line for line in weights)


def check_step(run: StoredRun, step: int) -> None:
    """Raises UserError if the run has no row of the step, or goes by the clock."""
    rows = run.rows("rl") if run.texts else {}
    if step < 1 or step not in rows:
        last = max(rows, default=0)
        what = f"the steps 1 to {last}" if last else "no step of reinforcement learning to repeat"
        raise UserError(f"--step {step}: {run.folder} has {what}")
    rollout = run.config.rollout
    if rollout.agent and rollout.partial and run.folder.rl.schedule.exists():
        raise UserError(
            f"agents of {run.folder} go on while the step learns (rollout.max_staleness with a pool of its "
            "own for sampling), and nothing repeats when they ask; compare two such runs by jaxrl diff"
        )


def checkpoint_before(run: StoredRun, step: int) -> int:
    """The newest intact checkpoint before a step; 0 if there is none, or if a schedule is repeated whole."""
    if _repeats(run):
        return 0
    stored = StoredCheckpoints(run.folder.rl.checkpoints.path)
    earlier = (each for each in reversed(stored.steps) if each < step)
    return next((each for each in earlier if stored.fault(each) is None), 0)


def _repeats(run: StoredRun) -> bool:
    """Whether the sampler ran free, so that its schedule is needed from the first version of the weights."""
    return run.folder.rl.schedule.exists() and not run.config.rollout.agent


def _in_its_folder(run: StoredRun) -> Config:
    """The config of a run, wherever its folder has been moved."""
    config = run.config
    output, name = run.folder.path.parents[1], run.folder.path.parent.name
    if run.folder.path.name != f"seed{config.seed}":
        raise UserError(
            f"{run.folder} holds a run with seed {config.seed}; name its folder seed{config.seed}, as it was"
        )
    return dataclasses.replace(
        config, name=name, run=dataclasses.replace(config.run, output=str(output))
    )


def replayed_config(
    run: StoredRun, step: int, out: pathlib.Path, overrides: Mapping[str, str]
) -> Config:
    """The config that makes the steps up to `step` again, below `out`."""
    config = _in_its_folder(run)
    every = config.evaluation.every
    # An evaluation changes no weights, and that of the step itself is in its row. Beside a sampler that runs
    # free it stays where it was.
    evaluates = _repeats(run) or (every > 0 and step % every == 0)
    changes: dict[str, Any] = {
        "run": dataclasses.replace(
            config.run,
            output=str(out),
            num_steps=step,
            rollouts_every=1,
            save_every=0,
            loggers=(),
            resume="accept_other_settings",
        ),
        "evaluation": dataclasses.replace(config.evaluation, every=every if evaluates else 0),
    }
    if config.hosts.num_processes > 1:
        changes["hosts"] = HostsConfig()
        count, _, kind = run.texts.get(f"{CONTENT}devices", "'0 none'").strip("'").partition(" ")
        if kind == "cpu":
            changes["mesh"] = dataclasses.replace(config.mesh, simulated_devices=int(count))
    if run.folder.rl.schedule.exists():
        schedule = config.rollout.schedule or str(run.folder)
        changes["rollout"] = dataclasses.replace(config.rollout, schedule=schedule)
    config = dataclasses.replace(config, **changes)
    return load_config(Config, to_config_dict(config), overrides)


def copy_start(run: StoredRun, here: Config, config: Config, start: int) -> None:
    """Puts what a run resumes from into the folder of the new run: a checkpoint, or the SFT stage."""
    before, now = run.folder.rl, config.run_folder.rl
    if start:
        for old, new in (
            (before.checkpoints.step(start), now.checkpoints.step(start)),
            (before.checkpoints.manifest(start), now.checkpoints.manifest(start)),
        ):
            _linked(old, new)
        # Its later rows go when the run resumes.
        shutil.copyfile(before.metrics, now.metrics)
    elif here.sft_folder.path.is_dir() and here.sft.num_steps:
        shutil.copytree(here.sft_folder.path, config.sft_folder.path)
        settings = here.sft_folder.run.config
        if settings.exists() and here.sft.run:
            shutil.copyfile(settings, config.sft_folder.run.config)


def _linked(old: pathlib.Path, new: pathlib.Path) -> None:
    # Files of a checkpoint are never changed, and may be large.
    new.parent.mkdir(parents=True, exist_ok=True)
    if old.is_dir():
        shutil.copytree(old, new, copy_function=_link)
    else:
        shutil.copyfile(old, new)


def _link(old: str, new: str) -> None:
    try:
        os.link(old, new)
    except OSError:  # another disk
        shutil.copy2(old, new)


def _arrays(directory: Any) -> dict[str, np.ndarray]:
    """The arrays of a role's checkpoint by their paths."""
    tree = ocp.PyTreeCheckpointHandler().metadata(directory).tree
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    with ocp.PyTreeCheckpointer() as reader:
        found = jax.tree.leaves_with_path(reader.restore(directory, restore_args=kinds))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def weights_apart(before: StoredRun, now: StoredRun, step: int) -> Iterator[str]:
    """A line for each role on its state after a step, if both runs have a checkpoint of it."""
    folders = [run.folder.rl.checkpoints.step(step) for run in (before, now)]
    if not all(folder.is_dir() for folder in folders):
        return
    for role in sorted(path.name for path in folders[0].iterdir() if path.is_dir()):
        if role == "record":
            continue
        old, new = (_arrays(folder / role) for folder in folders)
        gaps = {name: _gap(old.get(name), new.get(name)) for name in old | new}
        apart = {name: gap for name, gap in gaps.items() if gap != 0}
        if not apart:
            yield f"{role} after step {step}: {len(old)} arrays are equal"
            continue
        largest = max(apart, key=lambda name: apart[name])
        yield (
            f"{role} after step {step}: {len(apart)} of {len(gaps)} arrays differ, most {largest}, by "
            f"{apart[largest]:.3g}"
        )


def _gap(old: np.ndarray | None, new: np.ndarray | None) -> float:
    """The largest difference of two arrays; infinite if one is missing or has another shape."""
    if old is None or new is None or old.shape != new.shape:
        return np.inf
    return float(np.abs(np.subtract(old, new, dtype=np.float64)).max(initial=0))
