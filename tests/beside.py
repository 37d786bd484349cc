"""What tests of the core take of extensions/. A test whose extension was removed is skipped."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from jaxrl import extensions


def of_extension(path: str) -> Callable[..., Any]:
    """Calls "package.module:function", which is imported by the call; skips the test if it is not there."""
    module, _, name = path.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"extensions/{package} was removed")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def needs(entry: str) -> pytest.MarkDecorator:
    """Skips a test if the extension that an entry of `EXTENSIONS` names was removed."""
    return pytest.mark.skipif(
        not extensions.is_installed(entry), reason=f"the extension of {entry} was removed"
    )
