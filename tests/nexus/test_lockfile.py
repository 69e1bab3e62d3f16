"""`dvc.lock` after a run that was killed while DVC wrote it."""
from __future__ import annotations

import pytest

from nexus.lockfile import LOCK, drop_broken_rwlock, keep_lock, locked_runs, mend_lock

ENTRY = """  {name}@{run}:
    cmd: python -m nexus stage {name}
    deps:
    - path: nexus/{name}.py
      hash: md5
      md5: 0123456789abcdef0123456789abcdef
      size: 7
"""


def lock(*runs: str) -> str:
    return "schema: '2.0'\nstages:\n" + "".join(ENTRY.format(name=name, run=run) for run in runs
                                                for name in ("draw", "measure"))


BEFORE, AFTER = lock("one"), lock("one", "two")


@pytest.fixture
def copy(tmp_path):
    return tmp_path / ".nexus" / LOCK


def test_a_lock_that_was_cut_anywhere_is_as_before_or_still_good(tmp_path, copy):
    put_back = 0
    for end in range(len(AFTER) + 1):
        (tmp_path / LOCK).write_text(BEFORE)
        keep_lock(copy, tmp_path)
        (tmp_path / LOCK).write_text(AFTER[:end])
        mended = mend_lock(copy, tmp_path)
        put_back += mended
        assert (tmp_path / LOCK).read_text() == (BEFORE if mended else AFTER[:end])
        # Nothing of what was locked before is lost, and it can be read.
        assert "one" in locked_runs(tmp_path) and not copy.exists()
    assert 0 < put_back < len(AFTER)


def test_a_whole_lock_stays_and_without_a_copy_nothing_happens(tmp_path, copy):
    (tmp_path / LOCK).write_text(BEFORE)
    keep_lock(copy, tmp_path)
    (tmp_path / LOCK).write_text(AFTER)
    assert not mend_lock(copy, tmp_path)
    assert (tmp_path / LOCK).read_text() == AFTER
    (tmp_path / LOCK).write_text("schema: '2.")
    assert not mend_lock(copy, tmp_path)
    assert (tmp_path / LOCK).read_text() == "schema: '2."


def test_a_first_lock_that_was_cut_is_removed(tmp_path, copy):
    keep_lock(copy, tmp_path)
    (tmp_path / LOCK).write_text(AFTER[:12])
    assert mend_lock(copy, tmp_path)
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("text, stays", [("", False), ('{"a": {"write": {"pid"', False), ("{}", True), (None, False)])
def test_only_a_broken_list_of_readers_and_writers_is_removed(tmp_path, text, stays):
    path = tmp_path / ".dvc" / "tmp" / "rwlock"
    path.parent.mkdir(parents=True)
    if text is not None:
        path.write_text(text)
    drop_broken_rwlock(tmp_path)
    assert path.exists() == stays
