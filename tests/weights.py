"""Weighs the package: lines of code, files and functions, and what a training run imports.

A line of code holds a token besides comments and docstrings. Docstrings of attributes count as docstrings.
"""

import ast
import dataclasses
import functools
import io
import pathlib
import tokenize

_LAYOUT = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING, tokenize.COMMENT),
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """Lines of a file, of its code and of its comments, and its number of functions."""

    lines: int
    code: int
    comments: int
    functions: int


@functools.cache
def weigh(path: pathlib.Path) -> Weight:
    """Counts one Python file."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {
        line
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    return Weight(len(text.splitlines()), len(code), len(comments - code), functions)


def total(paths: list[pathlib.Path]) -> Weight:
    """The sum of several files."""
    weights = [dataclasses.astuple(weigh(path)) for path in paths]
    return Weight(*map(sum, zip(*weights, strict=True)))


def imports(path: pathlib.Path, root: pathlib.Path) -> set[pathlib.Path]:
    """The files of the package `root` that a file of it imports, late or not."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = set()
    for name in names:
        file = root.parent.joinpath(*name.split("."))
        files |= {file.with_suffix(".py"), file / "__init__.py"}
    return {file for file in files if file.is_relative_to(root) and file.exists()}


def closure(package: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """The files of `package` and all that they import, directly or not."""
    found, queue = set(), set(package.rglob("*.py"))
    while queue:
        path = queue.pop()
        found.add(path)
        queue |= imports(path, root) - found
    return sorted(found)
