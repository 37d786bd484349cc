"""Chat templates are code of strangers: whatever they raise becomes one line."""

import concurrent.futures

import pytest

from jaxrl.data.chat import PLAIN_TEMPLATE, ChatTemplate
from jaxrl.errors import UserError
from jaxrl.user_code import bundled_recipes

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
PLAIN = "user: 2 + 2?\nassistant: 4</s>\nassistant: "


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, origin="a test", special_tokens={"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "template of a test does not compile"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ 1 / (messages | length - 2) }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ messages[0].no.such }}", "has no attribute 'no'"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('only\nusers') }}", "refuses messages with roles .*: .*only users"),
    ],
)
def test_whatever_a_template_raises_is_one_line(source, message):
    with pytest.raises(UserError, match=message) as caught:
        template_of(source).render(MESSAGES)
    assert "\n" not in str(caught.value)


def test_threads_may_render_at_once():
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
    assert plain.render(MESSAGES) == PLAIN


def test_our_template_with_tools_shows_a_tool_without_parameters():
    template = template_of(bundled_recipes().joinpath("shared/chatml_tools.jinja").read_text())
    kinds = {"parameters": {"properties": {"a": {}, "b": {}}}}, {"parameters": {}}, {}
    tools = [{"type": "function", "function": {"name": "f", **kind}} for kind in kinds]
    assert "Tools: f(a, b), f(), f()<|im_end|>" in template.render(MESSAGES, tools=tools)


def test_any_text_comes_back_as_it_went():
    content = 'é 東京 🦜 "\\ \n\r\t\0 \u2028 \ud800'
    template = template_of("{{ messages[0].content }}{{ messages[0] | tojson(indent=1) }}")
    written = template.render([{"content": content}])
    assert written.startswith(content + '{\n "content": "é 東京 🦜')
