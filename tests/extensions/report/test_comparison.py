"""`jaxrl report RUN RUN`: what the page compares, and what it refuses in one line."""

import json
import pathlib
import re

import pytest
from report_page import check_page

from jaxrl import cli
from jaxrl.errors import EXIT_USER_ERROR
from jaxrl_report.report_command import labels_of

ATTACK = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"


def rows(num_steps, *, evaluated="sums", best=0.8, length=20.0):
    """Rows of reinforcement learning that evaluate before the first step and every fifth step."""
    found = []
    for step in range(num_steps + 1):
        row = {"step": step, "time_s": 1e9 + step}
        if step % 5 == 0:
            row[f"val-core/{evaluated}/acc/mean@4"] = best * step / num_steps
            row[f"val-aux/{evaluated}/acc/mean@4/stderr"] = 0.03
        if step:
            row |= {
                "critic/rewards/mean": step / num_steps,
                "response_length/mean": length + step,
                "actor/entropy": 1 / step,
                "actor/grad_norm": 0.5 + step % 3,
                "actor/lr": 1e-6,
                "timing_s/step": 2.0 + step % 2,
                "perf/throughput": 1000.0,
                "perf/peak_memory_gb": 1.0 + step / 100,
            }
        found.append(row)
    return found


def samples(correct, prompts=("2 + 3 =", "7 - 4 =")):
    return [
        {"problem_key": f"key {i}", "prompt": p, "answer": "5"}
        | {"text": f"Answer to {p}", "correct": correct}
        for i, p in enumerate(prompts)
    ]


def write_run(folder, metrics=None, *, stage="rl", settings=None, **files):
    """A folder as a run leaves it. Keywords name samples_after and samples_before, or are step_N rows."""
    settings = {"name": "'sums'", "optim.lr": "1e-06", "run.num_steps": "20"} | (settings or {})
    for path, lines in (
        (folder / stage / "metrics.jsonl", rows(20) if metrics is None else metrics),
        *((folder / "rollouts" / f"{k}.jsonl", v) for k, v in files.items() if k[:4] == "step"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in files.items():
        if name.startswith("samples"):
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "config.txt").write_text("".join(f"{k} = {v}\n" for k, v in settings.items()))
    return folder


def report(tmp_path, *runs) -> str:
    out = tmp_path / "out" / "page.html"
    assert cli.main(["jaxrl", "report", *map(str, runs), "--out", str(out)]) == 0
    return out.read_text()


def refusal(capsys, *arguments) -> str:
    assert cli.main(["jaxrl", "report", *map(str, arguments)]) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def titles(text):
    return re.findall(r"<figcaption><b>(.*?)</b>", text)


def table_row(text, name):
    """Texts of the cells of a table row."""
    plain = text.replace("<wbr>", "")
    found = re.search(rf"<th>\s*{re.escape(name)}\s*</th>(.*?)</tr>", plain, re.DOTALL)
    assert found, name
    return [re.sub(r"<.*?>", "", cell).strip() for cell in re.findall(r"<td>(.*?)</td>", found[1])]


@pytest.fixture
def two(tmp_path):
    """A finished run, and one that was stopped after step 7 of 20."""
    one = write_run(
        tmp_path / "a" / "seed0",
        samples_before=samples(False),
        samples_after=samples(True),
        step_1=[],
    )
    other = write_run(
        tmp_path / "b" / "seed0",
        rows(20, best=0.4)[:8],
        settings={"optim.lr": "2e-06", "new.setting": "True"},
        samples_before=samples(False),
    )
    return one, other


def test_the_headline_has_each_run(tmp_path, two, capsys):
    text = report(tmp_path, *two)
    assert capsys.readouterr().out.startswith("report: ")
    assert table_row(text, "accuracy before training, sums mean@4") == ["0.0% ± 3.0%"] * 2
    last = table_row(text, "last accuracy, sums mean@4")
    assert last == ["80.0% ± 3.0%, step 20", "10.0% ± 3.0%, step 5"]
    assert table_row(text, "steps") == ["20 of 20", "7 of 20, not finished"]
    assert table_row(text, "seconds a step, median") == ["2.5", "3"]
    assert table_row(text, "tokens a second on a device, median") == ["1,000", "1,000"]
    assert table_row(text, "peak memory, GB") == ["1.2", "1.07"]
    assert table_row(text, "folder") == [str(run) for run in two]


def test_important_curves_come_first_and_the_others_are_folded(tmp_path, two):
    main, folded = report(tmp_path, *two).split("<details>", 1)
    assert titles(main) == [
        "Evaluation accuracy, sums mean@4",
        "Reward",
        "Response length",
        "Entropy",
        "Gradient norm",
        "Seconds a step",
    ]
    assert titles(folded) == ["perf/peak_memory_gb"]
    assert "Metrics with one value throughout: 3" in folded
    constant = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", folded)
    assert ("actor/lr", "1e-06") in constant and ("perf/throughput", "1,000") in constant
    legend = re.search(r'<ul class="legend">(.*?)</ul>', main, re.DOTALL)[1]
    assert re.findall(r"--c(\d)\).*?<span>(.*?)</span><b>(.*?)</b>", legend) == [
        ("0", "a", "80%"),
        ("1", "b", "10%"),
    ]


def test_settings_that_differ_are_a_table(tmp_path, two):
    text = report(tmp_path, *two).split("Settings that differ")[1]
    assert "2 of 4" in text
    assert table_row(text, "optim.lr") == ["1e-06", "2e-06"]
    assert table_row(text, "new.setting") == ["-", "True"]
    assert "run.num_steps" not in text.replace("<wbr>", "")


def test_samples_of_the_same_prompts_are_side_by_side(tmp_path, two):
    text = report(tmp_path, *two, write_run(tmp_path / "c" / "seed0"))
    shown = text.split("Answers to evaluation problems")[1]
    assert "of these 2, correct a: 2, b: 0, c: 0" in re.sub(r"\s+", " ", shown.replace("<wbr>", ""))
    first, second = shown.split("<article")[1:]
    assert "2 + 3 =" in first and "7 - 4 =" in second
    a, b, c = first.split('<div class="response">')[1:]
    assert "✓ correct" in a and "before training" not in a
    assert "✗ wrong" in b and "before training" in b
    assert "no sample" in c


def test_samples_of_the_newest_shared_step_are_side_by_side(tmp_path):
    def of_step(text, prompt="1 + 1 ="):
        row = {"prompt": prompt, "answer": "2", "completion": text, "correct": True}
        row["problem_key"] = prompt
        return [row, row | {"completion": "a second sample"}]

    one = write_run(tmp_path / "a", step_1=of_step("first"), step_10=of_step("tenth of a"))
    path = write_run(
        tmp_path / "b",
        step_10=[*of_step("tenth of b"), *of_step("alone", prompt="other")],
        step_20=of_step("twentieth"),
    )
    text = report(tmp_path, one, path)
    shown = text.split("Samples of training step 10")[1]
    assert shown.index("tenth of a") < shown.index("tenth of b")
    for absent in ("a second sample", "alone", "first", "twentieth"):
        assert absent not in shown


def test_problems_that_share_prompt_and_answer_are_all_shown(tmp_path):
    """They differ in other fields, such as the level of a game."""
    twins = samples(True, ["Play the game."] * 2)
    step = [{**row, "completion": f"move {i}"} for i, row in enumerate(twins)]
    # The other run has them in another order.
    runs = [
        write_run(tmp_path / "a", samples_after=twins, step_1=step),
        write_run(tmp_path / "b", samples_after=twins[::-1], step_1=step[::-1]),
    ]
    evaluated, trained = report(tmp_path, *runs).split("Samples of training step 1")
    assert evaluated.count("<article") == trained.count("<article") == 2
    for move in ("move 0", "move 1"):
        assert trained.count(move) == 2 and move in trained.split("<article")[1 + int(move[-1])]


def test_every_shared_stage_has_a_section(tmp_path):
    runs = [write_run(tmp_path / name) for name in "ab"]
    for run in runs:
        write_run(run, [{"step": s, "sft/loss": 1 / s} for s in range(1, 9)], stage="sft")
    text = report(tmp_path, *runs)
    sft = text.split("<h2>Supervised fine-tuning</h2>")[1]
    assert titles(sft)[0] == "Loss"
    assert text.index("<h2>Reinforcement learning</h2>") < text.index("<h2>Supervised")


def test_the_page_is_self_contained_and_untrusted_text_is_escaped(tmp_path, two):
    named = write_run(
        tmp_path / "<img src=x> & a_name",
        [row | {f"reward/{ATTACK}/mean": row["step"] * 2.0} for row in rows(20)],
        settings={"name": repr(ATTACK)},
        samples_after=samples(True, [ATTACK, "2 + 3 ="]),
        step_1=[{"prompt": ATTACK, "answer": ATTACK, "completion": ATTACK, "correct": True}],
    )
    again = write_run(tmp_path / "again", json.loads(json.dumps(rows(9))), samples_after=[])
    (again / "rollouts").mkdir()
    step_1 = (named / "rollouts" / "step_1.jsonl").read_text()
    (again / "rollouts" / "step_1.jsonl").write_text(step_1)
    text = report(tmp_path, named, again, *two)
    check_page(text)
    assert "<script" not in text and "<img" not in text
    assert text.count("&lt;script&gt;") >= 4


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/r/a/seed0", "/r/a/seed1"], ["seed0", "seed1"]),
        (["/r/a/seed0", "/r/b/seed0"], ["a", "b"]),
        (["/r/a/x/seed0", "/q/b/x/seed0"], ["r/a", "q/b"]),
        (["/r/a/m/seed0", "/r/b/m/seed1"], ["a/seed0", "b/seed1"]),
        (["/r/a", "/r/a/b"], ["a", "a/b"]),
    ],
)
def test_labels_are_what_tells_the_folders_apart(paths, labels):
    assert labels_of([pathlib.Path(path) for path in paths]) == labels


def test_what_is_no_run_is_one_line(tmp_path, two, capsys):
    assert "config.txt does not exist; name the folder" in refusal(capsys, two[0], tmp_path / "no")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.txt").write_text("seed = 0\n")
    assert "has no metrics; compare it after its first step" in refusal(
        capsys, two[0], tmp_path / "odd"
    )


def test_too_few_and_too_many_runs_are_one_line(tmp_path, two, capsys):
    assert "1 run named; name 2 to 8" in refusal(capsys, two[0])
    runs = [write_run(tmp_path / str(i)) for i in range(9)]
    assert "9 runs named; name 2 to 8" in refusal(capsys, *runs)


def test_damaged_metrics_are_one_line(two, capsys):
    (two[1] / "rl" / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 2}\n')
    assert "metrics.jsonl:2: not a row" in refusal(capsys, *two)
