"""Shows the data that a run would read, without training; converts files of problems.

    jaxrl data --config configs/dapo_tiny.py [--config.NAME=VALUE ...] [--show 3]
    jaxrl data dapo-math-17k.parquet --tokenizer Qwen/Qwen2.5-7B --chat --show 3
    jaxrl data dapo-math-17k.parquet --to dapo.jsonl
    jaxrl data dapo.jsonl --pass_rate MODEL --n 16 --between 0.05 0.95 --to kept.jsonl
    jaxrl data math.jsonl --rewrite_answers http://localhost:8000/v1 --prompt FILE --to integers.jsonl

Prints the data card: number of rows, excluded rows with reasons, duplicates, lengths in tokens, shares.
--show prints prompts as the model reads them, with special tokens. --to writes the remaining training
problems to a file. User errors are one line on stderr with exit status 2.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Sequence

from jaxrl import extensions
from jaxrl.commands.hub_files import with_hub_files
from jaxrl.config.command_line import load_config, take_overrides
from jaxrl.config.schema import Config
from jaxrl.config.shapes import tokenizer_directory
from jaxrl.data.data_card import data_card
from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.data.messages import text_of_context
from jaxrl.data.problems import ProblemReader, Problems
from jaxrl.data.prompt_encoding import encode, tokenizer_from
from jaxrl.data.row_layouts import SOURCE_NAME, Record
from jaxrl.data.rows import Row, write_rows
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.flags import add_flags, command_parser
from jaxrl.hub.local_paths import TRAINING, local_model, local_rows
from jaxrl.tracking.readable import visible
from jaxrl.trainer.run_rewards import needs_truths, truth_faults

_RULE = "-" * 80
# Limits for a single file: nothing is excluded for its length unless a flag asks for it.
_ANY_LENGTH = 2**24


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="*", metavar="FILE", help="JSONL, Parquet, Arrow, ...")
    parser.add_argument("--config", default="", help="recipe whose sources are shown")
    parser.add_argument("--show", type=int, default=0, help="prompts of each source to show")
    parser.add_argument("--to", default="", help="file to write: out.jsonl or out.parquet")
    of_files = parser.add_argument_group("of files; a recipe has settings for these")
    of_files.add_argument("--tokenizer", default="", help="Hugging Face tokenizer directory")
    for field in ("prompt", "answer"):
        of_files.add_argument(
            f"--{field}_field", default="", help=f"field with the {field}; recognised if left out"
        )
    add_flags(of_files, SourceConfig, only=("grader",))
    add_flags(of_files, DataConfig, only=("template", "chat", "system_prompt"))
    of_files.add_argument("--max_prompt_tokens", type=int, default=_ANY_LENGTH)
    cleaned = parser.add_argument_group("of a file that is cleaned; docs/data.md explains them")
    cleaned.add_argument(
        "--pass_rate", default="", help="model that answers: directory, hub or run"
    )
    cleaned.add_argument("--n", type=int, default=16, help="answers to each problem")
    cleaned.add_argument(
        "--between", type=float, nargs=2, default=(0.0, 1.0), help="rates to keep, the lower first"
    )
    cleaned.add_argument("--rewrite_answers", default="", help="URL of a server, ending in /v1")
    cleaned.add_argument("--prompt", default="", help="file with {problem} and {answer}")
    cleaned.add_argument("--served_model", default="", help="its name; the first of the server's")
    overrides, rest = take_overrides(arguments, Config)
    args = parser.parse_args(rest)
    if args.pass_rate or args.rewrite_answers:
        if len(args.files) != 1 or (args.pass_rate and args.rewrite_answers):
            raise UserError("name one file, and either --pass_rate or --rewrite_answers")
        clean = extensions.lookup("data --pass_rate and --rewrite_answers")
        clean(args, overrides, lambda: _problems_of(args)[0].train_records)
        return 0
    # A recipe has settings for each of its files, a file has those of the flags.
    if bool(args.files) == bool(args.config):
        raise UserError("name files of problems, or a recipe with --config, and not both")
    # They would be ignored without a word.
    if overrides and not args.config:
        raise UserError("--config.NAME=VALUE changes a recipe; name one with --config")
    if not args.config:
        _of_files(args)
        return 0
    config = with_hub_files(load_config(Config, args.config, overrides), weights=False)
    truths = functools.partial(truth_faults, (config.reward.grader, config.reward.grader_options))
    problems = ProblemReader(config.data, needs_truths=needs_truths(config)).read(truths)
    if directory := tokenizer_directory(config):
        tokenizer = load_tokenizer(directory)
    else:
        size = config.model.vocab_size
        tokenizer = tokenizer_from(problems, (), config.data, vocab_size=size)
    _report(problems, config.data, tokenizer, args)
    return 0


def _problems_of(args: argparse.Namespace) -> tuple[Problems, DataConfig]:
    fields = {"prompt": args.prompt_field, "answer": args.answer_field}
    sources = {
        # Files of two folders may have the same name.
        f"{pathlib.Path(path).name}{f'_{i}' if i else ''}": SourceConfig(
            path=local_rows(path, TRAINING),
            fields={name: field for name, field in fields.items() if field},
        )
        for i, path in enumerate(args.files)
    }
    data = DataConfig(
        sources=sources,
        template=args.template,
        chat=args.chat,
        system_prompt=args.system_prompt,
        max_prompt_tokens=args.max_prompt_tokens,
    )
    truths = functools.partial(truth_faults, (args.grader, {})) if args.grader else None
    return ProblemReader(data).read(truths), data


def _of_files(args: argparse.Namespace) -> None:
    problems, data = _problems_of(args)
    if args.chat and not args.tokenizer:
        raise UserError("--chat needs a tokenizer's chat template; add --tokenizer DIR")
    tokenizer = (
        load_tokenizer(local_model(args.tokenizer, tokenizer_only=True)) if args.tokenizer else None
    )
    _report(problems, data, tokenizer, args)


def _report(
    problems: Problems, data: DataConfig, tokenizer: Tokenizer | None, args: argparse.Namespace
) -> None:
    train = evaluation = ()
    if tokenizer is not None:
        train = encode(problems.train, data, tokenizer)
        evaluation = encode(problems.evaluation, data, tokenizer)
    print(data_card(problems, train, evaluation, sampler=data.sampler))
    sources = (*problems.train, *problems.evaluation)
    encoded = (*train, *evaluation) or (None,) * len(sources)
    for source, prompts in zip(sources, encoded, strict=True):
        if args.show > 0:
            print(f"{_RULE}\n{source.name}, as {'the model sees it' if prompts else 'text'}")
        template = data.format_of(source.own_template)
        for row in range(min(args.show, len(source.records))):
            if prompts is None or tokenizer is None:
                record, length = source.records[row], ""
                text = template.fill(text_of_context(record.prompt))
            elif row < len(prompts.prompts):
                ids = prompts.prompts.tokens[row].tolist()
                text = tokenizer.backend.decode(ids, skip_special_tokens=False)
                # By its id: long prompts are left out, so rows are not those of the file.
                record = source.records[int(prompts.prompts.ids_N[row])]
                length = f"{len(ids)} tokens, "
            else:
                break
            about = f"[{length}{record.source}]  answer {record.answer!r}"
            if record.extra:
                about += f"  extra {json.dumps(record.extra, ensure_ascii=False)[:200]}"
            print(f"{_RULE}\n{visible(text)}\n{visible(about)}")
    if args.to:
        records = problems.train_records
        write_rows(rows_of(records), args.to)
        print(f"{len(records):,} problems written to {args.to}")


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Rows with problem (prompt, if any is a conversation), answer, solution and other fields."""
    # One column has one type.
    are_texts = all(isinstance(record.prompt, str) for record in records)
    rows = []
    for record in records:
        prompt = record.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        row: Row = {"problem": prompt} if are_texts else {"prompt": messages}
        row["answer"] = record.answer
        if record.solution is not None:
            row["solution"] = record.solution
        row[SOURCE_NAME] = record.source
        # A field of the original file may have one of these names without being the prompt.
        own = ("problem", "prompt", "answer", "solution", SOURCE_NAME)
        rows.append(row | {name: x for name, x in record.extra.items() if name not in own})
    return rows
