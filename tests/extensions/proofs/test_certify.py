"""Certificates: the layouts they try, what they require, and the runs that they stop."""

import json
import pathlib

import pytest
from tiny_runs import tiny_config

from jaxrl import cli
from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import EXIT_USER_ERROR, UserError
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.trainer import program
from jaxrl_proofs import certify_command
from jaxrl_proofs.certificate import check, faults, subject_of
from jaxrl_proofs.certify_command import certified, smaller_layout

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("given", "small", "shares"),
    [
        # dapo_qwen32b: both axes stay, and the tensor axis grows back first.
        (("1-8-16", "1-8-1-16", 16, 1), "1-4-2 / 1-4-1-2", (2, 1)),
        # dapo_qwen3_30b_a3b: three kinds of axes fill eight devices.
        (("1-4-8", "1-4-1-8", 2, 4), "1-2-4 / 1-2-1-4", (2, 2)),
        (("1-1-8", "", 8, 1), "1-1-8 / 1-1-1-8", (8, 1)),
        (("1-1-1", "", 1, 1), "1-1-1 / 1-1-1-1", (1, 1)),
        # Generation has two tensor shards of four, and the other two sample apart.
        (("1-4-4", "1-2-2-4", 1, 1), "1-4-2 / 1-2-2-2", (1, 1)),
        # Stages that generation joins, tensor shards and data: three kinds of two.
        (("4-2-8", "1-2-4-8", 1, 1), "2-2-2 / 1-2-2-2", (1, 1)),
        # Four kinds do not fit eight devices, and all stay.
        (("2-2-4", "1-2-2-4", 2, 1), "2-2-4 / 1-2-2-4", (2, 1)),
        # Generation has more tensor shards than training.
        (("1-1-16", "1-4-1-4", 8, 1), "1-1-8 / 1-2-1-4", (4, 1)),
    ],
)
def test_every_kind_of_axis_stays(given, small, shares):
    train, generate, fsdp, expert = given
    settings = LayoutConfig(train=train, generate=generate, fsdp=fsdp, expert=expert)
    layout = smaller_layout(ParallelLayout.from_config(settings), 8)
    assert (layout.name, (layout.fsdp, layout.expert)) == (small, shares)
    # A layout that a recipe could have.
    again = LayoutConfig(
        train=small.split(" / ")[0],
        generate=layout.generate,
        fsdp=layout.fsdp,
        expert=layout.expert,
    )
    assert ParallelLayout.from_config(again) == layout


def row(kind: str, *, deterministic=False, differ=0, mean=1e-6) -> dict:
    return {
        "type": kind,
        "deterministic": deterministic,
        "differ": differ,
        "samples": 64,
        "mean": mean,
        "bound": 1e-4 if kind == "float32" else 0.2,
    }


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row("float32"), row("bfloat16", differ=20, mean=0.03)], []),
        ([row("float32", differ=3)], ["float32: 3 of 64 samples differ by the layout"]),
        (
            [row("bfloat16, int8 cache", deterministic=True, differ=1)],
            ["bfloat16, int8 cache, deterministic: 1 of 64 samples differ by the layout"],
        ),
        (
            [row("float32", mean=2e-4)],
            [
                "float32: log-probabilities of sampler and trainer are 0.0002 apart, more than 0.0001"
            ],
        ),
        (
            [row("bfloat16", mean=float("nan"))],
            ["bfloat16: log-probabilities of sampler and trainer are nan"],
        ),
        ([{"type": "bfloat16", "deterministic": True, "error": "4 experts over 8 devices"}], []),
    ],
)
def test_what_a_certificate_requires(rows, says):
    found = faults({"rows": rows})
    assert len(found) == len(says) and all(map(str.startswith, found, says)), found


def written(folder: pathlib.Path, config: Config, **changes) -> str:
    path = folder / "certificate.json"
    subject = subject_of(config) | changes.pop("subject", {})
    path.write_text(json.dumps({"subject": subject, "rows": [row("float32")]} | changes))
    return str(path)


def with_certificate(tmp_path: pathlib.Path, **changes) -> Config:
    plain = tiny_config(tmp_path, mesh__train="1-2-4")
    path = written(tmp_path, plain, **changes)
    return tiny_config(tmp_path, mesh__train="1-2-4", run__certificate=path)


def test_a_certificate_of_the_run_is_accepted(tmp_path):
    check(with_certificate(tmp_path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"subject": {"model.d_model": "64"}},
            "is of model.d_model 64, and this run has 32; make it",
        ),
        (
            {"subject": {"mesh.train": "'1-8-1'"}},
            "is of mesh.train '1-8-1', and this run has '1-2-4'",
        ),
        (
            {"subject": {"rollout.dtype": "'bfloat16'"}},
            "is of rollout.dtype 'bfloat16', and this run",
        ),
        (
            {"subject": {"the code of jaxrl": "'00'"}},
            "is of the code of jaxrl '00', and this run has",
        ),
        ({"rows": [row("float32", differ=3)]}, "did not hold: float32: 3 of 64 samples differ"),
        ({"rows": 3}, "is no certificate"),
    ],
)
def test_a_run_ends_at_its_start_by_a_certificate_of_another(tmp_path, changes, says):
    config = with_certificate(tmp_path, **changes)
    with pytest.raises(
        UserError, match=r"^run\.certificate .*jaxrl certify --config RECIPE"
    ) as error:
        program.train(config)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not config.run_folder.rl.metrics.exists()


@pytest.mark.parametrize(("text", "says"), [(None, "does not exist"), ("[", "is no JSON")])
def test_a_certificate_that_cannot_be_read_is_told(tmp_path, text, says):
    path = tmp_path / "certificate.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says):
        check(tiny_config(tmp_path, run__certificate=str(path)))


def kinds_of(certificate) -> list[tuple]:
    return [(row["type"], row["deterministic"], row["differ"]) for row in certificate["rows"]]


@pytest.mark.long
def test_a_small_recipe_is_certified_in_float32(monkeypatch):
    for name, value in (("_TIMED", 1), ("_WIDTH", 64), ("_MOST_TOKEN_IDS", 256), ("_PROMPTS", 8)):
        monkeypatch.setattr(certify_command, name, value)
    first = certify_command._kinds
    monkeypatch.setattr(certify_command, "_kinds", lambda config: first(config)[:1])
    config = load_config(Config, str(CONFIGS / "dapo_tiny.py"), {"mesh.train": "1-2-4"})
    lines = []
    certificate = certified(config, lines.append)
    assert certificate["on"] == ["1-2-4 / 1-2-1-4"] and faults(certificate) == []
    assert kinds_of(certificate) == [("float32", False, 0)] and len(lines) == 3
    (measured,) = certificate["rows"]
    assert measured["drawn"] == 1 and measured["samples"] == 32
    # The layouts do round differently.
    assert 0 < measured["mean"] < measured["max"] < 1e-4 and 0 < measured["layouts"] < 1e-4


@pytest.mark.slow
def test_a_recipe_is_certified(monkeypatch):
    """In float32 and with `deterministic` layouts have equal samples; in bfloat16 alone they do not."""
    monkeypatch.setattr(certify_command, "_TIMED", 1)
    config = load_config(Config, str(CONFIGS / "dapo_qwen32b.py"), {})
    certificate = certified(config, print)
    assert certificate["on"] == ["1-4-2 / 1-4-1-2"] and faults(certificate) == []
    bf16, cache = "bfloat16", "bfloat16, int8 cache"
    exact, rounded, alike, more, alike_too = kinds_of(certificate)
    assert (exact, alike, alike_too) == (
        ("float32", False, 0),
        (bf16, True, 0),
        (cache, True, 0),
    )
    assert rounded[:2] == (bf16, False) and more[:2] == (cache, False)
    assert rounded[2] > 0 and more[2] > 0
    assert certificate["rows"][0]["drawn"] == 1 > certificate["rows"][1]["drawn"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no_such.py",), 'no recipe file "no_such.py"'),
        (("sft_tiny",), "trains without sampling"),
        (("dapo_tiny", "--config.mesh.layout=auto"), "mesh.layout 'auto' is open"),
    ],
)
def test_what_cannot_be_certified_ends_in_a_line(arguments, says, capsys):
    assert cli.main(["jaxrl", "certify", "--config", *arguments]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
