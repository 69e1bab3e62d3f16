"""One writer at a time: an operating-system lock that a dying process cannot leave behind."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LockedError(RuntimeError):
    """Another process holds the lock; the message names its pid and what to do."""


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
