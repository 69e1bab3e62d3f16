"""Each kernel header compiles alone with a plain C++17 compiler and warnings as errors: cling is more forgiving."""
from __future__ import annotations

import shutil
import subprocess

import pytest

from nexus.native import HEADERS, KERNELS


@pytest.mark.parametrize("compiler", ["g++", "clang++", "aarch64-linux-gnu-g++"])
def test_each_header_compiles_alone(need_programs, compiler, tmp_path):
    if compiler == "clang++" and shutil.which(compiler) is None:
        pytest.skip("clang++ is not installed; cling, which every other test uses, is a clang")
    need_programs(compiler)
    for header in HEADERS:
        source = tmp_path / f"{header}.cpp"
        source.write_text(f'#include "{header}"\n#include "{header}"\n')
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{KERNELS}",
                    *(tmp_path / f"{header}.cpp" for header in HEADERS)], check=True, timeout=120)
