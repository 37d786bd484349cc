"""What tests of the core take of extensions/. A test whose extension was removed is skipped."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from jaxrl import extensions
from jaxrl.tracking.run_folder import RunFolder


def of_extension(path: str) -> Callable[..., Any]:
    """Calls "package.module:function", which is imported by the call; skips the test if it is not there."""
    module, _, name = path.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"extensions/{package} was removed")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def report_of(folder: RunFolder) -> str:
    """The page that a run has written. Skips what is left of a test if its extension was removed."""
    if not extensions.is_installed("report"):
        pytest.skip("extensions/jaxrl_report was removed")
    return folder.report.read_text()


def needs(entry: str) -> pytest.MarkDecorator:
    """Skips a test if the extension that an entry of `EXTENSIONS` names was removed."""
    return pytest.mark.skipif(
        not extensions.is_installed(entry), reason=f"the extension of {entry} was removed"
    )
