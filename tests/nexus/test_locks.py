import os
import signal
import subprocess
import sys

import pytest

from nexus.locks import LockedError, exclusive, machine_folder, measuring

HOLDER = """
import subprocess, sys
from nexus.locks import exclusive
with exclusive(sys.argv[1], "results"):
    child = subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL) if "child" in sys.argv else None
    print(child.pid if child else 0, flush=True)
    sys.stdin.read()
"""


def hold(folder, *options):
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_second_process_fails_at_once_and_names_the_first(tmp_path):
    with hold(tmp_path) as holder:
        holder.stdout.readline()
        with pytest.raises(LockedError, match=rf"process {holder.pid} .*results\.lock.*`kill {holder.pid}`"):
            with exclusive(tmp_path, "results"):
                pytest.fail("two writers")
        with exclusive(tmp_path, "other"):
            pass
        holder.communicate()
    with exclusive(tmp_path, "results") as path:
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_killed_holder_leaves_no_lock_even_if_its_child_lives(tmp_path):
    with hold(tmp_path, "child") as holder:
        child = int(holder.stdout.readline())
        try:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            os.kill(child, 0)
            with exclusive(tmp_path, "results") as path:
                assert path.read_text() == f"{os.getpid()}\n"
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_lock_is_not_reentrant_and_is_released_by_an_error(tmp_path):
    with pytest.raises(KeyError):
        with exclusive(tmp_path / "new" / "folder", "results"):
            with pytest.raises(LockedError, match=f"process {os.getpid()} "):
                with exclusive(tmp_path / "new" / "folder", "results"):
                    pytest.fail("two writers")
            raise KeyError
    with exclusive(tmp_path / "new" / "folder", "results"):
        pass


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "a b"])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="lock name"):
        with exclusive(tmp_path, name):
            pytest.fail("locked")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        with exclusive(tmp_path / "file", "results"):
            pytest.fail("locked")


MEASURER = """
import sys
from nexus.locks import measuring
with measuring(sys.argv[1], alone=sys.argv[2] == "alone"):
    print("measuring", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("first, then, refused", [
    ("alone", True, "slb_latency takes times, and splice_cost \\(process {}\\) measures on this machine"),
    ("alone", False, "splice_cost \\(process {}\\) takes times on this machine, which slb_latency would disturb"),
    ("shared", True, "slb_latency takes times, and splice_cost \\(process {}\\) measures on this machine"),
    ("shared", False, None)])
def test_what_takes_times_measures_alone_on_its_machine(tmp_path, monkeypatch, first: str, then: bool, refused):
    monkeypatch.setenv("NEXUS_LOCKS", str(tmp_path / "locks"))
    assert machine_folder() == tmp_path / "locks"
    with subprocess.Popen([sys.executable, "-c", MEASURER, "splice_cost", first], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        if refused is None:
            with measuring("slb_latency", alone=then):
                pass
        else:
            with pytest.raises(LockedError, match=refused.format(holder.pid) + ".*share_machine=true"):
                with measuring("slb_latency", alone=then):
                    pytest.fail("two at once")
        holder.kill()
    with measuring("slb_latency", alone=True) as path:
        assert path.read_text() == f"{os.getpid()} slb_latency\n"


def test_a_lock_of_the_machine_that_cannot_be_written_names_the_remedies(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEXUS_LOCKS", str(tmp_path / "file"))
    with pytest.raises(LockedError, match="set NEXUS_LOCKS to another folder, or share_machine=true"):
        with measuring("slb_latency", alone=True):
            pytest.fail("no lock")
