"""Loads a user's functions by their location in a config.

    "my_package.rewards:brevity"    a module that Python can import
    "path/to/my_rewards.py:brevity" a file, here or among the recipes that come with the package

The functions are trusted code. They run in this process, or in a worker process that imports them again.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pathlib
import pickle
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.errors import UserError

# The recipes in a clone, and in an installed package.
_CLONE = pathlib.Path(__file__).parents[1] / "configs"
_PACKAGE = pathlib.Path(__file__).parent / "recipes"

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
        raise UserError(_in_the_program(path, name, what))
    if where.endswith(".pkl"):
        return _pickled_function(path, where, what, takes, options or {})
    module = (
        _file_module(path, where, what)
        if where.endswith(".py")
        else _named_module(path, where, what)
    )
    if not hasattr(module, name):
        known = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise UserError(
            f"{what} {path!r} is not there: {where} has no {name!r}; it has "
            f"{', '.join(known) or 'no functions'}"
        )
    function = getattr(module, name)
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


def _pickled_function(
    path: str, where: str, what: str, takes: Sequence[str] | None, options: Mapping[str, Any]
) -> Callable[..., Any]:
    try:
        function = pickle.loads(pathlib.Path(where).read_bytes())
    except (Exception, SystemExit) as error:  # unpickling user objects may raise anything
        raise UserError(f"{what} {path!r} cannot be loaded: {error}; make it again") from error
    if takes is not None:
        _check_takes(function, path, what, takes, options)
    return function


def _in_the_program(path: str, name: str, what: str) -> str:
    """The message for a function of the running program or of a notebook."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    remedy = (
        f"name it {program}:{name}, with what the file does as a program under `if __name__ == "
        '"__main__":`, or put it'
        if program
        else "write it (in a notebook by %%writefile my_functions.py)"
    )
    return (
        f"{what} {path!r} is called in a process of its own, which cannot import what was typed into this "
        f"one; {remedy} into a file of its own, my_functions.py, and name it my_functions.py:{name}"
    )


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


def _named_module(path: str, where: str, what: str) -> types.ModuleType:
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise _not_imported(
            path,
            what,
            error,
            "install the package, set PYTHONPATH, or give path/to/file.py:function",
        ) from error


def _file_module(path: str, where: str, what: str) -> types.ModuleType:
    # Recipes name functions beside them, shared/worked_sums.py:make, which are found from any folder, and a
    # run's settings stay the same on another machine.
    found = bundled_file(where)
    if not os.path.isfile(found):
        raise UserError(
            f"{what} {path!r} is not there: {pathlib.Path.cwd() / where} does not exist; paths are relative "
            f"to {pathlib.Path.cwd()}"
        )
    file = pathlib.Path(found).resolve()
    # The path in the module name keeps it from hiding an installed module. Functions of one file share a
    # module.
    name = f"user code of {file}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "every .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here during its execution
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        del sys.modules[name]
        raise _not_imported(path, what, error, "fix the file") from error
    return module


def _not_imported(path: str, what: str, error: BaseException, remedy: str) -> UserError:
    ours = (__file__, importlib.__file__)
    places = [
        f"{frame.filename}:{frame.lineno}: "
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen")
    ]
    return UserError(
        f"{what} {path!r} cannot be imported: {(places or [''])[-1]}"
        f"{type(error).__name__}: {error}; {remedy}"
    )
