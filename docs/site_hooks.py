"""Hooks of mkdocs: reference pages, the README as first page, and files outside of `docs/` that pages link.

Nothing is written into `docs/`. A linked file of the repository (results of a benchmark, a recipe) becomes
a page under `repository/`, and the link is changed to it, so that the site needs no server with the sources.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import inspect
import io
import os
import pathlib
import posixpath
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jaxrl import cli
from jaxrl.algos.advantages import ADVANTAGES
from jaxrl.algos.aggregation import AGGREGATIONS
from jaxrl.algos.policy_losses import POLICY_LOSSES
from jaxrl.config import command_line, config_tree
from jaxrl.config.schema import Config

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCES = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_SETTINGS_LINE = "settings and their defaults"
_PUBLIC = ("jaxrl", "jaxrl.rewards", "jaxrl.data")
_REGISTRIES = {
    "Advantages (`algorithm.advantage`)": ADVANTAGES,
    "Losses (`algorithm.loss`)": POLICY_LOSSES,
    "Aggregations (`algorithm.aggregation`)": AGGREGATIONS,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and the files of the repository that pages link."""
    pages = {
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        "reference/names.md": names_page(),
    }
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    waiting = [ROOT / "README.md", *(DOCS / f.src_uri for f in files if _is_written(f))]
    done = set()
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        if not source.is_relative_to(DOCS):
            files.append(_outside_file(source, config))
        if source.suffix == ".md":
            waiting += [target for target in _targets(source) if not target.is_relative_to(DOCS)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Changes links to files of the repository into links to their pages."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return _with_page_links(markdown, _source_of(page.file.src_uri), page.file.src_uri)


def type_name(annotation: Any) -> str:
    """Formats an annotation without module names: `float`, `int | None`, `tuple[int, ...]`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(map(type_name, typing.get_args(annotation)))
    if annotation is types.NoneType:
        return "None"
    # isinstance(list[int], type) is True in some Python versions. A plain class has no origin.
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return annotation.__name__ if is_class else str(annotation).replace("typing.", "")


def settings_page() -> str:
    """Every setting with type, default and description, by group."""
    texts, kinds = command_line.help_texts(Config), config_tree.leaf_types(Config)
    defaults = config_tree.flatten_config(Config())
    groups: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        shown = defaults.get(name)
        if name not in defaults and any(other.startswith(f"{name}.") for other in defaults):
            shown = {k[len(name) + 1 :]: v for k, v in defaults.items() if k.startswith(f"{name}.")}
        row = (
            f"`{name}`",
            _code(type_name(kind)),
            _code(repr(shown)),
            _cell(texts[name]),
        )
        group = name.rpartition(".")[0].split(".")[0] or "the run"
        groups.setdefault(group, []).append(f"| {' | '.join(row)} |")
    sections = (
        f"## {group}\n\n| setting | type | default | what it is |\n|---|---|---|---|\n"
        + "\n".join(rows)
        for group, rows in groups.items()
    )
    return "\n\n".join(
        [
            "# Settings",
            "A recipe sets them as `config.NAME = VALUE`, the command line as `--config.NAME=VALUE`. "
            "`jaxrl train --help GROUP` prints a group.",
            *sections,
        ]
    )


def commands_page() -> str:
    """Every command with its `--help`."""
    sections = []
    for name, command in cli.COMMANDS.items():
        text = _help_of(name)
        settings = ""
        if _SETTINGS_LINE in text:
            text = text[: text.index(_SETTINGS_LINE)]
            settings = "\n\nIts settings are on [their own page](settings.md)."
        sections.append(
            f"## jaxrl {name}\n\n{_cell(command.about)}.\n\n```text\n{text.strip()}\n```{settings}"
        )
    return "\n\n".join(["# Commands", *sections])


def names_page() -> str:
    """Public names of Python with signature and docstring."""
    sections = ["# Python names"]
    for name in _PUBLIC:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", ())
        if public:
            sections.append(f"## {name}")
            sections += (_entry(n, getattr(module, n), f"{name}.{n}") for n in public)
    for title, registry in _REGISTRIES.items():
        sections.append(f"## {title}")
        sections += (_entry(n, function, n) for n, function in sorted(registry.items()))
    return "\n\n".join(sections)


def _help_of(name: str) -> str:
    """What `jaxrl NAME --help` prints."""
    out = io.StringIO()
    width, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    try:
        with contextlib.redirect_stdout(out):
            status = cli.main(["jaxrl", name, "--help"])
    except SystemExit as exit:
        status = exit.code
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
    if status:
        raise PluginError(f"jaxrl {name} --help ended with status {status}")
    return out.getvalue()


def _entry(name: str, value: Any, title: str) -> str:
    text = inspect.cleandoc(value.__doc__ or "") if callable(value) else ""
    first, _, rest = text.partition("\n\n")
    parts = [f"### `{title}`"]
    try:
        if callable(value):
            signature = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
            parts.append(f"```python\n{name}{signature}\n```")
    except (TypeError, ValueError):  # a class of C, or a type alias
        pass
    if not callable(value):
        parts.append(
            _cell(f"{type(value).__name__}: {', '.join(map(str, value))}")
            if isinstance(value, dict)
            else f"`{type(value).__name__}`"
        )
    parts += [_cell(first)] if first else []
    parts += [f"```text\n{rest.strip()}\n```"] if rest.strip() else []
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    """Text in a cell of a table: one line, without marks of HTML or Markdown outside of code."""
    halves = " ".join(text.split()).replace("|", "\\|").split("`")
    if len(halves) % 2 == 0:  # an open quote
        return html.escape("'".join(halves), quote=False).replace("*", "\\*").replace("_", "\\_")
    for number in range(0, len(halves), 2):
        escaped = html.escape(halves[number], quote=False)
        halves[number] = re.sub(r"([*_\[\]])", r"\\\1", escaped)
    return "`".join(halves)


def _code(text: str) -> str:
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return "`` " + " ".join(text.split()).replace("|", "\\|") + " ``"


def _is_written(file: File) -> bool:
    return file.src_uri.endswith(".md") and file.generated_by is None


def _outside_file(source: pathlib.Path, config: MkDocsConfig) -> File:
    uri = _uri_of(source)
    if source.suffix not in (".md", *_CODE):
        return File.generated(config, uri, abs_src_path=str(source))
    text = source.read_text()
    if source.suffix in _CODE:
        text = f"# {source.relative_to(ROOT)}\n\n~~~~{_CODE[source.suffix]}\n{text}\n~~~~"
    return File.generated(config, uri, content=text)


_CODE = {".py": "python", ".toml": "toml", ".sh": "bash"}


def _uri_of(source: pathlib.Path) -> str:
    """Where a file of the repository is in the site's sources."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    if source == ROOT / "README.md":
        return "index.md"
    path = source.relative_to(ROOT).as_posix()
    return f"repository/{path}" + (".md" if source.suffix in _CODE else "")


def _source_of(uri: str) -> pathlib.Path:
    """The file that a page was made of."""
    if uri == "index.md":
        return ROOT / "README.md"
    if not uri.startswith("repository/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix("repository/")
    return path if path.exists() else path.with_suffix("")


def _targets(source: pathlib.Path) -> Iterator[pathlib.Path]:
    """Files of the repository that a page links."""
    for link in _LINK.finditer(_FENCES.sub("", source.read_text())):
        if target := _target(source, link[2]):
            yield target


def _target(source: pathlib.Path, link: str) -> pathlib.Path | None:
    if "://" in link or link.startswith("mailto:"):
        return None
    path = pathlib.Path(posixpath.normpath(source.parent / link))
    return path if path.is_relative_to(ROOT) and path.is_file() else None


def _with_page_links(markdown: str, source: pathlib.Path, uri: str) -> str:
    def changed(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if target is None:
            return link[0]
        return f"{link[1]}{posixpath.relpath(_uri_of(target), posixpath.dirname(uri))}{link[3]}"

    return _LINK.sub(changed, markdown)
