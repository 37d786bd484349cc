"""Evaluates a model on sets of problems, without a training config.

    python launch/evaluate.py --model DIR --set aime_2024.jsonl --n 32 --temperature 1 --top_p 0.7
    python launch/evaluate.py --model runs/dapo_tiny/seed0 --set a.jsonl --set b.jsonl --out results/first

DIR is a Hugging Face directory, or the folder of a run, whose newest intact checkpoint is taken. The table of
results goes to stdout, everything else to stderr; samples, results and a page go to --out, by default to a
folder of evaluations/ whose name stands for the model and for what is asked of it. An evaluation that was
interrupted goes on when the same command is started again: problems whose answers are all there are not asked
again. Several processes with the same command evaluate together (--coordinator). What the user can fix is one
line on stderr and exit status 2. docs/evaluation.md says what the statistics are.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxrl.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from jaxrl.evaluation.evaluate_config import EvaluateConfig
from jaxrl.evaluation.evaluating import Planned, evaluate, plan_evaluation, table_of
from jaxrl.evaluation.evaluation_page import write_evaluation_page
from jaxrl.mesh import hosts
from jaxrl.mesh.compilation_cache import keep_compiled_programs

_HELP = {
    "out": "folder of samples.jsonl, results.json and samples.html",
    "n": "answers to each problem",
    "temperature": "0 is greedy",
    "top_p": "only the most probable tokens that have this probability together; 1 is all",
    "top_k": "only so many of the most probable tokens; 0 is all",
    "min_p": "only tokens with this share of the most probable one's probability",
    "seed": "of the samples",
    "grader": "answer, math, choice, ... or your own: package.module:function or path/to/file.py:function",
    "grader_workers": "processes for graders that need them; 0 is one for each core",
    "code_sandbox": "where the grader code runs programs: bubblewrap, webassembly, landlock or none; auto "
    "takes the first of the three that works here",
    "template": 'text around a problem, with "{prompt}" where it goes (default: the problem alone; of a run '
    "what it was trained with)",
    "prompt_field": "of the files; by default recognised",
    "answer_field": "of the files; by default recognised",
    "limit": "only the first so many problems of each set; 0 is all",
    "max_prompt_tokens": "longest prompt; 0: the longest there is",
    "max_response_tokens": "longest response; 0: what the model's context leaves, up to 8192",
    "overlong": "prompts that are too long: error, drop, or cut: left, right, middle",
    "environment": "your own function that answers finished turns: package.module:function or "
    "path/to/file.py:function (default: of a run the one it was trained with, which 'none' leaves out)",
    "mesh": "p-t-d of the devices to use: pipeline, tensor and data parallel size",
    "slots": "samples decoded side by side at most",
    "smallest_bucket": "fewest slots that a program is compiled for; more compile less and end slower",
    "prefill_prompts": "prompts of one prefill",
    "prefill_chunk_tokens": "prompts are prefilled so many tokens at a time",
    "tokens_per_dispatch": "tokens decoded between two looks of the host",
    "unroll": "layers per iteration of the layer scan; all of them is fastest on CPU",
    "dtype": "of weights and activations: float32, bfloat16, or auto: of a run what it sampled in, else "
    "float32 on CPUs and bfloat16 on accelerators",
    "kv_dtype": "of the cache, float32, bfloat16 or int8 (default: as dtype)",
}
_HOSTS_HELP = {
    "coordinator": "address:port of process 0 where several processes evaluate together, or auto",
    "num_processes": "how many there are; all are started with the same command",
    "process_id": "which of them this is, from 0",
    "lost_after_s": "seconds of silence after which another process counts as lost",
}
_SWITCHES = {
    "chat": "send prompts through the tokenizer's chat template",
    "tokens": "keep every token with its log-probability, for jaxrl browse",
}


def main(argv: Sequence[str]) -> int:
    """Evaluates as the program's name and its arguments say; returns the exit status."""
    program, *arguments = argv
    parser = _parser(program)
    settings: dict[str, Any] = vars(parser.parse_args(arguments))
    planned: list[Planned] = []
    try:
        config = _config_of(settings)
        hosts.start(config.hosts)
        keep_compiled_programs()
        with hosts.watched(config.hosts):
            _run(config, planned)
    except UserError as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted{_what_is_kept(planned)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _config_of(settings: dict[str, Any]) -> EvaluateConfig:
    of_hosts = {name: settings.pop(name) for name in _HOSTS_HELP}
    sets, stops = (tuple(settings.pop(name)) for name in ("sets", "stop_strings"))
    try:
        config = hosts.HostsConfig(**of_hosts)
    except ValueError as error:
        raise UserError(str(error)) from error
    return EvaluateConfig(**settings, sets=sets, stop_strings=stops, hosts=config)


def _run(config: EvaluateConfig, planned: list[Planned]) -> None:
    """Evaluates; what is planned is left in the list, for who is interrupted."""
    planned.append(plan_evaluation(config))
    results = evaluate(planned[0], say=_say)
    if not results:
        return  # the first process tells
    table = table_of(results)
    page = write_evaluation_page(planned[0].folder, title=planned[0].found.name, table=table)
    print(table)
    _say(f"{page.parent}: samples.jsonl, results.json, samples.html")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _what_is_kept(planned: Sequence[Planned]) -> str:
    if not planned or planned[0].answers is None:
        return ""
    answered, total = len(planned[0].answers.answers), len(planned[0].prompts)
    return (
        f"; {planned[0].folder} has the answers to {answered} of {total} problems, and the same command "
        "goes on from them"
    )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=pathlib.Path(program).name,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory, or folder of a run")
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        required=True,
        metavar="FILE",
        help="JSONL file of problems; may be given several times",
    )
    parser.add_argument(
        "--stop",
        dest="stop_strings",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends an answer; may be given several times (default: of a run what it was trained "
        "with)",
    )
    for name, text in (_HELP | _HOSTS_HELP).items():
        default = getattr(hosts.HostsConfig if name in _HOSTS_HELP else EvaluateConfig, name)
        shown = f"{text} (default: {default})" if default != "" else text
        parser.add_argument(f"--{name}", type=type(default), default=default, help=shown)
    for name, text in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser
