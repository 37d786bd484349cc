"""Evaluates a model with the trainer's evaluator.

    jaxrl evaluate --model runs/dapo_tiny/seed0 --n 8
    jaxrl evaluate --model DIR --set aime_2024.jsonl --n 32 --config.evaluation.top_p=0.7
    jaxrl evaluate --model DIR --config dapo_qwen32b
    jaxrl evaluate --model runs/dapo_tiny/seed0 --step 20 --out at20

DIR is a Hugging Face directory, a name on the hub, or the folder of a run, of which the newest intact
checkpoint is evaluated, or that of --step. Settings come from --config, else from the run's folder, else
they are the defaults; --config.NAME=VALUE changes any of them, as in `jaxrl train`. The table goes to stdout,
progress to stderr, answers and metrics to --out. docs/evaluation.md explains the statistics.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl.commands.run_commands import prepared
from jaxrl.config.command_line import load_config, load_recipe, take_overrides
from jaxrl.config.config_tree import format_config, leaf_types, setting_type, to_config_dict
from jaxrl.config.schema import Config
from jaxrl.config.shapes import check_sampling_batches, engine_config, stop_ids_of
from jaxrl.data import model_directory
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.problems import ProblemReader, Problems
from jaxrl.data.prompt_encoding import encode, evaluation_prompts
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.dataflows.rewarding import Grading
from jaxrl.errors import UserError
from jaxrl.files import read_text
from jaxrl.flags import command_parser
from jaxrl.hub.local_paths import local_model
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import dtype_on
from jaxrl.mesh.pools import read_placement, take_devices
from jaxrl.mesh.rules import GENERATE_RULES, lists_layers, shardings, shards_of, with_shardings
from jaxrl.models import lora
from jaxrl.models.decoder import Params, decoder_graph, split_layers
from jaxrl.models.huggingface.weight_loading import check_params, load_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.evaluation_metrics import ALL, EVALUATION_STEP, evaluation_metrics
from jaxrl.rewards.graders import Graders
from jaxrl.rollout.drivers import build_backend, with_agent
from jaxrl.rollout.rollout_config import FROZEN_ROLE, START
from jaxrl.tracking.durable import disk_errors, ensure_writable, write_atomically
from jaxrl.tracking.run_folder import EvaluationFolder, RunFolder
from jaxrl.tracking.run_weights import model_of_run, newest_weights, read_newest_params
from jaxrl.tracking.sample_rows import TokenStrings, sample_rows, to_lines
from jaxrl.trainer.context import meshes_of
from jaxrl.trainer.evaluation import answered
from jaxrl.trainer.findings import check_same_model
from jaxrl.trainer.role_table import check_same_tokens
from jaxrl.trainer.run_rewards import graders_of, truth_faults
from jaxrl.types import Completions, Prompts, Scored

# Limit of a response of a model that is no run, in tokens.
_LONGEST_RESPONSE = 8192
# Groups of a run's settings that its answers depend on. The hosts, for example, are those of this command.
_OF_ANSWERS = ("seed", "mesh", "data", "rollout", "reward", "algorithm", "train", "evaluation")
_PROGRESS_EVERY_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, which starts with the program's name; returns the exit status."""
    program, *arguments = argv
    overrides, arguments = take_overrides(arguments, Config)
    parser = command_parser(program, __doc__)
    parser.add_argument("--model", required=True, help="Hugging Face directory, or folder of a run")
    parser.add_argument("--step", type=int, help="checkpoint of a run (default: the newest)")
    parser.add_argument("--config", help="recipe with the settings of task and sampling")
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="FILE",
        help="problems, as data.evaluation.path: a file, a function or a name on the hub; may be repeated",
    )
    parser.add_argument(
        "--n", type=int, help="number of answers per problem (evaluation.num_samples)"
    )
    parser.add_argument("--out", default="", help="folder of the answers and metrics")
    args = parser.parse_args(arguments)
    # A short name for the setting that changes most.
    if args.n is not None:
        overrides["evaluation.num_samples"] = str(args.n)
    config, path, chosen = evaluation_config(args.model, args.config, args.sets, overrides)
    with hosts.watched(config.hosts):
        evaluate(config, path, step=args.step, out=args.out, chosen=chosen)
    return 0


def evaluation_config(
    model: str, recipe: str | None, sets: Sequence[str], overrides: Mapping[str, str]
) -> tuple[Config, pathlib.Path, set[str]]:
    """The settings of an evaluation, the model's path, and the settings that `read_inputs` chooses."""
    path = pathlib.Path(local_model(model))
    tree = settings_of(path, recipe, sets)
    # A model without a recipe takes prompts of any length that its context has room for, in the fast type.
    is_bare = not (recipe or is_run(path))
    chosen = {"data.max_prompt_tokens", "rollout.dtype"} - overrides.keys() if is_bare else set()
    return prepared(load_config(Config, tree, overrides)), path, chosen


def is_run(path: pathlib.Path) -> bool:
    """Whether the model is the folder of a run; UserError if it is neither that nor a directory."""
    model_directory.check_is_directory(path, or_else=", or the folder of a run")
    return model_directory.is_run_folder(path)


def settings_of(path: pathlib.Path, recipe: str | None, sets: Sequence[str] = ()) -> ConfigDict:
    """The settings of an evaluation, before overrides.

    Args:
      path: directory of the model, or folder of a run.
      recipe: recipe, as in `load_recipe`; None takes the run's settings, or the defaults.
      sets: problems, in place of those that the settings name.

    Raises:
      UserError: the recipe or the settings of the run cannot be read.
    """
    run = is_run(path)
    directory = RunFolder(path).model if run else path
    tree: Any  # ml_collections types no entries
    if recipe:
        tree = load_recipe(recipe, known=list(leaf_types(Config))).copy_and_resolve_references()
    else:
        tree = to_config_dict(Config())
        if run:
            _take_saved(tree, RunFolder(path).config)
        else:
            context = model_directory.read_model(directory).context_tokens
            # The context is shared by prompt and response.
            response = min(_LONGEST_RESPONSE, context // 2)
            tree.rollout.max_response_tokens = response
            tree.data.max_prompt_tokens = context - response
            # A problem that is left out would not count.
            tree.data.overlong = "error"
    tree.weights, tree.adapter, tree.tokenizer.path = str(directory), "", str(directory)
    # The shape is that of the files.
    tree.model = ModelConfig()
    # Nothing is trained: one pool of devices, no training problems, no other models.
    tree.placement, tree.data.train, tree.data.sources = {}, SourceConfig(), {}
    tree.sft.num_steps, tree.sft.run, tree.reward.overlong_buffer_tokens = 0, "", 0
    tree.reward.model = tree.reward.judge.model = tree.cost.model = tree.critic.weights = ""
    # Nothing here resolves open settings.
    if tree.rollout.slots == "auto":
        tree.rollout.slots = Config().rollout.slots
    if tree.mesh.layout != "as_given":
        tree.mesh.layout = "as_given"
    if sets:
        first = tree.data.evaluation
        # Grader, template and chat stay those of the settings.
        first.update(options={}, size=0, fields={})
        # A set has the name of its file or function.
        names = [pathlib.Path(text.rpartition(":")[2]).stem for text in sets]
        named = [dict(first) | {"path": p, "source": n} for p, n in zip(sets, names, strict=True)]
        first.update(named[0])
        tree.data.evaluations = {}
        for number, settings in enumerate(named[1:], start=2):
            tree.data.evaluations[f"set{number}"] = settings
    return tree


def _take_saved(tree: ConfigDict, path: pathlib.Path) -> None:
    """Takes the settings of a run from its config.txt, where a dict has a line for each entry."""
    text = read_text(path, absent="name the folder of a run, such as runs/dapo_tiny/seed0")
    for line in text.splitlines():
        name, _, value = line.partition(" = ")
        # A setting of another version is left out.
        if name.split(".")[0] not in _OF_ANSWERS or setting_type(Config, name) is None:
            continue
        node: Any = tree
        *groups, leaf = name.split(".")
        for group in groups:
            if group not in node:
                node[group] = {}
            node = node[group]
        try:
            # inf and nan are no literals of Python.
            is_special = value in ("inf", "-inf", "nan")
            node[leaf] = float(value) if is_special else ast.literal_eval(value)
        except ValueError as error:
            raise UserError(
                f"{path}: {line!r} is no setting; restore the file from a copy"
            ) from error


@dataclasses.dataclass(frozen=True)
class EvaluationInputs:
    """What an evaluation answers, and with which model. Everything is checked; no weights are read yet.

    Attributes:
      config: settings of task and sampling, none of them open.
      path: directory of the model, or folder of a run.
      step: checkpoint of the run; None for the newest.
      model, mesh, tokenizer: shape of the model, its devices, and its tokenizer.
      problems: the problems, as evaluation sources.
      prompts: their prompts; `ids_N` are row numbers over all sources together.
      graders: graders of the answers.
      weights: text that identifies the weights.
      settings: text of everything that the answers depend on.
    """

    config: Config
    path: pathlib.Path
    step: int | None
    model: ModelConfig
    mesh: Mesh
    tokenizer: Tokenizer
    problems: Problems
    prompts: Prompts
    graders: Graders
    weights: str
    settings: str

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return stop_ids_of(self.config.rollout, self.tokenizer)


def read_inputs(
    config: Config,
    path: pathlib.Path,
    *,
    chosen: Set[str] = frozenset(),
    step: int | None = None,
) -> EvaluationInputs:
    """Reads problems and settings of an evaluation. Collective.

    Args:
      config: settings of task and sampling; its weights are the directory of the model's files.
      path: directory of the model, or folder of a run.
      chosen: settings to replace: "data.max_prompt_tokens" by the longest prompt, "rollout.dtype" by the fast
        type of the devices.
      step: checkpoint of a run; None takes the newest.

    Raises:
      UserError: something is missing, damaged or does not fit.
    """
    found = model_directory.read_model(pathlib.Path(config.weights))
    tokenizer, model = found.tokenizer, found.model
    for role, name in config.rollout.frozen_roles.items():
        if name == START:
            raise UserError(
                f"{FROZEN_ROLE}{role} {START!r} is the weights that a run starts from, which its folder need "
                f"not have; name a directory or a run, --config.{FROZEN_ROLE}{role}=DIR"
            )
        where = pathlib.Path(name)
        files = RunFolder(where).model if is_run(where) else where
        check_same_model(name, model, model_directory.read_model(files).model)
        check_same_tokens(FROZEN_ROLE + role, tokenizer, str(files))
    problems, graders = _problems(config), graders_of(config, config.data.evaluation_sources)
    prompts = evaluation_prompts(encode(problems.evaluation, config.data, tokenizer))
    if not len(prompts):
        raise UserError(
            f"no prompt has at most data.max_prompt_tokens {config.data.max_prompt_tokens} tokens; raise it"
        )
    # Caches are as long as the longest prompt, not as the context.
    if "data.max_prompt_tokens" in chosen:
        longest = max(map(len, prompts.tokens))
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, max_prompt_tokens=longest)
        )
    if config.longest_sequence > found.context_tokens:
        raise UserError(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_response_tokens "
            f"{config.rollout.max_response_tokens} are more than the {found.context_tokens} positions of the "
            "model (max_position_embeddings of its config.json); lower one of them"
        )
    model = model.for_texts_of(config.longest_sequence)
    (pool,) = pools = read_placement({}, config.mesh, ("actor",))
    # Every process has to take part, so several use all of their devices.
    used = pool.num_devices if hosts.num_processes() == 1 else None
    mesh = meshes_of(take_devices(pools, jax.devices()[:used]))["actor"]
    check_sampling_batches(config, mesh)
    if "rollout.dtype" in chosen:
        fast = dataclasses.replace(config.rollout, dtype=dtype_on(mesh, "auto"))
        config = dataclasses.replace(config, rollout=fast)
    weights = _identity(path, model, step)
    # Processes differ in their index.
    settings = format_config(dataclasses.replace(config, hosts=hosts.HostsConfig()))
    settings = f"model = {str(path)!r}\nweights of {weights}\n{settings}"
    hosts.check_same("the evaluation", [settings])
    return EvaluationInputs(
        *(config, path, step, model, mesh, tokenizer),
        *(problems, prompts, graders, weights, settings),
    )


@contextlib.contextmanager
def answering(inputs: EvaluationInputs) -> Iterator[tuple[Callable[[Prompts], Scored], Grading]]:
    """Loads the model. Yields a function that answers and grades prompts, and the grading. Collective."""
    config, path, mesh = inputs.config, inputs.path, inputs.mesh
    options = config.evaluation.sampling(config.rollout.sampling(config.seed), step=EVALUATION_STEP)
    engine = engine_config(
        config,
        inputs.stop_ids,
        prompts_per_batch=config.rollout.num_prompts,
        replicas=shards_of("batch", GENERATE_RULES, mesh),
    )
    decode = inputs.tokenizer.decode_batch
    backend = build_backend(config.rollout.driver, inputs.model, mesh, engine, decode)
    backend = with_agent(backend, config.rollout, inputs.tokenizer)
    _say(f"loading {path} ({inputs.weights})")
    backend.load(load_policy(path, inputs.model, mesh, backend.dtype, inputs.step))
    for name in sorted({*config.rollout.frozen_roles.values()}):
        agents: Any = backend
        agents.freeze(name, load_policy(pathlib.Path(name), inputs.model, mesh, backend.dtype))
    grading = Grading(inputs.graders)

    def answer(prompts: Prompts) -> Scored:
        _say(f"answering {len(prompts)} problems {config.evaluation.num_samples} times")
        progress = _progress(len(prompts), backend.samplers)
        return answered(backend, prompts, options, grading, on_group=progress)

    try:
        yield answer, grading
    finally:
        backend.close()
        inputs.graders.close()


def evaluate(
    config: Config,
    path: pathlib.Path,
    *,
    out: str = "",
    chosen: Set[str] = frozenset(),
    step: int | None = None,
) -> Scored:
    """Evaluates a model and writes the answers. Collective. Args and errors as of `read_inputs`.

    Args:
      out: folder of the results; "" derives one in evaluations/.
    """
    inputs = read_inputs(config, path, chosen=chosen, step=step)
    # Settings and weights name the folder of the results, so that those of other ones are not replaced.
    name = "-".join(path.absolute().parts[-2:] if is_run(path) else path.absolute().parts[-1:])
    crc = zlib.crc32(inputs.settings.encode())
    folder = EvaluationFolder(pathlib.Path(out or f"evaluations/{name}-{crc:08x}"))
    # Before minutes of answering.
    hosts.on_first(lambda: ensure_writable(folder.path))
    with answering(inputs) as (answer, grading):
        scored = answer(inputs.prompts)
    metrics = evaluation_metrics(scored) | grading.take_metrics("val-aux/grader")

    def write() -> None:
        rows = sample_rows(scored, TokenStrings(inputs.tokenizer), stop_ids=inputs.stop_ids)
        with disk_errors(folder.path):
            write_atomically(folder.samples, to_lines(rows))
            results = {"settings": inputs.settings.splitlines(), "metrics": metrics}
            write_atomically(folder.results, json.dumps(results, indent=1).encode())
        print(table_of(scored, metrics), flush=True)
        _say(f"{folder}: {folder.samples.name}, {folder.results.name}; jaxrl browse {folder}")

    hosts.on_first(write)
    return scored


def _problems(config: Config) -> Problems:
    """The evaluation problems of a config, with ground truths that their graders can read."""
    sources = config.data.evaluation_sources
    if not sources:
        raise UserError("there is nothing to answer; name at least one --set FILE")
    readers = ProblemReader(config.data).readers
    read = Problems((), tuple(readers[name]() for name in sources))
    validate = truth_faults((config.reward.grader, config.reward.grader_options), read.settings)
    return Problems((), tuple(source.with_readable_truths(validate) for source in read.evaluation))


def _identity(path: pathlib.Path, model: ModelConfig, step: int | None) -> str:
    """Text that identifies the weights."""
    # Of manifests and times of files: the weights may be too large to read them for this.
    if is_run(path):
        newest = newest_weights(path, step)
        manifest = zlib.crc32(newest.checkpoints.manifest(newest.step).read_bytes())
        return f"{newest.checkpoints.path.parent.name} step {newest.step}, {manifest:08x}"
    if step is not None:
        raise UserError(f"--step {step} is a checkpoint of a run, and {path} is none; leave it out")
    check_params(path, model)
    files = sorted(path.glob("*.safetensors"))
    return f"{max(file.stat().st_mtime_ns for file in files)}, {len(files)} files"


def load_policy(
    path: pathlib.Path, model: ModelConfig, mesh: Mesh, dtype: Any, step: int | None = None
) -> Params:
    """Loads weights in the generation layout, adapters merged.

    Args:
      path: directory of the model, or folder of a run.
      model: shape of the model without adapters.
      mesh: mesh of the weights.
      dtype: data type of the weights.
      step: checkpoint of a run; None takes the newest.

    Raises:
      UserError: a file is damaged, or a run's checkpoint does not fit its model.
    """
    where = model_directory.generation_shardings(model, mesh)
    if not is_run(path):
        return load_params(path, model, where, dtype=dtype)
    trained = model_of_run(RunFolder(path).model)
    _, shapes, axes = decoder_graph(trained)
    # As they are stored, in stacks.
    like = with_shardings(shapes, shardings(axes, shapes, GENERATE_RULES, mesh))
    _, params = read_newest_params(path, like, step)

    def merged(params: Params) -> Params:
        merged = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), lora.merge(params, trained))
        return split_layers(merged) if lists_layers(mesh) else merged

    # Merged where they are used, so no device holds all of them.
    return jax.jit(merged, out_shardings=where)(params)


def _progress(total: int, samplers: tuple[int, ...]):
    """A callback for finished groups that prints how far the evaluation is, every ten seconds."""
    # Some hosts may sample a part without the others.
    here = ", of those this host its part" if len(samplers) < hosts.num_processes() else ""
    started_s = said_s = time.monotonic()
    done = tokens = 0

    def add(group: Completions) -> None:
        nonlocal said_s, done, tokens
        done, tokens = done + 1, tokens + int(group.lengths_B.sum())
        now_s = time.monotonic()
        if done == total or now_s - said_s > _PROGRESS_EVERY_S:
            said_s = now_s
            _say(f"{done} of {total} problems, {tokens / (now_s - started_s):,.0f} tokens/s{here}")

    return add


def _say(text: str) -> None:
    if hosts.is_first():
        print(text, file=sys.stderr, flush=True)


def table_of(scored: Scored, metrics: Mapping[str, float]) -> str:
    """Formats an evaluation as a table: a column per data set, percentages with standard errors.

    Args:
      scored: the graded answers.
      metrics: their `evaluation_metrics`.
    """
    sources = np.array(scored.completions.prompts.sources)
    parts = {
        name: scored.take(np.flatnonzero(sources == name))
        for name in dict.fromkeys(sources.tolist())
    }
    # A data set may have this name itself.
    if len(parts) > 1 and ALL not in parts:
        parts[ALL] = scored
    lines = [["", *parts]]
    lines.append(["problems", *(f"{len(part.completions.prompts):,}" for part in parts.values())])
    accuracy = re.compile(
        rf"val-(?:core|aux)/(?:{'|'.join(map(re.escape, parts))})/acc/(\w+@\d+)(?:/mean)?"
    )
    # Once each: a data set without a finished answer has none of them.
    for name in dict.fromkeys(m[1] for key in metrics if (m := accuracy.fullmatch(key))):
        # For correctness best@k measures the same as pass@k with more noise. worst@k is only in the metrics.
        if not name.startswith(("best@", "worst@")):
            lines.append([name, *(_shown(metrics, source, name) for source in parts)])
    counted = [part.counts_B for part in parts.values()]

    def line(title: str, form: str, values: Callable[[Scored], Any]) -> list[str]:
        """Means over the samples that count."""
        found = [
            np.asarray(values(part))[counts_B]
            for part, counts_B in zip(parts.values(), counted, strict=True)
        ]
        return [title, *(format(x.mean(), form) if len(x) else "-" for x in found)]

    lines.append(line("truncated", ".1%", lambda part: part.completions.truncated_B))
    unread = lambda part: [p is None for p in part.predictions]  # noqa: E731
    lines.append(line("without answer", ".1%", unread))
    failed = {
        "grader failed": [sum(f is not None for f in part.failures) for part in parts.values()],
        "agent failed": [part.left_out.get("agent/failed", 0) for part in parts.values()],
    }
    for title, counts in failed.items():
        if any(counts):
            lines.append([title, *(f"{count:,}" for count in counts)])
    lines.append(line("response tokens", ",.1f", lambda part: part.completions.lengths_B))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    )


def _shown(metrics: Mapping[str, float], source: str, name: str) -> str:
    """A statistic of a data set, with its standard error: "78.9% ± 4.4%"; "-" without a finished answer."""
    keys = (
        f"val-{part}/{source}/acc/{name}{end}" for part in ("core", "aux") for end in ("", "/mean")
    )
    value = next((metrics[key] for key in keys if key in metrics), None)
    if value is None:
        return "-"
    stderr = metrics.get(f"val-aux/{source}/acc/{name}/stderr")
    return f"{value:.1%}" + ("" if stderr is None else f" ± {stderr:.1%}")
