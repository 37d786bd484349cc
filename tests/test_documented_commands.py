"""Every command that a page shows has files, flags and settings that exist.

The tests read the command lines and run none of them. They run the imports and settings of code blocks.
"""

import ast
import contextlib
import pathlib
import re
import shlex
import textwrap

import pytest

from jaxrl import cli
from jaxrl.config import command_line, config_tree
from jaxrl.config.schema import Config

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "configs", ROOT / "launch", ROOT / "benchmarks")
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
    # What once was measured, by the commands of its day.
    if path.name != "CHANGELOG.md" and path.parent.name != "results"
)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(python|jaxrl|make|pytest) (.*)")
NAMED = re.compile(r"`((?:python|jaxrl|make) [^`\n]+)`")
# Files that the reader of a page writes.
OWN = re.compile(r"(^|/)(my|mine|make_data|recipe\.py|RECIPE)")


def commands_of(page: pathlib.Path) -> set[tuple[str, ...]]:
    """Words of each command in an indented block, or between backquotes, of a page."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
    lines = [
        line.strip().removeprefix("$ ") for line in re.findall(r"^(?: {4}|\$ ).*$", text, re.M)
    ]
    found = set()
    for line in [*lines, *NAMED.findall(text)]:
        match = COMMAND.fullmatch(line)
        if not match or "..." in line:
            continue
        words = shlex.split(re.sub(r"\$\([^)]*\)", "DIR", line), comments=True)
        words = words[words.index(match[1]) :]
        ends = [i for i, word in enumerate(words) if word in (">", "|", "&&", "&")]
        found.add(tuple(words[: min(ends, default=len(words))]))
    return found


DOCUMENTED = sorted(set().union(*map(commands_of, PAGES)))


def options(words) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("-")]


HELP: dict[tuple[str, ...], str] = {}


def help_of(name: str, capsys, *kind: str) -> str:
    """What a command prints about its flags, or about those of one kind of it."""
    if (name, *kind) not in HELP:
        # argparse ends the program, the reader of recipes returns.
        with contextlib.suppress(SystemExit):
            cli.run(name, [f"jaxrl {name}", *kind, "--help"])
        HELP[name, *kind] = capsys.readouterr().out
    return HELP[name, *kind]


@pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
def test_its_files_and_flags_exist(words, capsys):
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        named = [word for word in rest if "=" not in word]
        assert set(named) <= set(targets)
        return
    if program == "pytest" or rest[:2] == ["-m", "pytest"]:
        paths = [word.partition("::")[0] for word in rest if word.startswith("tests")]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    if program == "python":
        script, *rest = rest
        if script == "-c":
            return
        if script == "-m":
            script, *rest = rest
            assert script == "jaxrl"
            name, *rest = rest
        elif script.startswith(("benchmarks/", "docs/")):
            source = (ROOT / script).read_text()
            assert all(f'"{option}"' in source for option in options(rest)), rest
            return
        elif script.startswith("launch/"):
            assert (ROOT / script).exists()
            name = pathlib.Path(script).stem.replace("_", "-")
        else:
            assert OWN.search(script), script
            return
    else:
        name, *rest = rest
    if name in ("--help", "--version", "COMMAND"):
        return
    assert name in cli.COMMANDS
    settings = [word for word in rest if word.startswith("--config.")]
    overrides, others = command_line.take_overrides(settings, Config)
    assert not others
    if "--config" in rest:
        recipe = rest[rest.index("--config") + 1]
        if OWN.search(recipe):
            recipe = "dapo_tiny"
        # Builds all settings, and so refuses one that is misspelt or of the wrong kind.
        command_line.load_config(Config, recipe, overrides)
    known = help_of(name, capsys, *[word for word in rest if word == "--tinker"])
    for option in options(rest):
        assert option.startswith("--config.") or re.search(rf"{option}\b", known), option


def test_pages_show_commands():
    """The reader of pages finds them: each command of the package is on some page."""
    shown = {pathlib.Path(word).stem for words in DOCUMENTED for word in words[:3]}
    assert len(DOCUMENTED) > 60
    assert set(cli.COMMANDS) <= shown | {name.replace("-", "_") for name in shown}


CODE = {
    page: [
        ast.parse(textwrap.dedent(block))
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    for page in PAGES
}


def is_setting(line: ast.stmt) -> bool:
    return isinstance(line, ast.Assign) and ast.unparse(line.targets[0]).startswith("config.")


@pytest.mark.parametrize("page", [page for page in PAGES if CODE[page]], ids=lambda page: page.name)
def test_settings_and_imports_of_its_code_exist(page):
    for block in CODE[page]:
        if all(map(is_setting, block.body)):
            config = config_tree.to_config_dict(Config())
            exec(ast.unparse(block), {"config": config})
            config_tree.from_config_dict(Config, config)
        for line in ast.walk(block):
            if isinstance(line, ast.Import | ast.ImportFrom):
                exec(ast.unparse(line), {})
