"""One episode of each adapter with the real package, in its environment, against the endpoint of agents.

The policy is a script: it halves the range of a guessing game. Two games are played at the same time.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from chats import chat_tokenizer
from environments import python_of
from processes import free_port, started
from scripted_driver import serving_sessions

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
SEEDS = (7, 8)


def middles(most, hints):
    """The guesses of a policy that halves the range, one more than there are hints."""
    low, high, guesses = 1, most, []
    for hint in [*hints, None]:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if hint == "higher" else (low, guesses[-1] - 1)
    return guesses


def guesser(most, form):
    return lambda said: form.format(middles(most, re.findall("higher|lower", said))[-1])


def guesses_of(seed, most):
    """The number of guesses by hand: games draw the number first after they are seeded."""
    number, hints = random.Random(seed).randint(1, most), []
    while (guess := middles(most, hints)[-1]) != number:
        hints.append("higher" if number > guess else "lower")
    return len(hints) + 1


def play(name, environment, policy, *, extra="", most_turns=12):
    """Plays a game for each seed; returns the scores, and the messages of each game."""
    script = ["-P", HERE / "play_games.py", name]
    with endpoint(policy, len(SEEDS), most_turns) as (url, opened):
        seeds = zip(opened, SEEDS, strict=True)
        given = [f"{session.key}={seed}{extra}" for session, seed in seeds]
        out = run(python_of(environment), *script, url, *given, cwd=HERE)
    games = [messages_of(session, whole=most_turns > 3) for session in opened]
    return json.loads(out.splitlines()[-1]), games


@contextlib.contextmanager
def endpoint(policy, num_sessions, most_turns=12):
    """The endpoint of agents, with open sessions; a function from what was said so far is the policy."""
    tokenizer = chat_tokenizer()

    def say(prompt):
        # What follows the first turn of the user: the policy's turns and the answers to them.
        text = tokenizer.decode(prompt)
        return tokenizer.encode(policy(text.partition("assistant\n")[2]) + "<|im_end|>")

    served = serving_sessions(tokenizer, say, num_sessions, most_turns=most_turns, model="policy")
    with served as (url, opened, _):
        yield url, opened


def run(*command, cwd, **environment):
    path = {"PYTHONPATH": os.pathsep.join((f"{ROOT}", f"{ROOT / 'extensions'}", f"{HERE}"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def messages_of(session, *, whole=True):
    """The texts of a session's only branch, whose tokens are what was encoded and sampled.

    `whole` is false where a request was refused, which was encoded, too.
    """
    (conversation,) = session.conversations.values()
    (branch,), counts = conversation.branches(), conversation.counts
    assert branch.mask.sum() == counts.sampled
    assert not whole or counts.encoded + counts.sampled == len(branch.tokens)
    answered = [turn.path("parent") for turn in conversation._turns if turn.answer]
    return [
        text
        for turn in max(answered, key=len)
        for text in (*(m["content"] for m in turn.messages), turn.answer.view.content)
    ]


def test_gymnasium_frozen_lake():
    """From the first to the last square around the holes; a jump is no action."""
    path = ["jump", "down", "down", "right", "down", "right", "right"]
    scores, games = play("frozen_lake", "gymnasium", lambda said: path[said.count("assistant\n")])
    assert scores == [1.0, 1.0]
    squares = [0, None, 4, 8, 9, 13, 14]
    shown = ["This is no action." if s is None else f"You are on square {s}." for s in squares]
    assert games == [[text for pair in zip(shown, path, strict=True) for text in pair]] * 2


def test_textarena_guess_the_number():
    scores, games = play("textarena", "textarena", guesser(20, "[{}]"))
    assert scores == [1.0, 1.0]
    assert [len(game) // 2 for game in games] == [guesses_of(seed, 20) for seed in SEEDS]
    assert games[0][0].startswith("You are Player 0. You are playing Guess The Number.")
    assert all(
        re.fullmatch("The target number is (higher|lower).", hint) for hint in games[0][2::2]
    )


def test_skyrl_gym_gsm8k_in_turns():
    """A wrong answer in the right form has a third of .2."""
    answers = ["Let me see.", "#### 8", "#### 7"]
    scores, games = play("gsm8k", "skyrl_gym", lambda said: answers[said.count("assistant\n")])
    assert scores == pytest.approx([0.2 / 3 + 1] * 2)
    assert games[0][:2] == ["What is 3 + 4?", "Let me see."] and "'#### ANSWER'" in games[0][2]


def test_gem_guess_the_number():
    scores, games = play("gem", "gem", guesser(10, "\\boxed{{{}}}"))
    assert scores == [1.0, 1.0]
    assert [len(game) // 2 for game in games] == [guesses_of(seed, 10) for seed in SEEDS]
    assert games[0][0].endswith("Enter your next guess.")


@pytest.mark.parametrize("served", [False, True])
def test_openenv_of_a_class_and_of_a_server(served):
    policy = guesser(20, "{}")
    if served:
        port = free_port()
        app = [str(python_of("openenv")), "-m", "uvicorn", "openenv_app:app", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with started([app], cwd=HERE):
            wait_for(f"{url}/health")
            scores, games = play("openenv_server", "openenv", policy, extra=f'={{"url": "{url}"}}')
    else:
        scores, games = play("openenv_class", "openenv", policy)
    lengths = [guesses_of(seed, 20) for seed in SEEDS]
    assert scores == pytest.approx([1 - 0.1 * (n - 1) for n in lengths])
    assert [len(game) // 2 for game in games] == lengths
    assert games[0][0] == "Guess my number from 1 to 20."


def test_verifiers_with_a_harness_of_its_own():
    """Rewards are weighted: 2 for a win, -.1 for each turn; the number is the seed."""
    scores, games = play("verifiers", "verifiers", guesser(20, "{}"))
    # 10, 5, 7 and 10, 5, 7, 8.
    assert [game[1::2] for game in games] == [["10", "5", "7"], ["10", "5", "7", "8"]]
    assert scores == pytest.approx([2 - 0.3, 2 - 0.4])


def test_a_run_of_verifiers_ends_at_the_limit_of_turns():
    scores, games = play("verifiers", "verifiers", guesser(20, "{}"), most_turns=3)
    assert [len(game) // 2 for game in games] == [3, 3]
    assert scores == pytest.approx([2 - 0.3, 0])


def test_the_command_of_verifiers_as_an_agent(tmp_path):
    """In an environment of its own, with the URL and the key of a session; it names the session, too."""
    harness = ["--env.agent.harness.id", "vf_guess", "--env.agent.runtime.type", "subprocess"]
    with endpoint(guesser(20, "{}"), 1) as (url, (session,)):
        client = ["--client.base-url", f"{url}/v1", "--client.api-key-var", "SESSION_KEY"]
        command = [python_of("verifiers").with_name("vf-eval"), "vf_guess", "-m", "policy", *client]
        options = [*harness, "-n", "1", "--no-push", "--no-rich"]
        run(*command, *options, cwd=tmp_path, SESSION_KEY=session.key)
    # The first number is 1.
    assert messages_of(session)[1::2] == ["10", "5", "2", "1"]
    (traces,) = tmp_path.rglob("traces.jsonl")
    assert '"score":1.0' in traces.read_text().replace(" ", "")


def test_mini_swe_agent_repairs_a_program():
    """It runs the policy's commands in its sandbox, which has the program alone, until the policy submits."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bwrap")
    program = "def f(a, b):\n    return a - b\n"
    task = {"task": f"{program}f(9, 2) == 11", "program": program, "hidden": [[12, 3, 15]]}
    # An observation has 40 characters of the output.
    looks = "ls -A; ls /home 2>&- || echo alone; touch /usr/x 2>&- || echo refused"
    edit = f"```sh\nsed -i 's|-|+|' f.py; {looks}\n```"
    says = [edit, "```sh\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"]
    scores, games = play(
        "repairs",
        "mini_swe_agent",
        lambda said: says[said.count("assistant\n")],
        extra=f"={json.dumps(task)}",
    )
    assert scores == [1.0, 1.0]
    assert [game[-2] for game in games] == ["f.py\nalone\nrefused\nexit 0"] * 2


def wait_for(url):
    for _ in range(300):
        try:
            return urllib.request.urlopen(url).close()
        except urllib.error.URLError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")
