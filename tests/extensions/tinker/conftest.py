"""The model that servers of a test file share."""

import pathlib

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    # Imported late: without its extras a file skips, and does not fail.
    from recorded import write_model

    return write_model(tmp_path_factory.mktemp("tinker"))
