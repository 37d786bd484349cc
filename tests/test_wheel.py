"""What `pip install` of the wheel brings."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_has_every_recipe_and_page(tmp_path):
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    options = ["--quiet", "--no-deps", f"--wheel-dir={tmp_path}"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    found = set(zipfile.ZipFile(wheel).namelist())
    recipes = {path.relative_to(source / "configs") for path in (source / "configs").rglob("*.py")}
    assert {f"jaxrl/recipes/{path.as_posix()}" for path in recipes} <= found
    pages = {
        path.relative_to(source).as_posix()
        for pattern in ("*.html", "*.css")
        for path in (source / "jaxrl").rglob(pattern)
    }
    assert pages and pages <= found
    assert not [name for name in found if name.startswith(("tests/", "configs/"))]
