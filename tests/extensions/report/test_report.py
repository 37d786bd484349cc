"""The report: what it shows, what it leaves out, and that untrusted text stays text."""

import re

import numpy as np
from report_page import check_page

from jaxrl_report import plots
from jaxrl_report.page import PromptResponses, Response, write_report
from jaxrl_report.run_report import evaluation_lines, sources_of


def _rl_rows(num_steps=40):
    rng = np.random.default_rng(0)
    rows = []
    for step in range(num_steps):
        p = step / num_steps
        row = {
            "step": step,
            "time_s": 1e9 + step,
            "critic/rewards/mean": 2 * p - 1 + rng.normal(0, 0.05),
            "critic/score/mean": 2 * p - 0.9,
            "train/accuracy": p,
            "actor/entropy": 1 - p / 2,
            "actor/mean_token_prob": 0.5 + p / 2,
            "response_length/mean": 20 + 10 * p,
            "actor/pg_clipfrac_high": 0.001,
            "actor/pg_clipfrac_low": 0.0005,
            "train/num_gen_batches": 2.0,
            "perf/throughput": 5e4,
            "timing_s/gen": 1.5,
            "timing_s/update_actor": 0.5,
        }
        if step % 10 == 0:
            row["val-core/sums $x$ <b>/acc/mean@4"] = p
            row["timing_s/testing"] = 1.0
        rows.append(row)
    return rows


def _sft_rows():
    return [{"step": s, "sft/loss": 2 / s, "sft/mean_token_prob": 1 - 1 / s} for s in range(1, 30)]


SAMPLE = PromptResponses(
    "5 + 7 - 3 =",
    "9",
    [("Before", Response("Answer: 1", False)), ("After", Response("5 + 7 = 12 ; Answer: 9", True))],
)


def _write(path, **changes):
    arguments = {
        "title": "Chain sums",
        "summary": [("Evaluation accuracy", "91.2%")],
        "sections": [("SFT", _sft_rows()), ("DAPO", _rl_rows())],
        "samples": [SAMPLE],
        "config_text": "clip_high: 0.28",
    }
    write_report(path, **{**arguments, **changes})
    return path.read_text()


def _titles(text):
    return re.findall(r"<figcaption><b>(.*?)</b>", text)


def test_every_curve_is_drawn(tmp_path):
    text = _write(tmp_path / "report.html")
    sft, rl = text.split("<h2>DAPO")
    assert _titles(sft) == ["Loss", "Token probability"]
    assert _titles(rl) == [
        "Reward",
        "Accuracy",
        "Entropy",
        "Mean token probability",
        "Response length",
        "Clipped tokens",
        "Generation batches",
        "Throughput",
        "Time by phase",
    ]
    assert text.count("<svg") == 11
    for shown in ("Evaluation accuracy", "91.2%", "clip_high: 0.28", ">nats per token</text>"):
        assert shown in text


def test_accuracies_have_their_standard_errors(tmp_path):
    rows = [{"step": s, "val-core/a/acc/mean@2": s / 9} for s in (0, 3)]
    plain = _write(tmp_path / "a.html", sections=[("DAPO", rows)])
    rows = [row | {"val-aux/a/acc/mean@2/stderr": 0.1} for row in rows]
    assert [e.stderr.tolist() for e in plots._evaluation_series(rows)] == [[0.1, 0.1]]
    with_errors = _write(tmp_path / "b.html", sections=[("DAPO", rows)])
    bars = '<path d="[^"]*" clip-path="[^"]*" style="fill: none; stroke: var\\(--c0\\)'
    assert len(re.findall(bars, with_errors)) == len(re.findall(bars, plain)) + 2


def test_every_plot_has_a_text_alternative(tmp_path):
    page = _write(tmp_path / "report.html")
    labels = re.findall(r'<svg [^>]*role="img" aria-label="([^"]+)"', page)
    assert len(labels) == page.count("<svg") > 0
    assert any(
        re.fullmatch(r"Entropy over steps, in nats per token; last value [\d.]+", label)
        for label in labels
    )


def test_curves_without_data_are_left_out(tmp_path):
    rows = [
        {"step": s, "actor/entropy": 0.5, "actor/pg_clipfrac_high": float("nan")} for s in (1, 2)
    ]
    text = _write(tmp_path / "report.html", sections=[("DAPO", rows), ("Empty", [])])
    assert _titles(text) == ["Entropy"]
    assert "Empty" not in text


def test_a_run_of_one_step_has_a_report(tmp_path):
    text = _write(tmp_path / "report.html", sections=[("DAPO", _rl_rows(1))], samples=[])
    assert "Reward" in _titles(text)
    assert "Samples" not in text


def test_the_score_is_shown_only_if_shaping_changes_it(tmp_path):
    same = [{"step": s, "critic/rewards/mean": s, "critic/score/mean": s} for s in (1, 2)]
    assert "without shaping" not in _write(tmp_path / "a.html", sections=[("DAPO", same)])
    assert "without shaping" in _write(tmp_path / "b.html")


def test_equal_input_gives_equal_bytes(tmp_path):
    assert _write(tmp_path / "a.html") == _write(tmp_path / "b.html")


def test_the_page_is_well_formed_and_refers_to_nothing_outside(tmp_path):
    check_page(_write(tmp_path / "report.html"))


def test_untrusted_text_is_escaped(tmp_path):
    attack = (
        "</pre><script>alert('x')</script><img src=x onerror=alert(1)> &amp; \x00\x1b[2J \ud800"
    )
    responses = [("Before", Response(attack, False)), ("After", Response(attack, True))]
    pair = PromptResponses(attack, attack, responses)
    text = _write(tmp_path / "report.html", samples=[pair], config_text=attack, title=attack)
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 7
    assert "&amp;amp; \\x00\\x1b[2J \\ud800" in text
    assert "default-src 'none'" in text


def test_samples_stand_side_by_side_with_their_marks(tmp_path):
    text = _write(tmp_path / "report.html")
    before, after = text.index("✗ wrong"), text.index("✓ correct")
    assert before < text.index("Answer: 1<") < after < text.index("Answer: 9<")
    assert "of these 1, correct before: 0, after: 1" in text


def test_a_long_run_stays_small(tmp_path):
    rows = [{"step": s, "actor/entropy": float(s % 7)} for s in range(20_000)]
    assert len(_write(tmp_path / "report.html", sections=[("DAPO", rows)])) < 1_000_000


def test_the_report_says_which_step_was_evaluated():
    key = "val-core/sums/acc/mean@2"
    rows = [{"step": 0, key: 0.25}, {"step": 1}, {"step": 2, key: 0.5}, {"step": 3}]
    lines = evaluation_lines(rows, ("sums", "sums"), num_samples=2)
    assert lines == [
        ("evaluation accuracy before training", "25.0%"),
        ("evaluation accuracy after step 2 of 3, where it was last evaluated", "50.0%"),
    ]
    assert evaluation_lines(rows[:3], ("sums",), num_samples=2)[1:] == [
        ("evaluation accuracy after step 2", "50.0%")
    ]
    assert evaluation_lines(rows[:2], ("sums",), num_samples=2) == [
        ("evaluation accuracy before training", "25.0%")
    ]
    rows[2]["val-aux/sums/acc/mean@2/stderr"] = 0.0625
    last = ("evaluation accuracy after step 2 (± standard error)", "50.0% ± 6.2%")
    assert evaluation_lines(rows[:3], ("sums",), num_samples=2)[1] == last
    both = evaluation_lines(rows, ("sums", "words"), num_samples=2)
    assert both[0] == ("evaluation accuracy on sums before training", "25.0%") and len(both) == 2


def test_each_role_of_an_agent_has_its_own_accuracy():
    assert sources_of(("sums",), ()) == ("sums",)
    row = {
        "step": 0,
        "val-core/sums/solver/acc/mean@2": 0.25,
        "val-core/sums/checker/acc/mean@2": 1.0,
    }
    named = sources_of(("sums",), ("solver", "checker"))
    assert [x for _, x in evaluation_lines([row], named, num_samples=2)] == ["25.0%", "100.0%"]
