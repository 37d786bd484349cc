r"""The graders `math` and `math_verify` on the labelled cases of tests/extensions/answers/math_answers.tsv.

    python benchmarks/graders.py             the table of docs/answer_reader.md
    python benchmarks/graders.py --cases     also every case that they judge differently

The first text of a case is the ground truth, the second is put into a box as the response.
"""

import argparse
import collections
import datetime
import importlib.metadata
import pathlib

import numpy as np

from jaxrl.rewards import Graders, GradingTask, Response

CASES = pathlib.Path(__file__).parents[1] / "tests/extensions/answers/math_answers.tsv"
PACKAGES = "math-verify", "latex2sympy2_extended", "sympy"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--cases", action="store_true", help="name the cases that differ")
    show_cases = arguments.parse_args().cases
    cases = [line.split("\t") for line in CASES.read_text().split("\n")[:-1]]
    samples = [
        Response(rf"\boxed{{{answer}}}", np.zeros(1, np.int32), GradingTask(truth))
        for _, _, truth, answer in cases
    ]
    verdicts = []
    for name in ("math", "math_verify"):
        graders = Graders((name, {}))
        verdicts.append(graders.grade(samples))
        graders.close()
    count = collections.defaultdict(lambda: [0, 0, 0])
    differ = []
    for (label, kind, truth, answer), ours, theirs in zip(cases, *verdicts, strict=True):
        for row in ((label, kind), (label, "all")):
            count[row] = [
                n + m for n, m in zip(count[row], (1, ours.correct, theirs.correct), strict=True)
            ]
        if ours.correct != theirs.correct:
            differ.append((label, kind, truth, answer, ours.correct, theirs.correct))
    if show_cases:
        print(*("\t".join(map(str, row)) for row in differ), sep="\n")
    failed = sum(verdict.failure is not None for verdict in verdicts[1])
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"{datetime.date.today()}, {versions}; {failed} calls of math-verify failed\n")
    for label, title in ("same", "equal answers"), ("other", "different answers"):
        print(
            f"| {title} | cases | `math` says right | `math_verify` says right |\n|---|---|---|---|"
        )
        kinds = [(kind, row) for (found, kind), row in count.items() if found == label]
        for kind, row in sorted(kinds, key=lambda item: -item[1][0]):
            print(f"| {kind} | " + " | ".join(map(str, row)) + " |")
        print()


if __name__ == "__main__":
    main()
