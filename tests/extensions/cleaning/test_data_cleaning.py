"""`jaxrl data --pass_rate` and `--rewrite_answers`: a file of problems, cleaned by what a model says."""

import contextlib
import http.server
import json
import pathlib
import threading

import jax
import numpy as np
import pytest
from arithmetic_backend import ArithmeticBackend

from jaxrl import cli
from jaxrl.commands import evaluate
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.models.decoder import init_params
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl_cleaning.data_cleaning import _AT_ONCE, read_reply

MODEL = ModelConfig(
    vocab_size=320, num_layers=2, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8
)


def data(*arguments) -> int:
    return cli.main(["jaxrl", "data", *map(str, arguments)])


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def write_rows(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# Pass rates


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four: Answer: 7"] * 4, vocab_size=300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizer) -> pathlib.Path:
    root = tmp_path_factory.mktemp("model")
    tokenizer.save(root / "tokenizer")
    params = init_params(MODEL, jax.random.key(0))
    save_checkpoint(params, MODEL, root / "tiny", dtype="float32", source=root / "tokenizer")
    return root / "tiny"


class Model:
    """Gives the k-th answer to a problem "n ..." right if k < n; counts its answers."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, 0
        self.fails_after = 10**9

    def __call__(self, prompt, index):
        self.asked += 1
        if self.asked > self.fails_after:
            raise KeyboardInterrupt
        right = int(self.tokenizer.decode(prompt).split()[0])
        text = f"Answer: {7 if index < right else 8}"
        return np.append(self.tokenizer.encode(text), self.tokenizer.eos_id).astype(np.int32)


@pytest.fixture
def model(monkeypatch, tokenizer) -> Model:
    model = Model(tokenizer)
    monkeypatch.setattr(
        evaluate,
        "build_backend",
        lambda driver, shape, mesh, config, decode: ArithmeticBackend(mesh, config, decode, model),
    )
    return model


SMALL = [
    "--config.rollout.max_response_tokens=12",
    "--config.rollout.slots=8",
    "--config.rollout.prefill_prompts=2",
    "--config.data.template={prompt}",
]


def cleaned(directory, folder, *arguments, n=4) -> int:
    file = folder / "problems.jsonl"
    to = folder / "kept.jsonl"
    return data(file, "--pass_rate", directory, "--n", n, "--to", to, *SMALL, *arguments)


def problems(folder, rights) -> None:
    rows = [
        {"problem": f"{right} of {n}", "answer": 7, "level": n, "solution": "so"}
        for n, right in enumerate(rights)
    ]
    write_rows(folder / "problems.jsonl", rows)


def test_rows_are_kept_by_how_often_a_model_answers_them(directory, model, tmp_path, capsys):
    problems(tmp_path, [0, 1, 2, 4, 3, 0])
    assert cleaned(directory, tmp_path, "--between", 0.25, 0.5) == 0
    kept = rows_of(tmp_path / "kept.jsonl")
    # 1 and 2 of 4; the row stays as it is.
    assert [(row["problem"], row["pass_rate"]) for row in kept] == [
        ("1 of 1", 0.25),
        ("2 of 2", 0.5),
    ]
    assert kept[0]["answer"] == "7" and kept[0]["level"] == 1 and kept[0]["solution"] == "so"
    assert kept[0]["pass_samples"] == 4
    out = capsys.readouterr().out
    table = dict(line.rsplit(None, 1) for line in out.splitlines()[-7:-1])
    expected = {"never": "2", "up to 25%": "1", "up to 50%": "1", "up to 75%": "1", "always": "1"}
    assert table == {"right answers": "problems", **expected}
    assert "2 of 6 problems, with rates from 0.25 to 0.5" in out


def test_other_bounds_ask_nothing_again_and_other_settings_are_refused(
    directory, model, tmp_path, capsys
):
    problems(tmp_path, [0, 1, 2])
    assert cleaned(directory, tmp_path) == 0
    assert model.asked == 3 * 4 and len(rows_of(tmp_path / "kept.jsonl")) == 3
    assert cleaned(directory, tmp_path) == 2
    assert "kept.jsonl exists; remove it" in capsys.readouterr().err
    (tmp_path / "kept.jsonl").unlink()
    assert cleaned(directory, tmp_path, "--between", 0.5, 1) == 0
    assert model.asked == 3 * 4
    assert [row["pass_rate"] for row in rows_of(tmp_path / "kept.jsonl")] == [0.5]
    (tmp_path / "kept.jsonl").unlink()
    assert cleaned(directory, tmp_path, n=2) == 2
    message = "kept.jsonl.found is of other problems, another model or other settings; remove it"
    assert message in capsys.readouterr().err
    assert model.asked == 3 * 4
    assert cleaned(directory, tmp_path, "--between", 0.9, 1) == 2
    assert "no problem has a rate from 0.9 to 1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no JSON\n", '{"settings": []}\n', "[1]\n[2]\n"])
def test_another_file_in_the_place_is_left_alone(text, directory, model, tmp_path, capsys):
    problems(tmp_path, [1])
    found = tmp_path / "kept.jsonl.found"
    found.write_text(text)
    assert cleaned(directory, tmp_path) == 2
    assert "kept.jsonl.found is " in (error := capsys.readouterr().err) and "remove it" in error
    assert found.read_text() == text and not model.asked


def test_a_command_goes_on_where_it_was_killed(directory, model, tmp_path):
    problems(tmp_path, [n % 3 for n in range(_AT_ONCE + 8)])
    model.fails_after = _AT_ONCE + 3
    with contextlib.suppress(KeyboardInterrupt):
        cleaned(directory, tmp_path, n=1)
    found = tmp_path / "kept.jsonl.found"
    assert len(rows_of(found)) == 1 + _AT_ONCE and not (tmp_path / "kept.jsonl").exists()
    # The kill may have torn a line.
    found.write_text(found.read_text() + '{"key": "abc", "ri')
    model.asked, model.fails_after = 0, 10**9
    assert cleaned(directory, tmp_path, n=1) == 0
    assert model.asked == 8 and len(rows_of(found)) == 1 + _AT_ONCE + 8
    rates = [row["pass_rate"] for row in rows_of(tmp_path / "kept.jsonl")]
    assert rates == [float(n % 3 > 0) for n in range(_AT_ONCE + 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.jsonl", "--pass_rate", "m"], "name the file of the result with --to"),
        (["--pass_rate", "m", "--to", "y.jsonl"], "name one file, and either --pass_rate or"),
        (["x.jsonl", "z.jsonl", "--rewrite_answers", "u", "--to", "y.jsonl"], "name one file, and"),
        (["x.jsonl", "--pass_rate", "m", "--rewrite_answers", "u"], "name one file, and either"),
        (
            ["x.jsonl", "--pass_rate", "m", "--to", "y.jsonl", "--between", "0.5", "0.1"],
            "two rates from 0 to 1, the lower first",
        ),
        (
            ["x.jsonl", "--rewrite_answers", "u", "--to", "y.jsonl"],
            "of the instructions with --prompt",
        ),
    ],
)
def test_what_is_missing_is_named(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "x.jsonl", [{"problem": "a", "answer": "1"}])
    assert data(*arguments) == 2
    assert message in capsys.readouterr().err


# Integer answers


class Server(http.server.ThreadingHTTPServer):
    """Answers as OpenAI's API does: with `replies` by the problem, and status 500 without one."""

    def __init__(self, replies):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.bodies = replies, []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        self._send(200, {"data": [{"id": "rewriter"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        text = body["messages"][0]["content"]
        reply = next((reply for key, reply in self.server.replies.items() if key in text), None)
        if reply is None:
            self._send(500, {"error": "no reply"})
        else:
            self._send(200, {"choices": [{"message": {"role": "assistant", "content": reply}}]})

    def _send(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


@pytest.fixture
def server():
    with contextlib.ExitStack() as stack:

        def start(replies) -> Server:
            server = stack.enter_context(Server(replies))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield start


REPLIES = {
    "a half": 'So m/n = 1/2.\n{"problem": "A half is {m}/n. m + n?", "answer": 3}',
    "a root": 'No.\n{"problem": "x", "answer": null}',
    "a third": "I do not know.",
    "pi": '{"problem": "pi?", "answer": 3.14}',
}
PROBLEMS = [
    {"problem": "Write {answer} a half.", "answer": "1/2", "level": 3, "solution": "It is 1/2."},
    {"problem": "What is a root?", "answer": "\\sqrt{2}"},
    {"problem": "And a third?", "answer": "1/3"},
    {"problem": "What is pi?", "answer": "\\pi"},
    {"problem": "1 + 1?", "answer": "2", "solution": "It is 2."},
]


def rewritten(server, folder, *arguments) -> int:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    prompt = ["--prompt", "shared/integer_answers.txt"]
    to = folder / "new.jsonl"
    return data(folder / "old.jsonl", "--rewrite_answers", url, *prompt, "--to", to, *arguments)


def test_answers_are_rewritten_as_integers(server, tmp_path, capsys):
    write_rows(tmp_path / "old.jsonl", PROBLEMS)
    made = server(REPLIES)
    assert rewritten(made, tmp_path) == 0
    first, last = rows_of(tmp_path / "new.jsonl")
    assert (first["problem"], first["answer"]) == ("A half is {m}/n. m + n?", "3")
    assert (first["original_problem"], first["original_answer"]) == (
        "Write {answer} a half.",
        "1/2",
    )
    assert first["level"] == 3 and "solution" not in first
    assert (last["problem"], last["answer"], last["solution"]) == ("1 + 1?", "2", "It is 2.")
    assert "original_problem" not in last
    out = capsys.readouterr().out
    assert "1 answers were integers, 1 are rewritten" in out
    for reason in (
        "the model does not rewrite it",
        "the reply has no problem and answer as JSON",
        "the new answer is no integer",
    ):
        assert f"1 left out: {reason}" in out
    # The problem is text, and no field of the instructions.
    (asked,) = (b for b in made.bodies if "a half." in b["messages"][0]["content"])
    assert "Problem:\nWrite {answer} a half.\n\nAnswer:\n1/2\n" in asked["messages"][0]["content"]
    assert (asked["model"], asked["temperature"]) == ("rewriter", 0)
    # Every row's before and after are kept.
    header, *found = rows_of(tmp_path / "new.jsonl.found")
    assert header["model"] == "rewriter" and len(found) == 4
    (half,) = (x for x in found if x["before"]["answer"] == "1/2")
    assert half["after"]["answer"] == "3" and half["reply"] == REPLIES["a half"]


def test_rewriting_goes_on_after_a_fault_of_the_server(server, tmp_path, capsys):
    write_rows(tmp_path / "old.jsonl", PROBLEMS)
    made = server({key: reply for key, reply in REPLIES.items() if key != "pi"})
    assert rewritten(made, tmp_path) == 2
    assert "status 500" in (error := capsys.readouterr().err) and "which goes on" in error
    before = len(rows_of(tmp_path / "new.jsonl.found")) - 1
    asked = len(made.bodies)
    made.replies = REPLIES
    assert rewritten(made, tmp_path) == 0
    assert len(made.bodies) - asked == 4 - before
    assert len(rows_of(tmp_path / "new.jsonl")) == 2
    (tmp_path / "new.jsonl").unlink()
    assert rewritten(made, tmp_path, "--served_model", "another") == 2
    assert "is of other problems, another model" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(tmp_path, capsys):
    write_rows(tmp_path / "old.jsonl", PROBLEMS)
    arguments = ["--rewrite_answers", "http://127.0.0.1:1/v1", "--to", tmp_path / "new.jsonl"]
    prompt = ["--prompt", "shared/integer_answers.txt"]
    assert data(tmp_path / "old.jsonl", *arguments, *prompt) == 2
    assert "http://127.0.0.1:1/v1/models does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reply", "after", "refused"),
    [
        ('{"problem": "p", "answer": 7}', {"problem": "p", "answer": "7"}, ""),
        ('{"problem": "p", "answer": "-07"} done', {"problem": "p", "answer": "-7"}, ""),
        # The last object counts, and braces of mathematics are none.
        (
            r'{"problem": "a", "answer": 1} \frac{1}{2} {"problem": "p", "answer": 2} \sqrt{2}',
            {"problem": "p", "answer": "2"},
            "",
        ),
        ('{"problem": " ", "answer": 7}', None, "the new problem is empty"),
        ('{"problem": 4, "answer": 7}', None, "the new problem is empty"),
        ('{"problem": "p", "answer": true}', None, "the new answer is no integer"),
        ('{"problem": "p", "answer": 7.0}', None, "the new answer is no integer"),
        ('{"problem": "p", "answer": [7]}', None, "the new answer is no integer"),
        ('{"problem": "p", "answer": 1e3}', None, "the new answer is no integer"),
        ('{"problem": "p"}', None, "the reply has no problem and answer as JSON"),
        ("{" * 9999, None, "the reply has no problem and answer as JSON"),
        ("", None, "the reply has no problem and answer as JSON"),
    ],
)
def test_replies(reply, after, refused):
    assert read_reply(reply) == (after, refused)
