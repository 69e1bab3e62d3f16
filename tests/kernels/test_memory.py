"""The kernels under the address and undefined-behaviour sanitizers: no byte outside of a buffer, whatever the input."""
from __future__ import annotations

import subprocess
from pathlib import Path

from nexus.native import KERNELS

SOURCE = Path(__file__).with_name("memory_check.cpp")
EXPECTED = """\
states taken=1 refused=1 cut_taken=0
rotation done
conversions and checksum done=1
blocks taken=1 refused=1
"""


def test_exact_buffers_and_damaged_input_stay_in_bounds(need_programs, tmp_path):
    need_programs("g++")
    program = tmp_path / "memory_check"
    subprocess.run(["g++", "-std=c++17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                    f"-I{KERNELS}", SOURCE, "-o", program], check=True, timeout=120)
    run = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == EXPECTED
