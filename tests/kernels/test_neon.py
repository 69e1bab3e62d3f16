"""The NEON kernels, cross-compiled and run under qemu-user: the only place where an x86 machine sees that path.

Needs Debian's `g++-aarch64-linux-gnu` and `qemu-user-static`. Without them the test is skipped, except where the
environment sets CI: there it fails, so that the path cannot go untested unnoticed.
"""
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nexus.native import KERNELS

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SOURCE = Path(__file__).with_name("neon_check.cpp")


@pytest.fixture(scope="module")
def program(need_programs, tmp_path_factory) -> Path:
    """The check, compiled for aarch64."""
    need_programs(COMPILER, EMULATOR)
    program = tmp_path_factory.mktemp("neon") / "neon_check"
    subprocess.run([COMPILER, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-static", f"-I{KERNELS}", SOURCE,
                    "-o", program], check=True, timeout=120)
    return program


@pytest.mark.parametrize(("cpu", "dotprod"), [("max", 1), ("cortex-a53", 0)])
def test_neon_rotation_equals_the_reference(program, cpu, dotprod):
    run = subprocess.run([EMULATOR, "-cpu", cpu, program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert f"neon=1 dotprod={dotprod} best=neon" in run.stdout
    assert run.stdout.endswith("passed\n")
