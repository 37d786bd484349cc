"""An evaluation without a training config: a model, sets of problems, answers on disk, statistics.

    files, limits, answers of an earlier start   checked: nothing is loaded or compiled before
    weights -> rollout backend                   only if something is not answered yet
    group after group, as it is finished         graded, written, counted
    samples.jsonl                                statistics of each set, and of all together

It runs on one process. Not covered: environments and stop strings, which belong to a task of a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.errors import UserError
from jaxrl.evaluation.answer_file import AnswerFile, AnswerRow
from jaxrl.evaluation.eta_line import EtaLine
from jaxrl.evaluation.evaluate_config import EvaluateConfig
from jaxrl.evaluation.evaluation_metrics import ALL
from jaxrl.evaluation.policy_loading import FoundModel, find_model
from jaxrl.evaluation.problem_sets import longest_of, prompts_of, read_sets
from jaxrl.evaluation.sampled_answers import EVALUATION_STEP, unpunished
from jaxrl.evaluation.statistics import Estimate, statistics_of
from jaxrl.mesh.rules import GENERATE_RULES, check_divides
from jaxrl.rewards.graders import Graders
from jaxrl.rewards.score import verdicts_of
from jaxrl.rollout.backend import RolloutBackend, SamplingOptions
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.sampling import truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.serving.model_loading import build_generation_mesh
from jaxrl.tracking.run_folder import EvaluationFolder
from jaxrl.tracking.sample_rows import TokenPieces, sample_rows
from jaxrl.types import Completions, Prompts

# Where nothing else limits a response.
_LONGEST_RESPONSE = 8192


@dataclasses.dataclass(frozen=True)
class SetResults:
    """What the answers to one set say, or those to all.

    Attributes:
      problems: N.
      statistics: by name, of correctness.
      response_tokens: mean length.
      truncated: share of responses that ran into the limit.
      without_answer: share of responses in which the grader has found none.
      failed: responses, counted as wrong, on which the grader gave no verdict.
      entropy: mean over tokens, in nats.
    """

    problems: int
    statistics: Mapping[str, Estimate]
    response_tokens: float
    truncated: float
    without_answer: float
    failed: int
    entropy: float

    def as_json(self) -> dict[str, Any]:
        """JSON-able; null for what is not known."""
        return json.loads(
            json.dumps(dataclasses.asdict(self)), parse_constant=lambda constant: None
        )


@dataclasses.dataclass(frozen=True)
class Planned:
    """An evaluation in which everything fits together, and nothing is loaded.

    Attributes:
      found: the model.
      prompts: of all sets.
      engine: shapes of the rollout programs.
      mesh: where it samples.
      graders: the grader, with its processes.
      options: how it samples.
      answers: the folder, with what an earlier start has left.
    """

    config: EvaluateConfig
    found: FoundModel
    prompts: Prompts
    engine: EngineConfig
    mesh: Mesh
    graders: Graders
    options: SamplingOptions
    answers: AnswerFile


def plan_evaluation(config: EvaluateConfig, *, devices: Sequence[Any] | None = None) -> Planned:
    """Reads everything but the weights, and checks that it fits together.

    Args:
      config: the evaluation.
      devices: to choose from; all by default.

    Raises:
      UserError: something is missing, broken, or does not fit.
    """
    graders = Graders((config.grader, config.grader_options), workers=config.grader_workers)
    sets = read_sets(
        config.sets,
        prompt_field=config.prompt_field,
        answer_field=config.answer_field,
        limit=config.limit,
        graders=graders,
    )
    found = find_model(pathlib.Path(config.model))
    template = config.template or found.trained_with("data.template") or ""
    chat = config.chat or bool(found.trained_with("data.chat"))
    prompts = prompts_of(
        sets,
        found.tokenizer,
        template=template,
        chat=chat,
        max_prompt_tokens=config.max_prompt_tokens or found.context_tokens - 1,
        overlong=config.overlong,
    )
    engine = _engine_config(config, found, prompts)
    mesh = build_generation_mesh(config.mesh, devices)
    check_divides("--slots", config.slots, "batch", GENERATE_RULES, mesh)
    check_divides("--prefill_prompts", config.prefill_prompts, "batch", GENERATE_RULES, mesh)
    options = SamplingOptions(
        num_samples=config.n,
        seed=config.seed,
        step=EVALUATION_STEP,
        temperature=config.temperature,
        truncation=truncation_of(top_k=config.top_k, top_p=config.top_p, min_p=config.min_p),
    )
    settings = _settings(config, found, prompts, engine, template=template, chat=chat)
    folder = EvaluationFolder(pathlib.Path(config.out or _folder_name(found, settings)))
    answers = AnswerFile(folder, settings, config.n)
    return Planned(config, found, prompts, engine, mesh, graders, options, answers)


def evaluate(
    planned: Planned,
    *,
    say: Callable[[str], None],
    build: Callable[..., RolloutBackend] = build_backend,
) -> dict[str, SetResults]:
    """Answers what is not answered yet, and tells what all answers say, by set.

    Args:
      planned: the evaluation.
      say: told what takes long, a line each.
      build: makes the rollout backend, as `rollout.drivers.build_backend`.

    Raises:
      UserError: weights are damaged, or the disk does not take the answers.
    """
    answers, prompts, found = planned.answers, planned.prompts, planned.found
    missing = answers.missing(prompts)
    before = len(prompts) - len(missing)
    if before:
        say(f"{answers.folder.samples} has the answers to {before} of {len(prompts)} problems")
    start_s = time.perf_counter()
    with answers:
        if len(missing):
            say(f"loading {found.path} ({found.weights})")
            backend = build(
                "offline", found.model, planned.mesh, planned.engine, found.tokenizer.decode
            )
            backend.load(found.load(planned.mesh, backend.dtype))
            say(
                f"answering {len(missing)} problems {planned.config.n} times, prompts of up to "
                f"{planned.engine.max_prompt_tokens} and responses of up to "
                f"{planned.engine.max_response_tokens} tokens, into {answers.folder}"
            )
            line = EtaLine(len(prompts), before=before)
            try:
                _sample(planned, backend, missing, line)
            finally:
                line.close()
                backend.close()
                planned.graders.close()
        results = results_of(answers, prompts)
        answers.write_results(
            {
                "seconds": round(time.perf_counter() - start_s, 3),
                "results": {name: found.as_json() for name, found in results.items()},
            }
        )
    return results


def _sample(planned: Planned, backend: RolloutBackend, prompts: Prompts, line: EtaLine) -> None:
    """Answers the prompts, each of them written as soon as all its answers are there."""
    tokenizer = planned.found.tokenizer
    pieces = TokenPieces(tokenizer) if planned.config.tokens else None

    def take(group: Completions) -> None:
        scored = unpunished(group, verdicts_of(planned.graders, group))
        rows = sample_rows(scored, pieces, stop_ids=tokenizer.stop_ids)
        planned.answers.add(scored, rows)
        line.add(
            answers=len(scored),
            correct=int(scored.correct_B.sum()),
            tokens=int(group.lengths_B.sum()),
        )

    backend.generate(prompts, planned.options, on_group=take)


def results_of(answers: AnswerFile, prompts: Prompts) -> dict[str, SetResults]:
    """Statistics of each set in its order, and of several together."""
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


def _engine_config(config: EvaluateConfig, found: FoundModel, prompts: Prompts) -> EngineConfig:
    longest, context = longest_of(prompts), found.context_tokens
    prompt = config.max_prompt_tokens or longest
    response = config.max_response_tokens or min(context - prompt, _LONGEST_RESPONSE)
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
        stop_ids=found.tokenizer.stop_ids,
    )


def _settings(
    config: EvaluateConfig,
    found: FoundModel,
    prompts: Prompts,
    engine: EngineConfig,
    *,
    template: str,
    chat: bool,
) -> dict[str, Any]:
    """All that answers depend on; not where and how fast they are sampled."""
    asked = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "grader", "dtype", "kv_dtype")
    return {
        "model": str(found.path),
        "weights": found.weights,
        "sets": {name: _checksum(prompts, name) for name in dict.fromkeys(prompts.sources)},
        "template": template,
        "chat": chat,
        **{name: getattr(config, name) for name in asked},
        "max_prompt_tokens": engine.max_prompt_tokens,
        "max_response_tokens": engine.max_response_tokens,
        "tokens": config.tokens,
    }


def _checksum(prompts: Prompts, source: str) -> str:
    """Of the problems of a set as the model sees them, and of what is right."""
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
    """Results for people: a column for each set, values in percent with their standard errors."""
    first = next(iter(results.values()))
    lines: list[list[str]] = [["", *results]]
    lines.append(["problems", *(f"{found.problems:,}" for found in results.values())])
    # Of right and wrong best@k says what pass@k does, with more noise; worst@k is for those who ask.
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
