"""The lookaside scan: every instruction set against a plain scalar product, to the bit, whatever shape and codes.

The machine that runs the tests is one CPU; the others, NEON among them, are emulated by qemu-user.
"""
from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from nexus import slb
from nexus.native import KERNELS
from nexus.slb import Lookaside, available_isas

SOURCE = Path(__file__).with_name("slb_check.cpp")
HEADERS = ("slb_layout.hpp", "slb_topk.hpp", "slb_dot.hpp", "slb_query.hpp", "slb_scan.hpp", "slb_ceiling.hpp")
SHAPES = 8 * 10 * 4 * 6
RIGHT = f"searches={SHAPES} wrong=0 quantised=69 badly=0"
ISAS = available_isas()


def hits_of(table: Lookaside, query: np.ndarray, k: int) -> list[tuple[int, int]]:
    """Ids and products of a scan, as pairs."""
    return list(zip(*map(np.ndarray.tolist, table.scan(query, k))))


def expected_hits(codes: np.ndarray, query: np.ndarray, k: int) -> list[tuple[int, int]]:
    """The k best rows by exact integer arithmetic, lowest id first among equals."""
    products = codes.astype(np.int64) @ query.astype(np.int64)
    return [(int(i), int(products[i])) for i in np.argsort(-products, kind="stable")[:k]]


@st.composite
def tables(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes, a query and k: narrow ranges give ties, the full one gives -128."""
    n, dim = draw(st.integers(0, 200)), draw(st.integers(1, 130))
    low, high = draw(st.sampled_from([(-128, 127), (-128, -127), (0, 1), (-1, 1), (126, 127)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    codes = rng.integers(low, high, (n, dim), endpoint=True).astype(np.int8)
    return codes, rng.integers(low, high, dim, endpoint=True).astype(np.int8), draw(st.integers(1, 220))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=150, deadline=None)
@given(case=tables())
@example(case=(np.zeros((130, 7), np.int8), np.ones(7, np.int8), 5))
@example(case=(np.full((65, 33), -128, np.int8), np.full(33, -128, np.int8), 70))
def test_a_search_is_the_sorted_list_of_exact_products(isa, case):
    codes, query, k = case
    assert hits_of(Lookaside.from_codes(codes, isa=isa), query, k) == expected_hits(codes, query, k)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [1, 33, 100, 383, 384, 768, 65536])
def test_the_largest_products_do_not_overflow(isa, dim):
    for row, factor in ((-128, -128), (-128, 127), (127, -128), (127, 127)):
        codes = np.full((3, dim), row, np.int8)
        hits = hits_of(Lookaside.from_codes(codes, isa=isa), np.full(dim, factor, np.int8), 2)
        assert hits == [(0, row * factor * dim), (1, row * factor * dim)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 64, 100, 1000])
@pytest.mark.parametrize("k", [1, 64, 65, 1000, 2000])
def test_padding_rows_never_win_although_every_score_is_negative(isa, n, k):
    codes = np.full((n, 5), -3, np.int8)
    hits = hits_of(Lookaside.from_codes(codes, isa=isa), np.full(5, 2, np.int8), k)
    assert hits == [(i, -30) for i in range(min(n, k))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [3, 64, 65, 5000])
def test_threads_change_nothing(isa, k, monkeypatch):
    monkeypatch.setattr(slb, "THREADED_ROWS", 0)
    rng = np.random.default_rng(7)
    codes, query = rng.integers(-2, 3, (3000, 20)).astype(np.int8), rng.integers(-2, 3, 20).astype(np.int8)
    for threads in (1, 2, 5, 100):
        table = Lookaside.from_codes(codes, isa=isa, threads=threads)
        assert table.threads == min(threads, 47)
        assert hits_of(table, query, k) == expected_hits(codes, query, k)


@pytest.mark.parametrize("ascending", [True, False])
def test_many_hits_are_as_right_as_few_when_every_row_replaces_another(ascending):
    codes = np.repeat(np.arange(-128, 128, dtype=np.int8)[:, None], 3, axis=0)
    codes = codes if ascending else codes[::-1]
    for k in (1, 63, 64, 65, 300, 768):
        query = np.ones(1, np.int8)
        assert hits_of(Lookaside.from_codes(codes), query, k) == expected_hits(codes, query, k)


def test_the_table_refuses_what_it_cannot_hold():
    kernels = slb._native()
    with pytest.raises(Exception, match="isa 9 .unknown. is not available"):
        kernels.SlbTable(0, 0, 4, 4, 1.0, 9, 1)
    with pytest.raises(Exception, match="dim is 0; it must be 1 to 65536"):
        kernels.SlbTable(0, 0, 0, 0, 1.0, 0, 1)
    with pytest.raises(Exception, match="dim is 65537"):
        kernels.SlbTable(0, 0, 65537, 65537, 1.0, 0, 1)
    with pytest.raises(Exception, match="n_rows is 2147483648"):
        kernels.SlbTable(0, 2**31, 1, 1, 1.0, 0, 1)
    with pytest.raises(Exception, match="n_threads is 0"):
        kernels.SlbTable(0, 0, 1, 1, 1.0, 0, 0)


def test_the_default_is_the_fastest_that_the_cpu_has():
    kernels = slb._native()
    order = (kernels.kSlbAvx512Vnni, kernels.kSlbAvx2, kernels.kSlbNeonDotprod, kernels.kSlbNeon, kernels.kSlbScalar)
    best = next(code for code in order if kernels.slb_isa_available(code))
    assert ISAS[0] == "scalar" and ISAS[-1] == str(kernels.slb_isa_name(best))
    assert Lookaside(np.ones((1, 1), np.float32)).isa == ISAS[-1]
    found = kernels.cpu_features()
    assert kernels.slb_isa_available(kernels.kSlbAvx512Vnni) == (
        found.avx512f and found.avx512bw and found.avx512vl and found.avx512vnni)
    assert not kernels.slb_isa_available(-1) and not kernels.slb_isa_available(kernels.kSlbIsas)


def run_check(program: Path, *emulator: str) -> list[str]:
    run = subprocess.run([*emulator, program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout.splitlines()


def test_no_byte_outside_of_a_buffer_is_touched(need_programs, tmp_path):
    need_programs("g++")
    program = tmp_path / "slb_check"
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                    f"-I{KERNELS}", SOURCE, "-o", program], check=True, timeout=120)
    assert sorted(run_check(program)) == sorted([*(f"{isa} {RIGHT}" for isa in ISAS), f"best {ISAS[-1]}"])


@pytest.fixture(scope="module")
def neon_program(need_programs, tmp_path_factory) -> Path:
    """The check, compiled for aarch64."""
    need_programs("aarch64-linux-gnu-g++", "qemu-aarch64-static")
    program = tmp_path_factory.mktemp("neon") / "slb_check"
    subprocess.run(["aarch64-linux-gnu-g++", "-std=c++17", "-O2", "-static", f"-I{KERNELS}", SOURCE, "-o", program],
                   check=True, timeout=120)
    return program


@pytest.mark.parametrize(("cpu", "isas"), [("max", ["scalar", "neon", "neon-dotprod"]),
                                           ("cortex-a53", ["scalar", "neon"])])
def test_neon_equals_the_reference_with_and_without_dot_product(neon_program, cpu, isas):
    lines = run_check(neon_program, "qemu-aarch64-static", "-cpu", cpu)
    assert lines == [*(f"{isa} {RIGHT}" for isa in isas), f"best {isas[-1]}"]


@pytest.fixture(scope="module")
def x86_program(need_programs, tmp_path_factory) -> Path:
    """The check, compiled for any x86-64."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("emulates older x86-64 CPUs on Linux x86-64")
    need_programs("g++", "qemu-x86_64-static")
    program = tmp_path_factory.mktemp("x86") / "slb_check"
    subprocess.run(["g++", "-std=c++17", "-O2", "-static", f"-I{KERNELS}", SOURCE, "-o", program],
                   check=True, timeout=120)
    return program


@pytest.mark.parametrize(("cpu", "isas"), [("Nehalem", ["scalar"]), ("Haswell", ["scalar", "avx2"])])
def test_an_older_cpu_gets_a_scan_that_it_can_run(x86_program, cpu, isas):
    lines = run_check(x86_program, "qemu-x86_64-static", "-cpu", cpu)
    assert lines == [*(f"{isa} {RIGHT}" for isa in isas), f"best {isas[-1]}"]


@pytest.mark.parametrize("compiler", ["g++", "aarch64-linux-gnu-g++"])
def test_each_header_compiles_alone(need_programs, compiler, tmp_path):
    need_programs(compiler)
    for header in HEADERS:
        (tmp_path / f"{header}.cpp").write_text(f'#include "{header}"\n#include "{header}"\n')
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{KERNELS}",
                    *(tmp_path / f"{header}.cpp" for header in HEADERS)], check=True, timeout=120)
