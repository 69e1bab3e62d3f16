"""What the CPU claims to have, against the operating system's own list."""
from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

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
