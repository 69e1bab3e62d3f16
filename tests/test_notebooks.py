"""The notebooks: stored without outputs, run from anywhere, and clear about what is missing."""
from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# The folder that each is run from, and how many pictures it draws per run that it reads.
RUN_FROM = {"relocation": ROOT / "notebooks", "frontier": ROOT, "routing_errors": ROOT / "notebooks"}


def read(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def executed(notebook, folder: Path):
    return NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()


def outputs(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_there_is_a_place_to_run_each_notebook_from():
    assert {path.stem for path in NOTEBOOKS} == set(RUN_FROM)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_bare_and_loads_no_model(path: Path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"} and notebook.metadata.language_info == {
        "name": "python"}, "clear all outputs and the versions of the editor before a commit"
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None and cell.metadata == {} for cell in code)
    source = "\n".join(cell.source for cell in code)
    used = set(re.findall(r"\bfrom nexus import ([\w, ]+)", source)[0].split(", "))
    assert used <= {"results", "sample_figures", "figures", "tables"}
    assert len(re.findall(r"^(?:from|import) ", source, re.M)) <= 2
    assert max(len(cell.source.splitlines()) for cell in code) <= 12, "what is longer belongs in nexus/"
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path):
    done = executed(read(path), RUN_FROM[path.stem])
    shown = outputs(done)
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    assert pictures and all(len(output.data["image/png"]) > 20_000 for output in pictures)
    assert not [output for output in shown if output.output_type == "stream" and output.name == "stderr"]
    tables = [output for output in shown if "<table" in output.get("data", {}).get("text/html", "")]
    assert tables


def test_a_notebook_says_what_is_missing_and_how_to_get_it(tmp_path: Path):
    notebook = read(ROOT / "notebooks" / "relocation.ipynb")
    elsewhere = f"from pathlib import Path\nfrom nexus import results\nresults.RESULTS = Path({str(tmp_path)!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(elsewhere))
    with pytest.raises(CellExecutionError) as told:
        executed(notebook, tmp_path)
    assert "MissingArtifact" in str(told.value)
    assert f"no run in {tmp_path} has dkl_sweep.json; make one with: make repro" in str(told.value)
