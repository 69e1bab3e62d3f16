"""What the CPU claims to have, against the operating system's own list, and which kernel is chosen for it.

The machine that runs the tests is one CPU; others are emulated by qemu-user: with AVX2 only, and with neither.
"""
from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nexus import native
from nexus.native import KERNELS
from nexus.splice import SpliceRefused, choose_isa

SOURCE = Path(__file__).with_name("isa_check.cpp")
NAMES = ("scalar", "avx2", "avx512", "neon")
MACHINE = platform.machine()
LINUX_FLAGS = {
    "x86_64": {"avx2": "avx2", "fma": "fma", "f16c": "f16c", "avx512f": "avx512f", "avx512bw": "avx512bw",
               "avx512vl": "avx512vl", "avx512vnni": "avx512_vnni"},
    "aarch64": {"neon": "asimd", "dotprod": "asimddp"},
}


def linux_flags() -> set[str]:
    """Feature words that the kernel lists for the first CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/cpuinfo exists on Linux only")
def test_features_are_those_the_operating_system_lists(k):
    flags = linux_flags()
    assert flags
    found = k.cpu_features()
    for field, word in LINUX_FLAGS[MACHINE].items():
        assert bool(getattr(found, field)) == (word in flags), field


def test_features_of_the_other_architecture_are_absent(k):
    found = k.cpu_features()
    foreign = ("neon", "dotprod") if MACHINE in ("x86_64", "AMD64") else tuple(LINUX_FLAGS["x86_64"])
    assert not any(getattr(found, field) for field in foreign)


def test_isa_names_and_availability(k):
    assert [str(k.isa_name(code)) for code in range(5)] == ["scalar", "avx2", "avx512", "neon", "unknown"]
    assert k.isa_available(k.kScalar)
    assert not k.isa_available(-1) and not k.isa_available(4)
    found = k.cpu_features()
    assert k.isa_available(k.kAvx2) == (found.avx2 and found.fma and found.f16c)
    assert k.isa_available(k.kAvx512) == (found.avx512f and found.avx512bw and found.avx512vl)
    assert k.isa_available(k.kNeon) == found.neon


def test_best_isa_is_the_widest_available(k):
    widest_first = (k.kAvx512, k.kAvx2, k.kNeon, k.kScalar)
    assert k.best_isa() == next(code for code in widest_first if k.isa_available(code))


def test_every_available_isa_can_be_chosen_by_name_and_no_other(k):
    available = [name for code, name in enumerate(NAMES) if k.isa_available(code)]
    assert "scalar" in available
    for code, name in enumerate(NAMES):
        if name in available:
            assert choose_isa(name) == (name, code)
        else:
            with pytest.raises(SpliceRefused, match=f"'{name}' is not available.*use one of {', '.join(available)}$"):
                choose_isa(name)
    assert choose_isa() == (NAMES[k.best_isa()], k.best_isa())


@pytest.mark.parametrize(("present", "best"), [((0,), 0), ((0, 1), 1), ((0, 1, 2), 2), ((0, 3), 3)])
def test_the_choice_follows_what_the_cpu_has(k, monkeypatch, present, best):
    """A CPU without AVX-512, and the others: the name that is recorded is the one that runs there."""
    cpu = SimpleNamespace(isa_name=k.isa_name, isa_available=present.__contains__, best_isa=lambda: best)
    monkeypatch.setattr(native, "kernels", lambda: cpu)
    assert choose_isa() == choose_isa(NAMES[best]) == (NAMES[best], best)
    for missing in set(range(4)) - set(present):
        with pytest.raises(SpliceRefused, match=f"use one of {', '.join(NAMES[code] for code in present)}$"):
            choose_isa(NAMES[missing])


@pytest.fixture(scope="module")
def emulated(need_programs, tmp_path_factory) -> Path:
    """A static x86-64 program that runs every version that is available and names the best."""
    if not sys.platform.startswith("linux") or MACHINE != "x86_64":
        pytest.skip("emulates older x86-64 CPUs on Linux x86-64")
    need_programs("g++", "qemu-x86_64-static")
    program = tmp_path_factory.mktemp("emulated") / "isa_check"
    subprocess.run(["g++", "-std=c++17", "-O1", "-static", f"-I{KERNELS}", SOURCE, "-o", program],
                   check=True, timeout=120)
    return program


@pytest.mark.parametrize(("cpu", "features", "versions"), [
    ("Nehalem", "avx2=0 fma=0 f16c=0 avx512=0000", ["scalar"]),
    ("Haswell", "avx2=1 fma=1 f16c=1 avx512=0000", ["scalar", "avx2"]),
])
def test_an_older_cpu_gets_a_kernel_that_it_can_run(emulated, cpu, features, versions):
    run = subprocess.run(["qemu-x86_64-static", "-cpu", cpu, emulated], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [features, *(f"{name} right" for name in versions), f"best {versions[-1]}"]
