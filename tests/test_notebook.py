"""The notebook of docs/python.md runs from its first cell to its last."""

import pathlib

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
    # It is kept without outputs, which would change with every run.
    kept = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in kept.cells)
