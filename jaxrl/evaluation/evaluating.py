"""Evaluates a model on sets of problems, without a training config.

    1. check files, limits and earlier answers    before any weights are loaded or programs compiled
    2. load the weights, build the backend        only if problems are unanswered
    3. sample                                     finished groups are graded and written during sampling
    4. compute statistics from samples.jsonl      for each set, and for all sets together

Several processes read the same files and sample together. Only the first process grades and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat
from jaxrl.errors import UserError
from jaxrl.evaluation.answer_file import AnswerFile, AnswerRow
from jaxrl.evaluation.answer_writer import AnswerWriter
from jaxrl.evaluation.eta_line import EtaLine
from jaxrl.evaluation.evaluate_config import NO_ENVIRONMENT, EvaluateConfig
from jaxrl.evaluation.evaluation_metrics import ALL
from jaxrl.evaluation.policy_loading import FoundModel, find_model
from jaxrl.evaluation.problem_sets import longest_prompt_tokens, prompts_of, read_sets
from jaxrl.evaluation.sampled_answers import EVALUATION_STEP, check_answers_fit
from jaxrl.evaluation.statistics import Estimate, statistics_of
from jaxrl.hub.local_paths import local_model
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import build_generation_mesh, dtype_on
from jaxrl.mesh.rules import GENERATE_RULES, check_divides
from jaxrl.rewards.graders import Graders
from jaxrl.rollout.backend import RolloutBackend, SamplingOptions
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.environment import environment_of
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.tracking.run_folder import EvaluationFolder
from jaxrl.types import Completions, Prompts

# Limit of a response, in tokens, of a model that is no run.
_LONGEST_RESPONSE = 8192


@dataclasses.dataclass(frozen=True)
class SetResults:
    """Results on one set of problems, or on all sets.

    Attributes:
      problems: number of problems.
      statistics: statistics of correctness: name -> estimate.
      response_tokens: mean length of the responses.
      truncated: share of responses that reached the limit.
      without_answer: share of responses without an answer that the grader can extract.
      failed: number of responses that could not be graded; they count as wrong.
      entropy: mean entropy per token, in nats.
    """

    problems: int
    statistics: Mapping[str, Estimate]
    response_tokens: float
    truncated: float
    without_answer: float
    failed: int
    entropy: float

    def as_json(self) -> dict[str, Any]:
        """The results as JSON-able values; NaN and infinity become null."""
        return json.loads(
            json.dumps(dataclasses.asdict(self)), parse_constant=lambda constant: None
        )


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """A checked evaluation, before weights are loaded.

    Attributes:
      config: settings of the evaluation.
      found: the model.
      prompts: the prompts of all sets.
      missing: the prompts without answers.
      engine: settings of the rollout programs.
      mesh: mesh to sample on.
      graders: the grader and its processes.
      options: sampling options.
      folder: folder of the evaluation.
      answers: earlier answers in the folder, on the first process; None on the others.
    """

    config: EvaluateConfig
    found: FoundModel
    prompts: Prompts
    missing: Prompts
    engine: EngineConfig
    mesh: Mesh
    graders: Graders
    options: SamplingOptions
    folder: EvaluationFolder
    answers: AnswerFile | None


def plan_evaluation(
    config: EvaluateConfig, *, devices: Sequence[Any] | None = None
) -> EvaluationPlan:
    """Reads everything except the weights, and checks it. Collective.

    Args:
      config: settings of the evaluation.
      devices: available devices; None for all.

    Raises:
      UserError: if a file is missing or invalid, or settings, model, problems and devices do not match.
    """
    found = find_model(pathlib.Path(local_model(config.model)))
    config = _with_grader(config, found)
    graders = Graders(
        (config.grader, config.grader_options),
        workers=config.grader_workers,
        code_sandbox=config.code_sandbox,
    )
    sets = read_sets(config, graders, found.evaluation_sources())
    task = _task_of(config, found)
    prompts = prompts_of(
        sets,
        found.tokenizer,
        task.prompt_format,
        keep_own_template=not config.template,
        max_prompt_tokens=config.max_prompt_tokens or found.context_tokens - 1,
        overlong=config.overlong,
    )
    mesh = _mesh(config, devices)
    config = dataclasses.replace(config, dtype=_dtype(config, found, mesh))
    engine = _engine_config(config, found, prompts, task.stop_ids)
    tokens = engine.max_response_tokens
    check_answers_fit(
        config.n * len(prompts),
        tokens,
        settings=f"--n {config.n:,} x {len(prompts):,} problems x --max_response_tokens {tokens:,}",
        remedy="lower --n, or set --limit",
    )
    settings = _settings(config, found, prompts, engine, task)
    hosts.check_same("the evaluation", [json.dumps(settings, sort_keys=True)])
    folder = EvaluationFolder(pathlib.Path(config.out or _folder_name(found, settings)))
    answers, missing = _earlier_answers(folder, settings, config.n, prompts)
    return EvaluationPlan(
        config=config,
        found=found,
        prompts=prompts,
        missing=missing,
        engine=engine,
        mesh=mesh,
        graders=graders,
        options=_sampling(config, found, task),
        folder=folder,
        answers=answers,
    )


def _with_grader(config: EvaluateConfig, found: FoundModel) -> EvaluateConfig:
    """The settings with a grader: the given one, else that of the run's evaluation, else `answer`."""
    if config.grader:
        return config
    for where in ("data.evaluation", "reward"):
        if grader := found.trained_with(f"{where}.grader"):
            options = found.trained_with(f"{where}.grader_options") or {}
            return dataclasses.replace(
                config, grader=grader, grader_options=config.grader_options or options
            )
    return dataclasses.replace(config, grader="answer")


@dataclasses.dataclass(frozen=True)
class _Task:
    """The format of prompts, the ends of turns and the environment: from the settings, else from the run."""

    prompt_format: PromptFormat
    stop_strings: tuple[str, ...]
    stop_ids: tuple[int, ...]
    environment: str


def _task_of(config: EvaluateConfig, found: FoundModel) -> _Task:
    trained = found.trained_with
    own = "" if config.sets or config.tasks else trained("data.evaluation.template")
    environment = config.environment or trained("rollout.environment") or ""
    return _Task(
        PromptFormat(
            template=config.template or own or trained("data.template") or PLAIN_FORMAT.template,
            chat=config.chat or bool(trained("data.chat")),
            system_prompt=trained("data.system_prompt") or "",
            chat_options=trained("data.chat_options") or {},
            answer_prefix=trained("data.answer_prefix") or "",
        ),
        stop_strings=config.stop_strings or tuple(trained("rollout.stop_strings") or ()),
        stop_ids=(*found.tokenizer.stop_ids, *(trained("rollout.stop_ids") or ())),
        environment="" if environment == NO_ENVIRONMENT else environment,
    )


def _sampling(config: EvaluateConfig, found: FoundModel, task: _Task) -> SamplingOptions:
    return SamplingOptions(
        num_samples=config.n,
        seed=config.seed,
        step=EVALUATION_STEP,
        temperature=config.temperature,
        truncation=truncation_of(top_k=config.top_k, top_p=config.top_p, min_p=config.min_p),
        stop_strings=task.stop_strings,
        environment=environment_of(task.environment, found.tokenizer),
    )


def _mesh(config: EvaluateConfig, devices: Sequence[Any] | None) -> Mesh:
    mesh = build_generation_mesh(config.mesh, devices)
    total = jax.device_count()
    if hosts.num_processes() > 1 and mesh.size != total:
        raise UserError(
            f"--mesh {config.mesh} takes {mesh.size} of the {total} devices of {hosts.num_processes()} "
            "processes, each of which has to take part; choose a layout of all of them"
        )
    check_divides("--slots", config.slots, "batch", GENERATE_RULES, mesh)
    check_divides("--prefill_prompts", config.prefill_prompts, "batch", GENERATE_RULES, mesh)
    return mesh


def _dtype(config: EvaluateConfig, found: FoundModel, mesh: Mesh) -> str:
    """The data type: from the settings, else that of the run, else the fastest on these devices."""
    sampled_in = found.trained_with("rollout.dtype") if config.dtype == "auto" else None
    return dtype_on(mesh, sampled_in or config.dtype)


def _earlier_answers(
    folder: EvaluationFolder, settings: Mapping[str, Any], n: int, prompts: Prompts
) -> tuple[AnswerFile | None, Prompts]:
    """The earlier answers in the folder (None except on the first process), and the unanswered prompts."""
    opened: list[AnswerFile] = []

    def find() -> list[int]:
        opened.append(AnswerFile(folder, settings, n))
        return opened[0].missing(prompts)

    missing = hosts.on_first(find)
    return (opened[0] if opened else None), prompts.take(missing)


def evaluate(
    planned: EvaluationPlan,
    *,
    say: Callable[[str], None],
    build: Callable[..., RolloutBackend] = build_backend,
) -> dict[str, SetResults]:
    """Samples the missing answers and computes the results. Collective.

    Args:
      planned: the evaluation.
      say: called on the first process with a line of text before each slow phase.
      build: builds the rollout backend; same arguments as `rollout.drivers.build_backend`.

    Returns:
      Set -> results on the first process; empty on the others.

    Raises:
      UserError: if the weights are damaged or the answers cannot be written.
    """
    answers, prompts = planned.answers, planned.prompts
    before = len(prompts) - len(planned.missing)
    if before and answers is not None:
        say(f"{planned.folder.samples} has the answers to {before} of {len(prompts)} problems")
    start_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        hosts.on_first(lambda: _enter(stack, answers))
        if len(planned.missing):
            _answer(planned, say if answers is not None else _say_nothing, build)
        if answers is None:
            return {}
        results = results_of(answers, prompts)
        answers.write_results(
            {
                "seconds": round(time.perf_counter() - start_s, 3),
                "results": {name: found.as_json() for name, found in results.items()},
            }
        )
    return results


def _enter(stack: contextlib.ExitStack, answers: AnswerFile | None) -> None:
    assert answers is not None, "this is the first process"
    stack.enter_context(answers)


def _say_nothing(text: str) -> None:
    del text


def _answer(
    planned: EvaluationPlan, say: Callable[[str], None], build: Callable[..., RolloutBackend]
) -> None:
    """Loads the model and answers the unanswered problems."""
    found, config, engine = planned.found, planned.config, planned.engine
    say(f"loading {found.path} ({found.weights})")
    backend = build("offline", found.model, planned.mesh, engine, found.tokenizer.decode_batch)
    backend.load(found.load(planned.mesh, backend.dtype))
    say(
        f"answering {len(planned.missing)} problems {config.n} times, prompts of up to "
        f"{engine.max_prompt_tokens} and responses of up to {engine.max_response_tokens} tokens, into "
        f"{planned.folder}"
    )
    try:
        _sample(planned, backend)
    finally:
        backend.close()
        planned.graders.close()


def _sample(planned: EvaluationPlan, backend: RolloutBackend) -> None:
    """Samples, and passes each group to the writer on the first process. Its errors stop all processes."""
    prompts = planned.prompts
    line = EtaLine(len(prompts), before=len(prompts) - len(planned.missing))
    writer = None
    if planned.answers is not None:
        writer = AnswerWriter(
            planned.answers,
            planned.graders,
            planned.found.tokenizer,
            line,
            stop_ids=planned.engine.stop_ids,
            tokens=planned.config.tokens,
        )

    def take(group: Completions) -> None:
        hosts.on_first(lambda: writer and writer.add(group))

    # Only the first process shows a progress line.
    with line if writer is not None else contextlib.nullcontext():
        try:
            backend.generate(planned.missing, planned.options, on_group=take)
            hosts.on_first(lambda: writer and writer.finish())
        except KeyboardInterrupt:
            # Write the finished answers. A second Ctrl-C stops waiting for the graders.
            if writer is not None:
                writer.finish()
            raise


def results_of(answers: AnswerFile, prompts: Prompts) -> dict[str, SetResults]:
    """The results of each set, in order, and of all sets together if there are several."""
    of_source: dict[str, list[list[AnswerRow]]] = {}
    for source, number in zip(prompts.sources, prompts.ids_N.tolist(), strict=True):
        of_source.setdefault(source, []).append(answers.answers[source, number])
    results = {source: _results(rows) for source, rows in of_source.items()}
    if len(results) > 1 and ALL not in results:
        results[ALL] = _results([row for rows in of_source.values() for row in rows])
    return results


def _results(rows: Sequence[Sequence[AnswerRow]]) -> SetResults:
    def of(name: str) -> np.ndarray:
        return np.array([[getattr(answer, name) for answer in row] for row in rows])

    correct_NG, length_NG = of("correct"), of("length")
    predictions = [[answer.prediction for answer in row] for row in rows]
    tokens = max(int(length_NG.sum()), 1)
    return SetResults(
        problems=len(rows),
        statistics=statistics_of(correct_NG, correct_NG, predictions),
        response_tokens=float(length_NG.mean()),
        truncated=float(of("truncated").mean()),
        without_answer=float(np.mean([[p is None for p in row] for row in predictions])),
        failed=int(of("failed").sum()),
        entropy=float((of("entropy") * length_NG).sum() / tokens),
    )


def _engine_config(
    config: EvaluateConfig, found: FoundModel, prompts: Prompts, stop_ids: tuple[int, ...]
) -> EngineConfig:
    longest, context = longest_prompt_tokens(prompts), found.context_tokens
    prompt = config.max_prompt_tokens or longest
    trained = found.trained_with("rollout.max_response_tokens") or _LONGEST_RESPONSE
    response = config.max_response_tokens or min(context - prompt, trained)
    if response < 1 or prompt + response > context:
        raise UserError(
            f"prompts of {prompt} tokens and responses of {max(response, 1)} do not fit into the {context} "
            "positions of the model (max_position_embeddings of its config.json); lower "
            "--max_prompt_tokens or --max_response_tokens, with --overlong=drop or left for longer prompts"
        )
    chunk = min(config.prefill_chunk_tokens, prompt + response)
    return EngineConfig(
        **config.engine_settings(prefill_chunk_tokens=chunk),
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        stop_ids=stop_ids,
        # Sets often have few problems with answers of very different lengths.
        smallest_bucket=8,
    )


def _settings(
    config: EvaluateConfig,
    found: FoundModel,
    prompts: Prompts,
    engine: EngineConfig,
    task: _Task,
) -> dict[str, Any]:
    """The settings that answers depend on, without devices and speed."""
    around = task.prompt_format
    # Only values that are set: the settings of older evaluations, without these names, stay equal.
    further = {
        "stop_strings": task.stop_strings,
        "environment": task.environment,
        "grader_options": config.grader_options,
    }
    asked = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "grader", "dtype", "kv_dtype")
    return {
        "model": str(found.path),
        "weights": found.weights,
        "sets": {name: _checksum(prompts, name) for name in dict.fromkeys(prompts.sources)},
        "template": "" if around.template == PLAIN_FORMAT.template else around.template,
        "chat": around.chat,
        **{name: getattr(config, name) for name in asked},
        "max_prompt_tokens": engine.max_prompt_tokens,
        "max_response_tokens": engine.max_response_tokens,
        "tokens": config.tokens,
        **{name: value for name, value in further.items() if value},
    }


def _checksum(prompts: Prompts, source: str) -> str:
    """The number and the checksum of a set's prompt tokens and ground truths."""
    crc, count = 0, 0
    for i, name in enumerate(prompts.sources):
        if name == source:
            answer = prompts.answers[i].encode("utf-8", "surrogatepass")
            crc = zlib.crc32(answer, zlib.crc32(prompts.tokens[i].tobytes(), crc))
            count += 1
    return f"{count} problems, {crc:08x}"


def _folder_name(found: FoundModel, settings: Mapping[str, Any]) -> str:
    crc = zlib.crc32(json.dumps(settings, sort_keys=True).encode())
    return f"evaluations/{found.name}-{crc:08x}"


def table_of(results: Mapping[str, SetResults]) -> str:
    """Formats the results as a table with a column per set. Values are percentages with standard errors."""
    first = next(iter(results.values()))
    lines: list[list[str]] = [["", *results]]
    lines.append(["problems", *(f"{found.problems:,}" for found in results.values())])
    # For correctness best@k measures the same as pass@k with more noise. worst@k is only in results.json.
    shown = [name for name in first.statistics if not name.startswith(("best@", "worst@"))]
    for name in shown:
        lines.append([name, *(_percent(found.statistics[name]) for found in results.values())])
    for label, name in (("truncated", "truncated"), ("without answer", "without_answer")):
        lines.append([label, *(f"{getattr(found, name):.1%}" for found in results.values())])
    if any(found.failed for found in results.values()):
        lines.append(["grader failed", *(f"{found.failed:,}" for found in results.values())])
    lines.append(
        ["response tokens", *(f"{found.response_tokens:,.1f}" for found in results.values())]
    )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    )


def _percent(estimate: Estimate) -> str:
    error = f" ± {estimate.stderr:.1%}" if math.isfinite(estimate.stderr) else ""
    return f"{estimate.value:.1%}{error}"
