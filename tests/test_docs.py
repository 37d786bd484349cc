"""The documentation: every link leads somewhere, and the site builds without warnings."""

import os
import pathlib
import posixpath
import re
import subprocess
import sys

import pytest

from jaxrl import cli
from jaxrl.config import config_tree
from jaxrl.config.schema import Config
from tests.extras import needs_extra

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    links = LINK.findall(CODE.sub("", page.read_text()))
    files = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert not [link for link in files if not pathlib.Path(page.parent, link).exists()]


@pytest.mark.slow
@needs_extra("docs", "mkdocs")
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    settings = (tmp_path / "reference" / "settings.html").read_text()
    for name in config_tree.leaf_names(Config):
        assert f"<code>{name}</code>" in settings, name
    commands = (tmp_path / "reference" / "commands.html").read_text()
    for name in cli.COMMANDS:
        assert f"usage: jaxrl {name}" in commands, name
    assert "user_reward" in (tmp_path / "reference" / "names.html").read_text()
    broken = []
    for page in tmp_path.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)[^"]*"', page.read_text()):
            if "://" in link or link.startswith(("mailto:", "data:", "/")):
                continue
            if not pathlib.Path(posixpath.normpath(page.parent / link)).exists():
                broken.append(f"{page.relative_to(tmp_path)}: {link}")
    assert not broken
    # Nothing generated stays in the sources.
    assert not (ROOT / "docs" / "reference").exists()
