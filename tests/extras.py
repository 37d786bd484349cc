"""Packages that not everyone installs: a test of one skips without it, unless its extra was asked for.

`make test EXTRAS=dev,parity,aot` passes the extras it installed on, in `JAXRL_EXTRAS`. A test that would skip
for want of one of them fails instead, so what was asked for never skips in silence.
"""

import importlib
import importlib.util
import os
import types

import pytest


def import_extra(extra: str, name: str) -> types.ModuleType:
    """The module `name`, which comes with `extra`; the test, or the file, skips where it is not installed.

    Raises:
      ModuleNotFoundError: it is not installed though `extra` was asked for.
    """
    if _requested(extra):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=_reason(extra, name))


def needs_extra(extra: str, name: str) -> pytest.MarkDecorator:
    """A mark for a test whose subprocess imports the module `name`, which comes with `extra`."""
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing and not _requested(extra), reason=_reason(extra, name))


def _requested(extra: str) -> bool:
    return extra in os.environ.get("JAXRL_EXTRAS", "").split(",")


def _reason(extra: str, name: str) -> str:
    return f"{name} is not installed: make test EXTRAS=dev,{extra}"
