"""Start-up and call cost of the native side: what a user waits for once, and what every later call adds.

The budget per call is about a microsecond over the kernel. The assertion allows three, since a shared machine's clock
and caches are not ours; on an idle one about 0.3 are measured (`pytest -s` shows the value).
"""
from __future__ import annotations

import subprocess
import sys
import time

import cppyy
import numpy as np

from nexus.native import ROOT

START_UP_S = 5.0
OVERHEAD_US = 3.0
FIRST_CALL = """
import time
start = time.perf_counter()
import nexus
from nexus.native import kernels
k = kernels()
import numpy as np
keys, cosine, sine = np.ones(2, np.float16), np.zeros(1, np.float32), np.ones(1, np.float32)
address = keys.ctypes.data
k.rope_shift(k.best_isa(), address, address, 1, 4, 4, 1, 2, 2, 0, cosine.ctypes.data, sine.ctypes.data)
assert keys.tolist() == [-1.0, 1.0]
print(time.perf_counter() - start)
"""


def test_from_import_to_the_first_kernel_call_takes_less_than_five_seconds():
    seconds = []
    while len(seconds) < 3 and (not seconds or min(seconds) >= START_UP_S):
        run = subprocess.run([sys.executable, "-c", FIRST_CALL], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        seconds.append(float(run.stdout))
    assert min(seconds) < START_UP_S, seconds


def median_us(call, repetitions: int = 300, inner: int = 20) -> float:
    """Median microseconds of one call, timed `inner` at a time so that the clock's own cost does not count."""
    samples = []
    for _ in range(repetitions):
        start = time.perf_counter_ns()
        for _ in range(inner):
            call()
        samples.append((time.perf_counter_ns() - start) / inner)
    return float(np.median(samples)) / 1000


def test_a_call_costs_about_a_microsecond_more_than_its_kernel(k):
    cppyy.cppdef("""
    #include <chrono>
    #include <algorithm>
    #include <vector>
    namespace nexus_test {
    double kernel_us(int isa, size_t keys, size_t cosine, size_t sine) {
        std::vector<double> samples(300);
        for (double & sample : samples) {
            const auto start = std::chrono::steady_clock::now();
            for (int i = 0; i < 20; ++i) nexus::rope_shift(isa, keys, keys, 1, 4, 4, 1, 2, 2, 0, cosine, sine);
            sample = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / 20;
        }
        std::nth_element(samples.begin(), samples.begin() + 150, samples.end());
        return samples[150];
    }
    }""")
    keys, cosine, sine = np.ones(2, np.float16), np.array([0.6], np.float32), np.array([0.8], np.float32)
    isa, addresses = k.best_isa(), (keys.ctypes.data, cosine.ctypes.data, sine.ctypes.data)
    key, c, s = addresses
    rope_shift = k.rope_shift

    def call() -> None:
        rope_shift(isa, key, key, 1, 4, 4, 1, 2, 2, 0, c, s)

    call()
    overhead = min(median_us(call) - cppyy.gbl.nexus_test.kernel_us(isa, *addresses) for _ in range(3))
    print(f"call overhead of rope_shift: {overhead:.2f} µs")
    assert overhead < OVERHEAD_US, f"{overhead:.2f} µs per call"
