"""The notebook of docs/python.md runs from its first cell to its last."""

import pathlib
import re

import pytest
from extras import import_extra

nbformat = import_extra("dev", "nbformat")
nbclient = import_extra("dev", "nbclient")

NOTEBOOK = pathlib.Path(__file__).parents[1] / "docs" / "first_steps.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    (trained,) = (cell for cell in notebook.cells if "jaxrl.train(" in cell.source)
    last = eval(trained.outputs[-1]["data"]["text/plain"])
    assert last["step"] == 20 and last["critic/rewards/mean"] > 0.5
    rewards = notebook.cells[-1].outputs[-1]["data"]["text/plain"]
    assert len(eval(rewards)) == 3
    assert (tmp_path / "first_model" / "model.safetensors").exists()
    # The page shows what comes.
    kept = nbformat.read(NOTEBOOK, as_version=4)
    (shown,) = (cell for cell in kept.cells if "jaxrl.train(" in cell.source)
    assert eval(shown.outputs[-1]["data"]["text/plain"]).keys() == last.keys()


def test_the_notebook_is_kept_with_its_outputs():
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    # In their order, and the second one defines a function alone.
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4]
    assert [bool(cell.outputs) for cell in code] == [True, False, True, True]
    text = NOTEBOOK.read_text()
    # Nothing of the machine where it ran.
    assert not re.search(r"/(home|root|tmp|work|Users)/|ipykernel|Traceback|iopub", text)
    assert len(text) < 10_000
