r"""Cleans a file of problems: by how often a model answers them, and to answers that are integers.

    jaxrl data FILE --pass_rate MODEL --n 16 --between 0.05 0.95 --to kept.jsonl [--config.NAME=VALUE ...]
    jaxrl data FILE --rewrite_answers URL --prompt shared/integer_answers.txt --to integers.jsonl

Whatever is found about a problem is appended at once to a file beside the result, kept.jsonl.found. The same
command goes on with it, and with other bounds asks nothing again.

The model that rewrites is asked over HTTP, by OpenAI's API. Not covered: whether a rewritten problem has the
answer that the model says. Look at what is found, and at pass rates of the new file.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import hashlib
import json
import pathlib
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.commands.data_command import rows_of
from jaxrl.commands.evaluate import answering, evaluation_config, read_inputs
from jaxrl.data.data_card import data_card
from jaxrl.data.row_layouts import Record
from jaxrl.data.rows import write_rows
from jaxrl.errors import UserError
from jaxrl.files import read_text
from jaxrl.mesh import hosts
from jaxrl.tracking.durable import AppendedFile, disk_errors, write_atomically
from jaxrl.user_code import bundled_file

# Problems that are answered before their rates are written.
_AT_ONCE = 512
_BOUNDS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Replies that the server makes at the same time.
_ASKED_AT_ONCE = 32
_TIMEOUT_S = 600.0
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_FIELD = re.compile(r"\{(problem|answer)\}")

Found = dict[str, dict[str, Any]]
"""What is known about each problem, by its key."""


class FoundFile:
    """The file in which a command notes what it has found, one JSON object a line, to go on from there.

    Args:
      path: the file.
      made_with: everything that its content depends on.

    Raises:
      UserError: the file is of a command with other settings, or it is no such file.
    """

    def __init__(self, path: pathlib.Path, made_with: Mapping[str, Any]):
        self.known: Found = {}
        text = read_text(path, absent="") if path.exists() else ""
        # The process may have ended within a line.
        whole = text[: text.rfind("\n") + 1]
        first, *lines = whole.splitlines() or [""]
        try:
            if first and json.loads(first) != made_with:
                raise UserError(
                    f"{path} is of other problems, another model or other settings; remove it, or name "
                    "another --to"
                )
            for line in lines:
                found = json.loads(line)
                self.known[found.pop("key")] = found
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} is not what this command writes there ({error}); remove it, or name another --to"
            ) from error
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (whole or json.dumps(made_with) + "\n").encode())
        self._path, self._file = path, AppendedFile(path)

    def add(self, found: Found) -> None:
        """Notes what is known about further problems."""
        self.known |= found
        lines = [json.dumps({"key": key, **one}) + "\n" for key, one in found.items()]
        with disk_errors(self._path):
            self._file.append("".join(lines).encode())


def clean(
    args: argparse.Namespace,
    overrides: Mapping[str, str],
    records: Callable[[], Sequence[Record]],
) -> None:
    """Runs the command.

    Args:
      args: those of `jaxrl data`.
      overrides: settings of the evaluation, by their names.
      records: reads the problems of the file.
    """
    if not args.to:
        raise UserError("name the file of the result with --to")
    if pathlib.Path(args.to).exists():
        raise UserError(f"{args.to} exists; remove it, or name another file")
    if args.pass_rate:
        _by_pass_rate(args, overrides)
    else:
        _rewrite(args, records())


# Pass rates


def _by_pass_rate(args: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    low, high = args.between
    if not 0 <= low <= high <= 1:
        raise UserError(f"--between {low:g} {high:g}: two rates from 0 to 1, the lower first")
    changes = {**overrides, "evaluation.num_samples": str(args.n)}
    config, path, chosen = evaluation_config(args.pass_rate, args.config, args.files, changes)
    with hosts.watched(config.hosts):
        inputs = read_inputs(config, path, chosen=chosen)
        (source,) = inputs.problems.evaluation
        prompts, file = inputs.prompts, None
        keys = [prompts.problem_key(n) for n in range(len(prompts))]

        def begin() -> Found:
            nonlocal file
            print(data_card(inputs.problems), flush=True)
            made_with = {"settings": inputs.settings.splitlines()}
            file = FoundFile(pathlib.Path(f"{args.to}.found"), made_with)
            return file.known

        def add(found: Found) -> None:
            assert file is not None, "the first process has begun it"
            file.add(found)

        known = dict(hosts.on_first(begin))
        left = [n for n, key in enumerate(keys) if key not in known]
        if left:
            with answering(inputs) as (answer, _):
                for at in range(0, len(left), _AT_ONCE):
                    some = left[at : at + _AT_ONCE]
                    scored = answer(prompts.take(some))
                    # Answers that no verdict is about do not count.
                    counted_N = scored.counts_NG.sum(axis=1).tolist()
                    right_N = (scored.correct_NG & scored.counts_NG).sum(axis=1).tolist()
                    found = {
                        keys[n]: {"right": right, "counted": counted}
                        for n, right, counted in zip(some, right_N, counted_N, strict=True)
                    }
                    known |= found
                    hosts.on_first(functools.partial(add, found))
        rows = [source.records[int(n)] for n in prompts.ids_N]
        hosts.on_first(lambda: _keep(rows, [known[key] for key in keys], args))


def _keep(records: Sequence[Record], found: Sequence[Mapping[str, int]], args: Any) -> None:
    """Writes the rows whose rates are inside the bounds, and prints how many have which rate."""
    low, high = args.between
    counts, kept = collections.Counter(), []
    for row, one in zip(rows_of(records), found, strict=True):
        if not one["counted"]:
            counts["without a verdict"] += 1
            continue
        rate = one["right"] / one["counted"]
        inside = next(end for end in _BOUNDS if rate <= end)
        counts["always" if rate == 1 else f"up to {inside:.0%}" if rate else "never"] += 1
        if low <= rate <= high:
            kept.append(row | {"pass_rate": rate, "pass_samples": one["counted"]})
    print("right answers   problems")
    for name in ("never", *(f"up to {x:.0%}" for x in _BOUNDS[1:]), "always", "without a verdict"):
        if counts[name]:
            print(f"{name:<14}{counts[name]:>10,}")
    if not kept:
        raise UserError(f"no problem has a rate from {low:g} to {high:g}; choose other bounds")
    write_rows(kept, args.to)
    print(
        f"{len(kept):,} of {len(found):,} problems, with rates from {low:g} to {high:g}: {args.to}"
    )


# Integer answers


def _rewrite(args: argparse.Namespace, records: Sequence[Record]) -> None:
    if not args.prompt:
        raise UserError("name the file of the instructions with --prompt, see docs/data.md")
    template = read_text(bundled_file(args.prompt), absent="name the file of the instructions")
    if {match[1] for match in _FIELD.finditer(template)} != {"problem", "answer"}:
        raise UserError(f"{args.prompt} has not both {{problem}} and {{answer}}; write them there")
    url = args.rewrite_answers.rstrip("/")
    model = args.served_model or _json(f"{url}/models")["data"][0]["id"]
    made_with = {"model": model, "prompt": template, "url": url}
    file = FoundFile(pathlib.Path(f"{args.to}.found"), made_with)
    keys = [hashlib.sha256(f"{r.prompt}\0{r.answer}".encode()).hexdigest()[:16] for r in records]
    left = {
        key: record
        for key, record in zip(keys, records, strict=True)
        if key not in file.known and not _INTEGER.fullmatch(record.answer.strip())
    }
    with concurrent.futures.ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        ask = functools.partial(_asked, url, model, template)
        begun = {pool.submit(ask, record): key for key, record in left.items()}
        try:
            for done in concurrent.futures.as_completed(begun):
                file.add({begun[done]: done.result()})
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    rows, refused, rewritten = [], collections.Counter(), 0
    for key, record, row in zip(keys, records, rows_of(records), strict=True):
        found = file.known.get(key)
        if found is None:
            rows.append(row)
        elif (after := found["after"]) is None:
            refused[found["refused"]] += 1
        else:
            rewritten += 1
            # The solution is one of the problem as it was.
            row.pop("solution", None)
            row |= {"problem": after["problem"], "answer": after["answer"]}
            rows.append(row | {"original_problem": record.prompt, "original_answer": record.answer})
    print(f"{len(rows) - rewritten:,} answers were integers, {rewritten:,} are rewritten")
    for reason, count in refused.most_common():
        print(f"{count:,} left out: {reason}")
    write_rows(rows, args.to)
    print(f"{len(rows):,} problems written to {args.to}; every reply is in {args.to}.found")


def _asked(url: str, model: str, template: str, record: Record) -> dict[str, Any]:
    """What a model makes of a problem: before, reply, after, and why it is refused."""
    found: dict[str, Any] = {"before": {"problem": record.prompt, "answer": record.answer}}
    if not isinstance(record.prompt, str):
        return found | {"reply": "", "after": None, "refused": "a conversation"}
    fields = {"problem": record.prompt, "answer": record.answer}
    # One pass, so braces in a problem are not read as fields.
    text = _FIELD.sub(lambda match: fields[match[1]], template)
    message = {"role": "user", "content": text}
    body = {"model": model, "messages": [message], "temperature": 0}
    reply = _json(f"{url}/chat/completions", body)["choices"][0]["message"]["content"] or ""
    after, refused = read_reply(reply)
    return found | {"reply": reply, "after": after, "refused": refused}


def read_reply(reply: str) -> tuple[dict[str, str] | None, str]:
    """The problem and its integer answer in a reply, its last JSON object; None and why if there is none."""
    decoder = json.JSONDecoder()
    # The last ones: a model may quote the problem before it answers.
    for match in reversed([*re.finditer(r"\{", reply)][-50:]):
        try:
            value, _ = decoder.raw_decode(reply, match.start())
        except (ValueError, RecursionError):
            continue
        if not {"problem", "answer"} <= value.keys():
            continue
        problem, answer = value["problem"], str(value["answer"]).strip()
        if value["answer"] is None:
            return None, "the model does not rewrite it"
        if not isinstance(problem, str) or not problem.strip():
            return None, "the new problem is empty"
        if isinstance(value["answer"], bool) or not _INTEGER.fullmatch(answer):
            return None, "the new answer is no integer"
        return {"problem": problem, "answer": str(int(answer))}, ""
    return None, "the reply has no problem and answer as JSON"


def _json(url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        why = f"status {error.code}, {error.read(300).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        why = str(error)
    raise UserError(
        f"{url} does not answer as OpenAI's API: {why}; start a server, as by jaxrl serve, and run the "
        "command again, which goes on"
    )
