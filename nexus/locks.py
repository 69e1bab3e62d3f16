"""One writer, and one measurement of times, at a time: operating-system locks that no dying process leaves behind."""

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


class LockedError(RuntimeError):
    """Another process holds the lock; the message names its pid and what to do."""


def machine_folder() -> Path:
    """Where this user's processes see each other, whatever their checkout: NEXUS_LOCKS, or in the user's cache."""
    chosen = os.environ.get("NEXUS_LOCKS")
    return Path(chosen) if chosen else platformdirs.user_cache_path("nexus") / "locks"


@contextmanager
def measuring(name: str, *, alone: bool) -> Iterator[Path]:
    """The lock file of this machine, held while the experiment `name` measures.

    `alone` for one that takes times: nothing else may hold the lock then. Others share it.
    Raises LockedError at once where that cannot be, or cannot be known because the file cannot be written.
    """
    # A home may be on a network, with the caches of many machines in one folder.
    path = machine_folder() / f"measuring-{re.sub(r'[^A-Za-z0-9.-]+', '-', platform.node())}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise LockedError(f"{path} cannot be written ({error.strerror}), so nobody knows whether others measure here: "
                          "set NEXUS_LOCKS to another folder, or share_machine=true") from None
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            # A holder that has just taken the lock may not yet have replaced the last one's name.
            time.sleep(0.05)
            raise LockedError(_measured(name, alone, os.pread(descriptor, 200, 0).decode(errors="replace"))) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {name}\n".encode(), 0)
        yield path
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(folder: Path | str, name: str) -> Iterator[Path]:
    """The lock file `<folder>/<name>.lock`, held until the block ends or the process dies.

    Needed because killing dvc leaves its stage alive: without a lock that stage and the next run would write the same
    results. The file itself stays; the lock is on it, not its existence.
    Raises LockedError at once if the lock is held, ValueError for a name that is not one plain file name.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"lock name {name!r}: use letters, digits, '.', '_' and '-' only")
    path = Path(folder) / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not inherited by programs that this process starts, else they would keep the lock after its death.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A holder that has just taken the lock may not yet have replaced a dead one's pid.
            time.sleep(0.05)
            raise LockedError(_held(path, os.read(descriptor, 32).decode(errors="replace").strip())) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        try:
            yield path
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _held(path: Path, pid: str) -> str:
    if pid.isdigit():
        return (
            f"process {pid} is already writing these results (it holds {path}): "
            f"wait until it ends, or stop it with `kill {pid}`, then run again"
        )
    return f"another process is already writing these results (it holds {path}): wait until it ends, then run again"


def _measured(name: str, alone: bool, holder: str) -> str:
    found = re.match(r"(\d+) (.+)\n", holder)
    other = f"{found[2]} (process {found[1]})" if found else "another experiment"
    reason = (f"{name} takes times, and {other} measures on this machine" if alone else
              f"{other} takes times on this machine, which {name} would disturb")
    return f"{reason}: wait until it ends, or accept times of a shared machine with share_machine=true"
