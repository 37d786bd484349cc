"""A test that wants an optional package skips without it, and fails where the package was asked for."""

import pathlib

import pytest
from extras import import_extra, needs_extra

MISSING = "no_such_package"


@pytest.mark.parametrize("asked", ["", "dev", "dev,parity_of_another_kind"])
def test_without_the_extra_a_test_skips_and_says_how_to_get_it(monkeypatch, asked):
    monkeypatch.setenv("JAXRL_EXTRAS", asked)
    with pytest.raises(pytest.skip.Exception, match=f"{MISSING} .* EXTRAS=dev,parity"):
        import_extra("parity", MISSING)
    assert needs_extra("parity", MISSING).args == (True,)


@pytest.mark.parametrize("asked", ["parity", "dev,parity,aot"])
def test_an_extra_that_was_asked_for_must_be_there(monkeypatch, asked):
    monkeypatch.setenv("JAXRL_EXTRAS", asked)
    with pytest.raises(ModuleNotFoundError, match=MISSING):
        import_extra("parity", MISSING)
    assert needs_extra("parity", MISSING).args == (False,)


def test_what_is_installed_is_imported(monkeypatch):
    for asked in ("", "parity"):
        monkeypatch.setenv("JAXRL_EXTRAS", asked)
        assert import_extra("parity", "json").loads("1") == 1
        assert needs_extra("parity", "json").args == (False,)


def test_no_test_skips_for_want_of_a_package_in_any_other_way():
    here = pathlib.Path(__file__)
    for path in here.parent.rglob("*.py"):
        if path.name not in ("extras.py", here.name):
            assert "importorskip" not in path.read_text(), path
