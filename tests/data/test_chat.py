"""Chat templates are code of strangers: whatever they do ends, soon, in one line."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

import pytest

from jaxrl.data import chat
from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.errors import UserError

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
PLAIN = "user: 2 + 2?\nassistant: 4</s>\nassistant: "


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, origin="a test", special_tokens={"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        # jinja folds constants, so this is not even compiled.
        ("{{ 9**(9**9) }}", "does not compile .it has taken 2 s"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "it has taken 2 s of processor time and was ended",
        ),
        ("{{ 'a' * 10**11 }}", "it took more memory than it may|it has taken"),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
            "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
            "it took more memory than it may|it has taken",
        ),
        ("{{ 'x'.center(10**8) }}", "writes 100000000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 1 / (messages | length - 2) }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ messages[0].no.such }}", "has no attribute 'no'"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('only users') }}", "refuses messages with roles .*: only users"),
    ],
)
def test_whatever_a_template_does_ends_in_one_line(source, message):
    began = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        template_of(source).render(MESSAGES)
    assert "\n" not in str(caught.value)
    # It is not this process that worked.
    assert time.process_time() - began < 1
    assert template_of(PLAIN_TEMPLATE).render(MESSAGES) == PLAIN


def test_templates_share_a_process_and_threads_may_render_at_once():
    plain, count = template_of(PLAIN_TEMPLATE), template_of("{{ messages | length }} {{ extra }}")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(template.render, MESSAGES * i, extra=i)
            for i in range(1, 50)
            for template in (plain, count)
        ]
        texts = [job.result() for job in jobs]
    assert texts[1::2] == [f"{2 * i} {i}" for i in range(1, 50)]
    assert all(text.count("user:") == i for i, text in enumerate(texts[::2], start=1))


def test_any_text_comes_back_as_it_went():
    content = 'é 東京 🦜 "\\ \n\r\t\0 \u2028 \ud800'
    assert template_of("{{ messages[0].content }}").render([{"content": content}]) == content


def test_an_interrupted_question_is_not_answered_by_the_next(monkeypatch):
    template = template_of(PLAIN_TEMPLATE)
    (worker,) = chat._shared_pool()._idle

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "stale"}])
    assert template.render(MESSAGES) == PLAIN


def test_the_process_ends_with_the_program():
    program = """
from jaxrl.data import chat
chat.ChatTemplate("x", origin="", special_tokens={})
print(chat._shared_pool()._idle[0]._process.pid)
"""
    root = pathlib.Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=root, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.stdout), 0)
