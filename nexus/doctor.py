"""`nexus doctor`: what is installed, which kernels this CPU gets, which weights are here, and how to mend what is not."""
from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nexus import native
from nexus.config import CONF, ROOT, ConfigError, compose, validate
from nexus.weights import WeightsError, verified_file, weights_folder

PACKAGES = ("cppyy", "llama-cpp-python", "numpy", "scipy", "hydra-core", "dvc")
DISK_GB = 2.0
# The C++ interpreter asks the compiler where the standard library's headers are, through the others.
COMPILERS, NEEDED_BY_COMPILER = ("c++", "g++", "clang++"), ("sed", "ldd") if sys.platform == "linux" else ("sed",)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    status: str
    """"ok", "note" (works, but worth knowing) or "wrong"."""
    detail: str
    remedy: str = ""


def _python() -> Iterator[Finding]:
    inside = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    yield Finding("Python", "ok" if inside else "note", f"{platform.python_version()} on {platform.platform()}",
                  "" if inside else "not the project's .venv; run `make install` and .venv/bin/nexus")
    for package in PACKAGES:
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "wrong", "not installed", "make install")


def _compiler() -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    missing = [program for program in NEEDED_BY_COMPILER if shutil.which(program) is None]
    if found is None:
        yield Finding("C++ compiler", "wrong", f"none on the PATH (looked for {', '.join(COMPILERS)})",
                      "install one (Debian/Ubuntu: apt-get install g++, macOS: xcode-select --install)")
    elif missing:
        yield Finding("C++ compiler", "wrong", f"{found}, without {' and '.join(missing)} on the PATH", "mend the PATH")
    else:
        yield Finding("C++ compiler", "ok", found)


def _kernels() -> Iterator[Finding]:
    kernels = native.kernels()
    features = kernels.cpu_features()
    names = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "neon", "dotprod")
    yield Finding("CPU features", "ok", ", ".join(name for name in names if getattr(features, name)) or "none of use")
    chosen = str(kernels.isa_name(kernels.best_isa()))
    yield Finding("key rotation kernel", "ok" if chosen != "scalar" else "note", chosen,
                  "" if chosen != "scalar" else "no vector unit that the kernels know: splices are some 50 times slower")


def _llama() -> Iterator[Finding]:
    gbl = native.llama()
    yield Finding("llama.cpp", "ok", f"{gbl.llama_version()} at {native.llama_library().name}")
    yield Finding("llama.cpp features", "ok", str(gbl.llama_print_system_info()).strip())


def _weights() -> Iterator[Finding]:
    for path in sorted((CONF / "model").glob("*.yaml")):
        if path.stem == "local":
            continue
        try:
            spec = validate(compose([f"model={path.stem}"])).model
        except ConfigError as error:
            yield Finding(f"weights {path.stem}", "wrong", str(error), f"mend conf/model/{path.name}")
            continue
        size = f"{spec.size_bytes / 1e6:.0f} MB" if spec.size_bytes else "size not pinned"
        try:
            file = verified_file(spec)
        except WeightsError as error:
            yield Finding(f"weights {spec.name}", "wrong", str(error), f"delete the file; then make repro MODEL={spec.name}")
            continue
        if file is None:
            yield Finding(f"weights {spec.name}", "note", f"not here ({size})", f"make repro MODEL={spec.name} fetches them")
        else:
            yield Finding(f"weights {spec.name}", "ok", f"verified, {size}, {file}")


def _disk() -> Iterator[Finding]:
    for name, folder in (("project", ROOT), ("weights", weights_folder())):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free / 1e9
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            why = "may not be written" if existing.is_dir() else "is not a folder"
            yield Finding(f"disk for {name}", "wrong", f"{folder}: {existing} {why}",
                          "set NEXUS_WEIGHTS to another folder" if name == "weights" else "change its permissions")
            continue
        yield Finding(f"disk for {name}", "ok" if free > DISK_GB else "wrong", f"{free:.1f} GB free at {folder}",
                      "" if free > DISK_GB else "free some space" + (" or set NEXUS_WEIGHTS" if name == "weights" else ""))


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _compiler, _kernels, _llama, _weights, _disk)


def findings() -> list[Finding]:
    """All findings, in reading order. A check that fails becomes a finding; it does not hide the others."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found.extend(check())
        except Exception as error:
            found.append(Finding(check.__name__.strip("_"), "wrong", native.describe(error), "make install"))
    return found


def report(args: argparse.Namespace | None = None) -> int:
    """Prints the findings; 0 when nothing is wrong, 1 otherwise."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("what", "status", "detail"):
        table.add_column(column, overflow="fold")
    found = findings()
    colours = {"ok": "green", "note": "yellow", "wrong": "bold red"}
    for finding in found:
        detail = finding.detail + (f"\n→ {finding.remedy}" if finding.remedy else "")
        # A path or a message may hold brackets, which rich would read as markup.
        table.add_row(escape(finding.what), f"[{colours[finding.status]}]{finding.status}[/]", escape(detail))
    console = Console()
    console.print(table)
    wrong = sum(finding.status == "wrong" for finding in found)
    console.print(f"\n{wrong} thing{'s are' if wrong != 1 else ' is'} wrong." if wrong else "\nNothing is wrong.")
    return 1 if wrong else 0
