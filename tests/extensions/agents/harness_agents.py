"""An agent whose work is done by another program, by the kind of its problem."""

import pathlib
import sys
import tempfile

from jaxrl_agents.harnesses import run_harness

# Knows nothing of jaxrl: it asks the URL that it gets, twice, and leaves a file in its workspace.
HARNESS = r"""
import json, os, pathlib, signal, sys, time, urllib.error, urllib.request

kind, url, key = sys.argv[1], os.environ[sys.argv[2]], "nothing"
if kind == "key":
    key = os.environ["OPENAI_API_KEY"]
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if child := os.fork():
        pathlib.Path(sys.argv[3]).write_text(f"{os.getpid()} {child}")
    time.sleep(1000)

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

messages = [{"role": "user", "content": "begin"}]
try:
    for turn in range(2):
        said = ask(messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["error"]["code"])
    sys.exit(3)
pathlib.Path("turns.txt").write_text(str(len(messages) // 2))
print("x" * 20_000 + "ended")
"""


async def agent(client, problem):
    kind = problem.extra["kind"]
    with tempfile.TemporaryDirectory() as workspace:
        arguments = [kind, "JAXRL_SESSION_URL", problem.extra.get("file", "")]
        if kind in ("key", "wrong"):
            arguments[1] = "OPENAI_BASE_URL"
        ended = await run_harness(
            client, [sys.executable, "-c", HARNESS, *arguments], cwd=workspace
        )
        written = pathlib.Path(workspace, "turns.txt")
        if kind == "wrong":
            assert ended.output == "401 invalid_api_key\n", ended
        if not written.exists():
            return float(ended.status)
        assert ended.output.endswith("xended\n") and len(ended.output) == 10_000
        return float(written.read_text())
