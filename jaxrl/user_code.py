"""Loads a user's functions by their location in a config.

    "my_package.rewards:brevity"    a module that Python can import
    "path/to/my_rewards.py:brevity" a file, here or among the recipes that come with the package

The functions are trusted code. They run in this process, or in a worker process that imports them again.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import modulefinder
import os
import pathlib
import pickle
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl import errors
from jaxrl.errors import UserError

# The recipes in a clone, and in an installed package.
_CLONE = pathlib.Path(__file__).parents[1] / "configs"
_PACKAGE = pathlib.Path(__file__).parent / "recipes"
_EXTENSIONS = _CLONE.with_name("extensions")

_FUNCTION = re.compile(r"(.+\.(?:py|pkl)|[^\W\d][\w.]*):[^\W\d]\w*")


def bundled_recipes() -> pathlib.Path:
    """Returns the folder of the recipes that come with the package."""
    return _PACKAGE if _PACKAGE.is_dir() else _CLONE


def bundled_file(path: str) -> str:
    """The file at `path`, here or among the recipes that come with the package; `path` if there is none."""
    beside = bundled_recipes() / path
    # isfile returns False for invalid paths too, for which pathlib would raise.
    return path if not path or os.path.isfile(path) or not os.path.isfile(beside) else str(beside)


def names_function(path: str) -> bool:
    """Whether a string names a function ("module:function") and not a file."""
    return _FUNCTION.fullmatch(path) is not None


def load_function(
    path: str,
    what: str,
    *,
    takes: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    own_process: bool = False,
) -> Callable[..., Any]:
    """Loads the function at `path`.

    Args:
      path: "package.module:function", "path/to/file.py:function", or "path/to/function.pkl:function", a
        pickle that `jaxrl.api` wrote.
      what: description of the function, for errors.
      takes: names of the positional arguments of the call; None skips the check of the signature.
      options: keyword arguments of the call.
      own_process: whether a worker process will call it. A worker cannot import functions of `__main__`.

    Raises:
      UserError: if the path is malformed, the module cannot be imported or lacks the function, or the
        function does not accept these arguments.
    """
    where, _, name = path.rpartition(":")
    if not where or not name.isidentifier():
        raise UserError(
            f"{what} {path!r} has no function's name; write package.module:function or "
            "path/to/file.py:function"
        )
    if own_process and where == "__main__":
        raise UserError(
            f"{what} {path!r} is called in a process of its own, which cannot import what was typed into "
            f"this one; write it into a file of its own, my_functions.py (in a notebook by %%writefile), and "
            f"name it my_functions.py:{name}"
        )
    is_file = where.endswith((".py", ".pkl"))
    if is_file and not os.path.isfile(bundled_file(where)):
        raise UserError(
            f"{what} {path!r} is not there: {pathlib.Path.cwd() / where} does not exist; paths are relative "
            f"to {pathlib.Path.cwd()}"
        )
    try:
        if where.endswith(".pkl"):
            # Trusted like a .py file: whoever can write it could also write code.
            module, function = None, pickle.loads(pathlib.Path(where).read_bytes())
        else:
            module = _file_module(where) if is_file else importlib.import_module(where)
            function = getattr(module, name, None)
    except BaseException as error:  # a user's module may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        # The place of interest is the last line that is the user's, not the importer's.
        ours = (__file__, importlib.__file__, errors.__file__)
        places = [
            f"{frame.filename}:{frame.lineno}: "
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename not in ours and not frame.filename.startswith("<frozen")
        ]
        raise UserError(
            f"{what} {path!r} cannot be imported: {(places or [''])[-1]}{type(error).__name__}: {error}; fix "
            "it, or install the package, set PYTHONPATH, or give path/to/file.py:function"
        ) from error
    if function is None:
        known = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise UserError(
            f"{what} {path!r} is not there: {where} has no {name!r}; it has "
            f"{', '.join(known) or 'no functions'}"
        )
    if not callable(function):
        raise UserError(
            f"{what} {path!r} is {type(function).__name__}, which cannot be called; name a function"
        )
    if takes is not None:
        _check_takes(function, path, what, takes, options or {})
    return function


def load_agent(path: str) -> Callable[..., Any]:
    """The agent at `path` (docs/agents.md), which a worker process will call. Raises as `load_function`."""
    return load_function(path, "rollout.agent", takes=("client", "problem"), own_process=True)


def _check_takes(
    function: Callable[..., Any],
    path: str,
    what: str,
    takes: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*takes, **options)
    except TypeError as error:
        raise UserError(
            f"{what} {path!r} is {path.rpartition(':')[2]}{signature}, which cannot be called with "
            f"({', '.join([*takes, *(f'{name}=' for name in options)])}): {error}; give it these arguments"
        ) from error


def _file_module(where: str) -> types.ModuleType:
    # Recipes name functions beside them, shared/worked_sums.py:make, which are found from any folder, and a
    # run's settings stay the same on another machine.
    file = pathlib.Path(bundled_file(where)).resolve()
    # The path in the module name keeps it from hiding an installed module. Functions of one file share a
    # module.
    name = f"user code of {file}"
    if name in sys.modules:
        return sys.modules[name]
    if file.exists() and not file.is_file():
        # The import would wait for the other end of a pipe.
        raise UserError(f"{file} is no regular file; name a Python file")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "every .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here during its execution
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def source_digest(where: str) -> str:
    """A digest of the files of a user's module: its own, and those of the user's modules that it imports.

    Nothing is imported. Files of installed packages and of this program do not count.

    Args:
      where: "package.module" or "path/to/file.py".

    Returns:
      The digest; "" if the module is none of the user's, is missing, or cannot be read. Loading it says why.
    """
    folders = _user_folders()
    finder = modulefinder.ModuleFinder(path=folders, excludes=["jaxrl"])
    try:
        if where.endswith(".py"):
            finder.run_script(where)
        elif where.partition(".")[0] != "jaxrl":
            finder.import_hook(where)
    except (ImportError, SyntaxError, OSError, ValueError):
        return ""
    digest = hashlib.sha256()
    modules: dict[str, Any] = finder.modules  # without types in Python's own stubs
    for name, module in sorted(modules.items()):
        if module.__file__:
            digest.update(f"{name}\0".encode() + pathlib.Path(module.__file__).read_bytes())
    return digest.hexdigest() if modules else ""


def _user_folders() -> list[str]:
    """The folders that modules are imported from, without those of Python, of packages and of extensions."""
    python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    folders = [os.path.abspath(folder) for folder in sys.path]
    installed = re.compile(r"/(site|dist)-packages(/|$)")
    return [
        folder
        for folder in dict.fromkeys(folders)
        if os.path.isdir(folder)
        and folder != str(_EXTENSIONS)
        and not installed.search(folder)
        and not any(folder == own or folder.startswith(f"{own}/") for own in python)
    ]
