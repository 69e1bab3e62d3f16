"""Set up `.venv` from the hash lock. Run by `make`; standard library only.

The order matters. Build isolation is not hash-checked, so what source-only packages need to build is installed
first and the rest is built without isolation. llama.cpp comes last because it takes minutes.
The text of this file parses on old Pythons too, so that they get a message and not a syntax error.
"""
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time

ROOT = os.path.dirname(os.path.abspath(__file__))
LOCK = os.path.join(ROOT, "requirements.txt")
STAMP = "installed"
OLDEST, FIRST_UNSUPPORTED = (3, 11), (3, 14)
DISK_GB = 4.0
BUILD_FIRST = ("setuptools", "wheel", "scikit-build-core", "packaging", "pathspec", "cppyy-cling")
BUILD_LAST = ("llama-cpp-python",)
# The multimodal part is not used; it would double the build.
CMAKE_ARGS = "-DLLAVA_BUILD=OFF"


class CannotInstall(Exception):
    """One line: what is wrong and how to mend it."""


def check_python(version=None):
    version = tuple(version or sys.version_info[:2])
    if not OLDEST <= version < FIRST_UNSUPPORTED:
        raise CannotInstall(
            "Python %d.%d is not supported; install Python 3.11, 3.12 or 3.13 and run `make PYTHON=python3.11 ...`"
            % version
        )


def check_python_parts():
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise CannotInstall(
            "this Python has no venv module; install it (Debian/Ubuntu: apt-get install python3-venv)"
        ) from None
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        raise CannotInstall(
            "Python headers are missing (%s); install them (Debian/Ubuntu: apt-get install python3-dev)" % header
        )


def check_platform(system=None, machine=None, mac_version=None):
    system, machine = system or platform.system(), machine or platform.machine()
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        return
    if system == "Darwin" and machine == "arm64":
        mac_version = mac_version or platform.mac_ver()[0]
        if int(mac_version.split(".")[0] or 0) >= 14:
            return
        raise CannotInstall("macOS %s is too old; macOS 14 or later is needed" % mac_version)
    raise CannotInstall(
        "%s on %s is not supported; use Linux (x86-64, aarch64) or macOS 14+ on Apple silicon" % (system, machine)
    )


def check_tools(which=shutil.which, environ=None):
    environ = os.environ if environ is None else environ
    compiler = environ.get("CXX")
    found = which(compiler.split()[0]) if compiler else which("c++") or which("g++") or which("clang++")
    if not found:
        raise CannotInstall(
            "no C++ compiler%s; install one (Debian/Ubuntu: apt-get install g++, macOS: xcode-select --install)"
            % (" at CXX=%s" % compiler if compiler else " (looked for c++, g++, clang++)")
        )
    for tool in ("cmake", "make", "git"):
        if not which(tool):
            raise CannotInstall(
                "%s is not on the PATH; install it (Debian/Ubuntu: apt-get install %s, macOS: brew install %s)"
                % (tool, tool, tool)
            )


def check_disk(folder, free_bytes=None):
    if free_bytes is None:
        free_bytes = shutil.disk_usage(folder).free
    if free_bytes < DISK_GB * 1e9:
        raise CannotInstall(
            "only %.1f GB free at %s; the environment needs %.0f GB: free some space or clone elsewhere"
            % (free_bytes / 1e9, folder, DISK_GB)
        )


def lock_entries(text):
    """{normalised name: [requirement blocks]}; a name has several blocks where versions differ by Python version."""
    entries = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        name = re.match(r"[A-Za-z0-9._-]+", block).group(0)
        entries.setdefault(re.sub(r"[-_.]+", "-", name).lower(), []).append(block)
    return entries


def say(text):
    print("nexus install: " + text, flush=True)


def pip(python, log, blocks, extra=(), on_line=None):
    """Install the given lock blocks with hashes enforced. Output goes to `log`; the end of it is shown on failure."""
    listing = log + ".requirements.txt"
    with open(listing, "w") as f:
        f.write("\n".join(blocks) + "\n")
    environ = dict(os.environ)
    # Exported, this would also bind pip calls inside build scripts, which have no hashes.
    environ.pop("PIP_REQUIRE_HASHES", None)
    environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    environ["CMAKE_ARGS"] = (environ.get("CMAKE_ARGS", "") + " " + CMAKE_ARGS).strip()
    environ["PATH"] = os.path.dirname(python) + os.pathsep + environ.get("PATH", "")
    command = [python, "-m", "pip", "install", "--require-hashes", "--no-deps", "--no-build-isolation"]
    command += list(extra) + ["-r", listing]
    tail = []
    with open(log, "w") as out:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ)
        for raw in child.stdout:
            line = raw.decode("utf-8", "replace")
            out.write(line)
            tail = (tail + [line])[-15:]
            if on_line:
                on_line(line)
        status = child.wait()
    if status:
        sys.stderr.write("".join(tail))
        raise CannotInstall("pip failed (status %d); the whole output is in %s. Mend the cause and run again"
                            % (status, log))


class BuildProgress:
    """Shows how far the compiler is, from the `[ 45%]` or `[123/456]` marks of make and ninja."""

    def __init__(self):
        self.start, self.shown = time.time(), -10

    def __call__(self, line):
        mark = re.search(r"\[\s*(\d+)%\]", line)
        part = re.search(r"\[(\d+)/(\d+)\]", line)
        if mark:
            percent = int(mark.group(1))
        elif part:
            percent = 100 * int(part.group(1)) // max(1, int(part.group(2)))
        else:
            return
        if percent >= self.shown + 5:
            self.shown, spent = percent, time.time() - self.start
            left = " about %d s left" % (spent * (100 - percent) / percent) if percent >= 10 else ""
            say("  llama.cpp %3d %%, %d s,%s" % (percent, spent, left))


def fingerprint():
    digest = hashlib.sha256()
    for name in ("requirements.txt", "pyproject.toml", "install.py"):
        with open(os.path.join(ROOT, name), "rb") as f:
            digest.update(f.read())
    digest.update(sys.version.encode())
    return digest.hexdigest()


def install(folder):
    stamp = os.path.join(folder, STAMP)
    want = fingerprint()
    if os.path.exists(stamp):
        with open(stamp) as f:
            if f.read() == want:
                return
    check_python_parts()
    check_platform()
    check_tools()
    check_disk(ROOT)
    start = time.time()
    python = os.path.join(folder, "bin", "python")
    if os.path.exists(stamp):
        os.unlink(stamp)
    if not os.path.exists(python):
        say("creating %s" % folder)
        subprocess.check_call([sys.executable, "-m", "venv", folder])
    logs = os.path.join(folder, "log")
    os.makedirs(logs, exist_ok=True)
    with open(LOCK) as f:
        entries = lock_entries(f.read())

    def blocks(names):
        return [block for name in names for block in entries[name]]

    if platform.system() == "Linux" and platform.machine() == "aarch64":
        say("step 1 of 3: build tools; on Linux aarch64 the C++ interpreter builds from source, which takes an hour")
    else:
        say("step 1 of 3: build tools and the C++ interpreter (under a minute)")
    pip(python, os.path.join(logs, "1-build-tools.log"), blocks(BUILD_FIRST))
    say("step 2 of 3: packages (one to two minutes)")
    rest = sorted(set(entries) - set(BUILD_FIRST) - set(BUILD_LAST))
    pip(python, os.path.join(logs, "2-packages.log"), blocks(rest))
    say("step 3 of 3: llama.cpp from source (about 11 minutes on 2 cores; seconds when pip has it cached)")
    pip(python, os.path.join(logs, "3-llama-cpp.log"), blocks(BUILD_LAST), extra=["-v"], on_line=BuildProgress())
    subprocess.check_call([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                           "--editable", ROOT])
    with open(stamp + ".part", "w") as f:
        f.write(want)
    os.replace(stamp + ".part", stamp)
    say("done in %d s" % (time.time() - start))


if __name__ == "__main__":
    try:
        check_python()
        install(os.path.join(ROOT, ".venv"))
    except CannotInstall as reason:
        sys.exit("nexus install: " + str(reason))
    except KeyboardInterrupt:
        sys.exit("nexus install: stopped; run the same command again to go on")
    except (OSError, subprocess.CalledProcessError) as reason:
        sys.exit("nexus install: %s" % reason)
