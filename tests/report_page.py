"""Checks that the pages of reports are well-formed and load nothing."""

import html.parser
import re


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags, self.links = [], [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)


def check_page(text: str, *, plots: bool = True) -> None:
    """Checks that a page closes its tags, has unique ids, and refers to nothing outside."""
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert not page.tags & {"script", "img", "link", "iframe"}
    assert len(set(page.ids)) == len(page.ids)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert "://" not in text
    assert set(re.findall(r"url\((.)", text)) == ({"#"} if plots else set())
    assert "default-src 'none'" in text
