import json
import math
import os
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nexus import cells as cells_module
from nexus.cells import Cell, CellStore, CellStoreError, run_cells

CELLS = [Cell({"offset": offset, "model": "m"}, weight=offset + 1.0, label=f"offset {offset}") for offset in range(6)]


class Bar:
    def __init__(self):
        self.opened, self.advanced, self.notes = [], [], []

    @contextmanager
    def __call__(self, description, *, total, unit, done):
        self.opened.append((description, total, unit, done))
        yield self

    def advance(self, weight):
        self.advanced.append(weight)

    def note(self, text):
        self.notes.append(text)


class Measure:
    def __init__(self, fail_at=None):
        self.seen, self.fail_at = [], fail_at

    def __call__(self, cell):
        offset = cell.inputs["offset"]
        if offset == self.fail_at:
            raise RuntimeError("out of memory")
        self.seen.append(offset)
        return [{"z": np.float32(0.1) * offset, "a": (offset, query)} for query in range(2)]


def run(store, measure=None, cells=CELLS):
    bar = Bar()
    return run_cells(cells, measure or Measure(), store=store, progress=bar, description="sweep"), bar


def test_all_cells_are_measured_in_order_and_then_never_again(tmp_path):
    measure = Measure()
    result, bar = run(CellStore(tmp_path / "cells"), measure)
    assert measure.seen == list(range(6))
    assert result[2] == [{"z": float(np.float32(0.1) * 2), "a": [2, query]} for query in range(2)]
    assert bar.opened == [("sweep", 21.0, "cells", 0.0)]
    assert bar.advanced == [1, 2, 3, 4, 5, 6]
    assert bar.notes == []

    again = Measure(fail_at=0)
    resumed, bar = run(CellStore(tmp_path / "cells"), again)
    assert again.seen == []
    assert json.dumps(resumed) == json.dumps(result)
    assert bar.opened == [("sweep", 21.0, "cells", 21.0)]
    assert bar.notes == ["6 of 6 cells were already measured"]


def test_anew_measures_what_is_already_stored(tmp_path):
    store = CellStore(tmp_path / "cells")
    run(store)
    measure = Measure()
    run_cells(CELLS, measure, store=store, progress=Bar(), anew=True)
    assert measure.seen == list(range(6))


def test_an_error_keeps_the_cells_before_it(tmp_path):
    store = CellStore(tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(store, Measure(fail_at=3))
    measure = Measure()
    _, bar = run(store, measure)
    assert measure.seen == [3, 4, 5]
    assert bar.opened == [("sweep", 21.0, "cells", 6.0)]
    assert bar.notes == ["3 of 6 cells were already measured"]


def test_changed_inputs_are_measured(tmp_path):
    store = CellStore(tmp_path)
    run(store)
    measure = Measure()
    run(store, measure, [Cell(CELLS[0].inputs | {"model": "n"}, 1, "x"), CELLS[1]])
    assert measure.seen == [0]


KILLED = """
import os, signal, sys
from nexus import canonical
from nexus.cells import CellStore, run_cells
from test_cells import CELLS, Bar, Measure

calls = 0

def dies_in_the_fourth(function):
    def wrapper(argument):
        global calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(argument)
    return wrapper

measure = Measure()
if sys.argv[2] == "measuring":
    measure = dies_in_the_fourth(measure)
else:
    canonical.os.fsync = dies_in_the_fourth(os.fsync)
run_cells(CELLS, measure, store=CellStore(sys.argv[1]), progress=Bar())
"""


@pytest.mark.parametrize("moment", ["measuring", "saving"])
def test_a_killed_run_continues_where_it_was(tmp_path, moment):
    store = tmp_path / "cells"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(store), moment], env=environment)
    assert killed.returncode == -signal.SIGKILL

    visible = list(store.glob("[!.]*"))
    assert len(visible) == 3
    assert all(json.loads(path.read_text())["samples"] for path in visible)
    measure = Measure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, bar = run(CellStore(store), measure)
    assert measure.seen == [3, 4, 5]
    assert bar.notes == ["3 of 6 cells were already measured"]
    uninterrupted, _ = run(CellStore(tmp_path / "fresh"))
    assert json.dumps(result) == json.dumps(uninterrupted)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"\xff" + text,
        lambda text: b"[]",
        lambda text: text.replace(b'"a": [2, 1]', b'"a": [2, 7]'),
        lambda text: text.replace(b'"key": "', b'"key": "0'),
        lambda text: text.replace(b"0.2", b"NaN"),
    ],
)
def test_a_damaged_cell_is_measured_again_and_reported_once(tmp_path, damage):
    store = CellStore(tmp_path)
    result, _ = run(store)
    path = tmp_path / f"{store.key(**CELLS[2].inputs)}.json"
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert path.read_bytes() != intact
    with pytest.warns(UserWarning, match=f"{path.name} is damaged") as caught:
        assert store.load(store.key(**CELLS[2].inputs)) is None
        measure = Measure()
        again, _ = run(store, measure)
    assert len(caught) == 1
    assert measure.seen == [2]
    assert again == result
    assert path.read_bytes() == intact


def test_keys_depend_on_values_not_on_order(tmp_path):
    assert CellStore.key(a=1, b=[2.5]) == CellStore.key(b=(np.float64(2.5),), a=np.int8(1))
    assert len({CellStore.key(a=1), CellStore.key(a=1.5), CellStore.key(a="1"), CellStore.key(b=1)}) == 4
    with pytest.raises(ValueError, match=r"inputs\.a is nan"):
        CellStore.key(a=math.nan)


def test_what_would_mislead_is_refused(tmp_path):
    store = CellStore(tmp_path)
    with pytest.raises(ValueError, match="'offset 0' and 'twin' have the same inputs"):
        run(store, cells=[CELLS[0], Cell(CELLS[0].inputs, 1, "twin")])
    for weight in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="cell 'w' has weight"):
            run(store, cells=[Cell({"offset": 1}, weight, "w")])
    with pytest.raises(ValueError, match=r"cell 'offset 0': samples\[0\]\.x is nan"):
        run(store, lambda cell: [{"x": math.nan}])
    with pytest.raises(ValueError, match="list of dicts"):
        run(store, lambda cell: [1.0])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_fails_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CellStoreError, match="file/cells cannot be written .*make it writable"):
        CellStore(tmp_path / "file" / "cells")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_fails_before_any_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CellStoreError, match="cannot be written"):
        CellStore(tmp_path)


def test_a_full_disk_names_the_cell(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    store = CellStore(tmp_path)
    monkeypatch.setattr(cells_module, "write_atomically", full)
    with pytest.raises(CellStoreError, match="No space left on device.*free some disk"):
        store.save("0" * 64, [{"a": 1}])


def test_the_default_folder_is_below_the_project():
    assert cells_module.DEFAULT_FOLDER.parts[-2:] == (".nexus", "cells")
    assert (cells_module.DEFAULT_FOLDER.parents[1] / "nexus" / "cells.py").exists()
