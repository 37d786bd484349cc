"""A task that a small model learns in seconds: repeat a digit, after a running number that says nothing."""

import json
import pathlib


def write_problems(folder: pathlib.Path) -> None:
    """Writes `train.jsonl` and `evaluation.jsonl`, with written solutions."""
    for name, numbers in (("train", range(100, 400)), ("evaluation", range(400, 424))):
        rows = [
            {"problem": f"{n} repeat {digit}", "answer": digit, "solution": f"Answer: {digit}"}
            for n, digit in ((n, n * 7 % 10) for n in numbers)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
