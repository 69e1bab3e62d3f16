"""Commands of a copy of this repository, each in a process of its own that need not import everything anew."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Its children are fresh processes as far as a command can tell: arguments, folder, environment, standard streams,
# limits and exit status are their own. What starts with the interpreter (encoding, hash seed) is the parent's.
PARENT = '''
import gc, json, os, resource, runpy, signal, sys
import hydra.main, scipy.stats
import nexus.advise_command, nexus.call_command, nexus.cli, nexus.collect, nexus.compile_blocks, nexus.config
import nexus.figures, nexus.pipeline, nexus.report_page, nexus.reproduce, nexus.route_command, nexus.tables
# Hydra's parser learns its grammar at the first use.
nexus.config.validate(nexus.config.compose(["seed=1"]))
# A collection in a child would write to, and so copy, every page of this process.
gc.freeze()

for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid:
        # Not an alarm of the child's own: the C++ interpreter takes that signal for itself.
        signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
        signal.alarm(order["seconds"])
        _, status, used = os.wait4(pid, 0)
        signal.alarm(0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
        continue
    for descriptor, name in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
        os.dup2(os.open(name, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdin = open(0, closefd=False)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    if order["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"],) * 2)
    module, *sys.argv[1:] = order["command"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    break
'''


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str
    cpu_seconds: float
    """Time that it computed; how long it took depends on what else the machine does."""


class Commands:
    """`python -m <module> <arguments>` in the copy at `root`; standard streams go through files in `scratch`."""

    def __init__(self, root: Path, environment: Mapping[str, str], scratch: Path):
        self.root, self.environment = root, {**environment, "PYTHONPATH": str(root)}
        self._streams = [scratch / "stdout", scratch / "stderr"]
        self._parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, env=self.environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def forked(self, command: Sequence[str], environment: Mapping[str, str | None], seconds: int,
               file_bytes: int | None = None) -> Ended:
        """How the module ended, after `seconds` with status -9; no file that it writes is longer than `file_bytes`.

        command   module and arguments
        """
        self._parent.stdin.write(json.dumps({
            "command": list(command), "folder": str(self.root), "seconds": seconds, "file_bytes": file_bytes,
            "environment": self._merged(environment),
            "stdout": str(self._streams[0]), "stderr": str(self._streams[1])}) + "\n")
        self._parent.stdin.flush()
        status, cpu_seconds = self._parent.stdout.readline().split()
        return self._ended(int(status), float(cpu_seconds))

    def started(self, command: Sequence[str], environment: Mapping[str, str | None], seconds: int) -> Ended:
        """How the program ended, started by itself; after `seconds` with status -9."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with self._streams[0].open("wb") as stdout, self._streams[1].open("wb") as stderr:
            child = subprocess.Popen(command, cwd=self.root, env=self._merged(environment), stdin=subprocess.DEVNULL,
                                     stdout=stdout, stderr=stderr)
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return self._ended(child.returncode, used)

    def close(self) -> None:
        self._parent.stdin.close()
        self._parent.wait()

    def _merged(self, environment: Mapping[str, str | None]) -> dict[str, str]:
        return {key: value for key, value in {**self.environment, **environment}.items() if value is not None}

    def _ended(self, status: int, cpu_seconds: float) -> Ended:
        return Ended(status, *(stream.read_bytes().decode("utf-8", "surrogateescape") for stream in self._streams),
                     cpu_seconds)
