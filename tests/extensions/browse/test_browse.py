"""`jaxrl browse`: hostile text, large files, filters and the command."""

import html.parser
import os
import pathlib
import re
import signal
import sys
import time
import urllib.error
import urllib.request

import pytest
from extras import import_extra
from processes import started

for package in ("pydantic", "starlette", "uvicorn"):
    import_extra("dev", package)

# Comes with `openai`; Starlette's test client needs it.
import_extra("dev", "httpx2")
from starlette.testclient import TestClient  # noqa: E402

from jaxrl import cli  # noqa: E402
from jaxrl.errors import UserError  # noqa: E402
from jaxrl.tracking.sample_rows import to_lines  # noqa: E402
from jaxrl_browse.browse_app import SampleFile, build_app, passing  # noqa: E402
from jaxrl_browse.browse_command import sample_files  # noqa: E402

ROOT = pathlib.Path(__file__).parents[3]
HERE = "http://127.0.0.1"
HOSTILE = {
    "script": "<script>alert(1)</script>",
    "textarea": "</textarea></pre><img src=x onerror=alert(1)>",
    "attribute": '" onmouseover="alert(1)" x=\'',
    "template": "{{ 7 * 7 }}{% raw %}",
    "bidi": "\u202etxt.exe\u2069",
    "NUL": "a\x00b\x1b[2J",
    "surrogate": "half \ud83e pair",
    "comment": "<!-- ]]> <style>*{display:none}</style>",
    "entity": "&lt;b&gt;&#0;",
    "link": "javascript:alert(1) https://evil.example/x.png",
}


def row_of(number=0, **changes) -> dict:
    row = {
        "step": 10,
        "source": "sums",
        "prompt_id": number // 4,
        "sample": number % 4,
        "prompt": f"what is {number // 4}?",
        "answer": "7",
        "completion": f"it is {number}",
        "prediction": str(number),
        "correct": number % 2 == 0,
        "failure": {"kind": "timeout", "message": "4 s"} if number in (1, 5) else None,
        "score": 1.0,
        "shaping": 0.0,
        "reward": number / 10,
        "reward_parts": {"grader": 1.0},
        "length": number + 1,
        "truncated": number == 3,
        "stop_reason": "stop_token",
        "entropy": 0.1,
        "token_pieces": {
            "text": ["it", " is", f" {number}"],
            "rollout_logprob": [-0.01, -1.5, -9.0],
            "old_logprob": [-0.01, -1.6, -7.0],
        },
    }
    return row | changes


def write(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(row if isinstance(row, bytes) else to_lines([row]) for row in rows))


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "run/rollouts/step_10.jsonl", [row_of(i) for i in range(8)])
    write(
        tmp_path / "run/rollouts/step_1.jsonl", [row_of(i, step=1, source="<b>") for i in range(2)]
    )
    return tmp_path / "run"


def opened(path) -> TestClient:
    return TestClient(build_app(sample_files(path), title="a <run>"), base_url=HERE)


@pytest.fixture
def client(run):
    return opened(run)


class Page(html.parser.HTMLParser):
    """Parses a page into its tags, attributes and text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def cells(self) -> list[str]:
        return [
            attrs["href"] for tag, attrs in self.tags if tag == "a" and "/sample/" in attrs["href"]
        ]


def get(client, path) -> Page:
    response = client.get(path)
    assert response.status_code == 200, response.text
    return Page(response.text)


def assert_harmless(page: Page) -> None:
    known = """html head meta title link body main h1 h2 a form label input select option fieldset legend
        button p b s div table thead tbody tr th td span small nav dl dt dd section pre ul li bdi"""
    assert {tag for tag, _ in page.tags} <= {*known.split()}
    for tag, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on") or name in ("style", "src")], (
            tag
        )
        href = attrs.get("href", "/")
        assert href.startswith(("/", "?", "data:,")) and not href.startswith("//"), href


# Lists


def test_the_newest_step_comes_first(client):
    page = get(client, "/")
    assert page.cells()[:2] == ["/sample/step_10/0", "/sample/step_10/0"]
    assert "8 samples" in re.sub(r"\s+", " ", page.text)
    assert_harmless(page)
    page = get(client, "/?file=step_1")
    assert page.cells()[-1] == "/sample/step_1/1" and "2 samples" in re.sub(r"\s+", " ", page.text)
    assert_harmless(page)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", 8),
        ("file=step_1&source=%3Cb%3E", 2),
        ("file=step_2", 8),
        ("source=sums", 8),
        ("correct=yes", 4),
        ("truncated=yes", 1),
        ("failure=timeout", 2),
        ("failure=any+kind&source=sums", 2),
        ("failure=none", 6),
        ("failure=died", 0),
        ("reward_from=0.35&reward_to=0.55", 2),
        ("length_to=1", 1),
        ("text=WHAT+is+1", 4),
        ("text=it+is+7", 1),
        ("reward_from=abc&page=nan&order=x&correct=maybe", 8),
        ("reward_from=1e999&page=-7&length_from=", 8),
    ],
)
def test_filters(client, query, found):
    page = get(client, f"/?{query}")
    assert f"{found} samples" in re.sub(r"\s+", " ", page.text)
    assert_harmless(page)


def test_a_grader_failure_is_shown(client):
    names = {a["name"] for tag, a in get(client, "/").tags if tag == "select"}
    assert "failure" in names and "grader failed: timeout" in get(client, "/").text
    page = re.sub(r"\s+", " ", get(client, "/sample/step_10/5").text)
    assert "grader failedtimeout: 4 s" in page
    assert "grader failed" not in get(client, "/sample/step_10/4").text


def test_orders(run):
    rows = SampleFile(run / "rollouts/step_10.jsonl").rows
    rows[5]["reward"] = None  # unknown values come last

    def lines(order, **given):
        return [row["line"] for row in passing(rows, {"order": order, **given})]

    assert lines("reward, highest") == [7, 6, 4, 3, 2, 1, 0, 5]
    assert lines("reward, lowest", correct="yes") == [0, 2, 4, 6]
    assert lines("longest")[:2] == [7, 6] and lines("shortest")[:2] == lines("")[:2] == [0, 1]


def test_the_form_keeps_its_fields(client):
    page = get(client, "/?text=%22%3E%3Cscript%3E&reward_from=1&correct=no")
    inputs = {a["name"]: a.get("value") for tag, a in page.tags if tag == "input"}
    assert inputs["text"] == '"><script>' and inputs["reward_from"] == "1"
    chosen = [a["value"] for tag, a in page.tags if tag == "option" and "selected" in a]
    assert chosen == ["step_10", "no"]


def test_pages_of_a_long_list(tmp_path):
    write(tmp_path / "samples.jsonl", [row_of(i) for i in range(120)])
    client = opened(tmp_path / "samples.jsonl")
    page = get(client, "/?text=it&page=2")
    assert len(page.cells()) == 100 and page.cells()[0] == "/sample/samples/50"
    links = [a["href"] for tag, a in page.tags if tag == "a" and a["href"].startswith("?")]
    assert links == [f"?text=it&page={n}&file=samples" for n in (1, 1, 3, 3)]
    assert len(get(client, "/?page=99").cells()) == 40


# One sample


def test_tokens_are_coloured_by_logprob(client):
    page = get(client, "/sample/step_10/5")
    spans = [a for tag, a in page.tags if tag == "span" and "title" in a]
    assert [a["class"] for a in spans] == ["p0", "p3", "p5"]
    assert spans[1]["title"] == "sampler -1.5000 (22.3%), trainer -1.6000 (20.2%), gap -0.1000"
    assert "it is 5" in page.text and "what is 1?" in page.text
    assert_harmless(page)


def test_tokens_are_coloured_by_the_age_of_their_weights(tmp_path):
    pieces = {**row_of()["token_pieces"], "version": [3, 9, 10]}
    write(tmp_path / "samples.jsonl", [row_of(token_pieces=pieces), row_of(1)])
    page = get(opened(tmp_path / "samples.jsonl"), "/sample/samples/0?color=version")
    spans = [a for tag, a in page.tags if tag == "span" and "title" in a]
    assert [a["class"] for a in spans] == ["p5", "p1", "p0"]
    assert spans[0]["title"].endswith("weights of step 3")
    assert "newest weights" in str(
        get(opened(tmp_path / "samples.jsonl"), "/sample/samples/1").tags
    )


def test_a_sample_links_to_the_others_of_its_prompt(client):
    assert get(client, "/sample/step_10/5").cells() == [
        f"/sample/step_10/{n}?color=logprob" for n in (4, 6, 7)
    ]


@pytest.mark.parametrize(
    "path",
    ["/sample/step_10/99", "/sample/nothing/0", "/sample/..%2Fconfig/0", "/x", "/sample/a/-1"],
)
def test_missing_pages_are_404(client, path):
    response = client.get(path)
    assert response.status_code == 404 and "text/plain" in response.headers["content-type"]
    assert "content-security-policy" in response.headers


# Hostile text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_escaped(tmp_path, name):
    text = HOSTILE[name]
    row = row_of(
        **dict.fromkeys(("prompt", "completion", "answer", "prediction", "source"), text),
        reward_parts={text: 1.0},
        stop_reason=text,
        failure={"kind": text, "message": text},
        token_pieces={"text": [text, text], "rollout_logprob": [-1, -2]},
    )
    path = tmp_path / "samples.jsonl"
    write(path, [row, {k: v for k, v in row.items() if k != "token_pieces"}])
    client = TestClient(build_app(sample_files(path), title=text), base_url=HERE)
    for at in ("/", "/sample/samples/0", "/sample/samples/1", "/sample/samples/0?color=gap"):
        page = get(client, at)
        assert_harmless(page)
        raw = client.get(at).content.decode()
        assert not set("\x00\x1b\u202e\u2069") & set(raw)
    shown = {"bidi": "\\u202etxt.exe\\u2069", "NUL": "a\\x00b\\x1b[2J", "surrogate": "\\ud83e"}
    assert shown.get(name, text) in get(client, "/sample/samples/1").text
    # The search finds it by its visible form.
    rows = SampleFile(path).rows
    assert len(passing(rows, {"text": shown.get(name, text)})) == 2
    assert len(passing(rows, {"source": rows[0]["source"]})) == 2


def test_a_megabyte_of_text_is_shown_in_pages(tmp_path):
    path = tmp_path / "samples.jsonl"
    long = "x" * 1_000_000 + " the end"
    pieces = {"text": ["y"] * 9_999 + ["z" * 500_000], "rollout_logprob": [-1.0] * 10_000}
    whole = row_of(0, completion=long, prompt=long, token_pieces=pieces)
    plain = {k: v for k, v in row_of(1, completion=long).items() if k != "token_pieces"}
    write(path, [whole, plain])
    client = opened(path)
    for at in ("/", "/sample/samples/0", "/sample/samples/0?page=5", "/sample/samples/1"):
        start = time.process_time()
        assert len(client.get(at).content) < 400_000
        assert time.process_time() - start < 2
    assert "the end" in get(client, "/").text
    assert get(client, "/sample/samples/1?page=26").text.count("the end") == 1


# Rules of the server


def test_the_content_security_policy_forbids_scripts(client):
    for at in ("/", "/sample/step_10/0", "/browse.css"):
        headers = client.get(at).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script" not in policy
        # The page's own empty icon; a browser would note each time that it was blocked.
        assert "img-src data:;" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert client.post("/").status_code == 405


# Files that change


def test_growing_and_replaced_files_are_read_again(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, [row_of(0)])
    client = opened(path)

    def count():
        return int(re.search(r"(\d+)\s+samples", get(client, "/").text)[1])

    with path.open("ab") as file:
        file.write(to_lines([row_of(1), row_of(2)])[: -len(to_lines([row_of(2)])) + 50])
    assert count() == 2
    with path.open("ab") as file:
        file.write(to_lines([row_of(2)])[50:])
    assert count() == 3
    new = tmp_path / "new"
    write(new, [row_of(5)])
    os.replace(new, path)
    assert client.get("/sample/samples/2").status_code == 404
    assert count() == 1 and "it is 5" in get(client, "/?text=it+is+5").text
    path.unlink()
    assert client.get("/").status_code == client.get("/sample/samples/0").status_code == 404


def test_new_steps_appear(run, client):
    assert "step_20" not in get(client, "/").text
    write(run / "rollouts/step_20.jsonl", [row_of(0, step=20)])
    assert get(client, "/").cells() == ["/sample/step_20/0"] * 2


# The command


def test_folders_without_samples_are_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="has no samples"):
        sample_files(tmp_path)
    assert cli.main(["jaxrl", "browse", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    # A run that has started is waited for.
    (tmp_path / "config.txt").touch()
    assert list(sample_files(tmp_path)()) == []
    assert cli.main(["jaxrl", "browse", str(tmp_path), "--http_port=70000"]) == 2


def test_the_command_serves_until_a_signal(run):
    command = [sys.executable, "-m", "jaxrl", "browse", str(run), "--port=0"]
    with started([command], env={**os.environ, "JAX_PLATFORMS": "cpu"}) as (process,):
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found
        deadline = time.monotonic() + 60
        while b"step_10/0" not in page_at(found[0]):
            assert time.monotonic() < deadline
        # A page of another site whose name was pointed to this machine.
        rebound = urllib.request.Request(found[0], headers={"host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(rebound)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def page_at(url) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()
