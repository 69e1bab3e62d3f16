"""What padding to 128 bytes does to the block allocator under contention; latency by order; what rounding loses.

The paper pads allocator and mutex to lines of their own and gives no measurement of it; this does. Both layouts are
one C++ template, with and without its alignas, and serve the same private requests of each thread (64 KiB to 4 MiB, up
to 32 blocks at a time); after each a thread bumps a counter. Unpadded, a counter, the mutex and the hot state of an
allocator are one line, and the counter belongs to another thread; padded, each has its own. The details are in
kernels/allocator_contention.hpp. `sharing` says whose the allocators are:

    own   one per thread: nothing is shared but lines, so any difference is false sharing
    one   all threads contend for one, which is slow however it is laid out
    none  for rows of a single thread, by order, and rows without threads

malloc is glibc's (or the system's) aligned_alloc of the same sizes; nobody touches the memory, so it pays for no page
faults, while ours is bookkeeping over memory that is there. Rates are taken over the whole run, and times of single
requests in runs of their own, a quarter as long, since reading the clock twice costs as much as a request: rows named
`clock` do nothing else. Contestants come in shuffled order in every repetition, and ratios pair those of one
repetition. Threads stay on one CPU each; with more threads than CPUs (`oversubscribed`) the scheduler is measured, too.

Rows of kind `fragmentation` send blocks of random sizes through an arena, once as the allocator places them
("trimmed": what a block does not need of its power of two is free at once), once with every request rounded up, as
plain buddies do.
"""
from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from nexus import provenance, stats
from nexus.block_arena import allocator_kernels
from nexus.cells import Cell
from nexus.config import Config
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.weights import ensure

NAME = "block_allocator"
# Codes of kernels/allocator_contention.hpp.
LAYOUTS = {"padded": 0, "unpadded": 1, "malloc": 2, "clock": 3}
KEYS = ("kind", "n_threads", "sharing", "layout", "order")
# 64 KiB, 512 KiB, 4 MiB, 32 MiB and the whole of 1 GiB.
ORDERS = (0, 3, 6, 9, 14)
# A run that is timed request by request is this much shorter.
TIMED_SHARE = 4
POLICIES = ("trimmed", "power-of-two")
# 256 MiB and what goes through it, several times its size.
ARENA_UNITS, UNIT_BYTES, N_BLOCKS = 4096, 64 << 10, 1500
SMALLEST_BLOCK, LARGEST_BLOCK = 64 << 10, 4 << 20


class AllocatorFailure(RuntimeError):
    """An allocator refused a request that it has room for, or is not empty at the end; its times are worth nothing."""


@functools.cache
def contention_kernels():
    """The C++ namespace `nexus` with the contending threads."""
    kernels = allocator_kernels()
    import cppyy

    cppyy.include("allocator_contention.hpp")
    return kernels


def contend(layout: str, sharing: str, n_threads: int, n_operations: int, seed: int) -> dict[str, float]:
    """Requests per second, and median and 99th percentile of one, ns, of one run."""
    kernels, arguments = contention_kernels(), (LAYOUTS[layout], sharing == "one", n_threads)
    whole = kernels.contend(*arguments, n_operations, seed, False)
    single = kernels.contend(*arguments, max(1, n_operations // TIMED_SHARE), seed, True)
    for run in (whole, single):
        if run.n_failed or not run.whole:
            raise AllocatorFailure(f"layout {layout}, {n_threads} threads, sharing {sharing}: {run.n_failed} requests "
                                   f"failed, whole at the end: {bool(run.whole)}; the allocator is wrong")
    return {"operations_per_s": float(whole.operations_per_s), "p50_ns": float(single.p50_ns),
            "p99_ns": float(single.p99_ns)}


def contenders(n_threads: int) -> list[tuple[str, str]]:
    """(layout, sharing) of every contestant; with one thread, and for malloc, there is only one way to share."""
    ours = [(layout, sharing) for sharing in (("own", "one") if n_threads > 1 else ("own",))
            for layout in ("padded", "unpadded")]
    return [*ours, ("malloc", "own")]


def contention_samples(n_threads: int, n_operations: int, repetitions: int, seed: int) -> list[dict]:
    """A row per contestant and repetition; the first repetition, which compiles and warms up, is not among them."""
    rng, samples = np.random.default_rng([seed, n_threads]), []
    everybody = contenders(n_threads)
    for layout, sharing in everybody:
        contend(layout, sharing, n_threads, min(n_operations, 1000), seed)
    for repetition in range(repetitions):
        for i in rng.permutation(len(everybody)):
            layout, sharing = everybody[i]
            samples.append({"kind": "contention", "n_threads": n_threads, "sharing": sharing, "layout": layout,
                            "order": None, "repetition": repetition,
                            **contend(layout, sharing, n_threads, n_operations, seed + repetition)})
    return samples


def order_samples(n_operations: int, repetitions: int, seed: int) -> list[dict]:
    """A row per layout, order and repetition: medians and 99th percentiles of a repetition's calls, ns."""
    kernels, rng, samples = contention_kernels(), np.random.default_rng([seed, 0]), []
    everybody = [(layout, order) for order in ORDERS for layout in LAYOUTS]
    for repetition in range(repetitions):
        for i in rng.permutation(len(everybody)):
            layout, order = everybody[i]
            times = kernels.order_times(LAYOUTS[layout], order, n_operations)
            if times.n_failed:
                raise AllocatorFailure(f"layout {layout}, order {order}: {times.n_failed} requests failed")
            samples.append({"kind": "order", "n_threads": 1, "sharing": "none", "layout": layout, "order": order,
                            "repetition": repetition,
                            **{f"{call}_{name}_ns": float(getattr(times, f"{call}_{name}_ns"))
                               for call in ("allocate", "free") for name in ("p50", "p99")}})
    return samples


def fragmentation_samples(repetitions: int, seed: int) -> list[dict]:
    """A row per policy and repetition: what blocks fill of an arena, in percent of its bytes, and what rounding loses.

    Blocks have 64 KiB to 4 MiB with a uniform logarithm. `first_filled_pct` is reached in an empty arena when one is
    refused; `filled_pct` is the mean afterwards, while the oldest blocks make room for new ones.
    """
    samples, capacity = [], ARENA_UNITS * UNIT_BYTES
    for repetition in range(repetitions):
        for policy in POLICIES:
            rng = np.random.default_rng([seed, repetition])
            sizes = np.exp(rng.uniform(np.log(SMALLEST_BLOCK), np.log(LARGEST_BLOCK), N_BLOCKS)).astype(int).tolist()
            allocator = allocator_kernels().BuddyAllocator(capacity, UNIT_BYTES)
            held: dict[int, int] = {}
            filled, first_filled, internal = [], None, []
            for n_bytes in sizes:
                asked = n_bytes if policy == "trimmed" else 1 << (n_bytes - 1).bit_length()
                while (offset := int(allocator.allocate(asked))) < 0:
                    if first_filled is None:
                        first_filled = 100 * sum(held.values()) / capacity
                    oldest = next(iter(held))
                    allocator.release(oldest)
                    del held[oldest]
                held[offset] = n_bytes
                if first_filled is not None:
                    needed, reserved = sum(held.values()), capacity - int(allocator.free_bytes())
                    filled.append(100 * needed / capacity)
                    internal.append(100 * (1 - needed / reserved))
            samples.append({"kind": "fragmentation", "n_threads": 0, "sharing": "none", "layout": policy, "order": None,
                            "repetition": repetition, "internal_pct": float(np.mean(internal)),
                            "first_filled_pct": first_filled, "filled_pct": float(np.mean(filled))})
    return samples


def measure(cfg: Config, cell: Cell) -> list[dict]:
    """Samples of one cell."""
    sizes = cfg.block_allocator
    match cell.inputs["kind"]:
        case "contention":
            return contention_samples(cell.inputs["n_threads"], sizes.n_operations, sizes.repetitions, cfg.seed)
        case "order":
            return order_samples(max(1, sizes.n_operations // 100), sizes.repetitions, cfg.seed)
        case "fragmentation":
            return fragmentation_samples(sizes.repetitions, cfg.seed)


def summarise(samples: list[dict], seed: int, level: float, n_cpus: int) -> list[dict]:
    """One row per kind, threads, sharing, layout and order.

    `rate_vs_unpadded`: operations per second over those of the unpadded layout; above 1, padding pays.
    `rate_vs_malloc`: the same over malloc's.
    """
    rows = []
    for key in dict.fromkeys(tuple(sample[name] for name in KEYS) for sample in sorted(samples, key=_place)):
        of_row = [sample for sample in samples if tuple(sample[name] for name in KEYS) == key]
        row: dict[str, Any] = dict(zip(KEYS, key))
        measured = [name for name in of_row[0] if name not in (*KEYS, "repetition")]
        row |= {name: stats.median([sample[name] for sample in of_row], seed, level) for name in measured}
        if row["kind"] == "contention":
            row["oversubscribed"] = row["n_threads"] > n_cpus
            for peer, against in (("unpadded", {"layout": "unpadded"}),
                                  ("malloc", {"layout": "malloc", "sharing": "own"})):
                if row["layout"] == "padded" or (row["layout"], peer) == ("unpadded", "malloc"):
                    other = {sample["repetition"]: sample["operations_per_s"] for sample in samples
                             if all(sample[name] == value for name, value in {
                                 **{name: row[name] for name in KEYS}, **against}.items())}
                    pairs = [(sample["operations_per_s"], other[sample["repetition"]]) for sample in of_row]
                    row[f"rate_vs_{peer}"] = stats.ratio_of_medians(*zip(*pairs), seed, level, paired=True)
        rows.append(row)
    return rows


def _place(sample: dict) -> tuple:
    """Where a sample's row stands in the table."""
    layouts = (*LAYOUTS, *POLICIES)
    return (("contention", "order", "fragmentation").index(sample["kind"]), sample["n_threads"],
            ("own", "one", "none").index(sample["sharing"]), sample["order"] or 0, layouts.index(sample["layout"]))


def headline(rows: list[dict]) -> dict[str, dict[str, float | None]]:
    """What padding does at each number of threads, and how much of an arena can be filled."""
    numbers = {f"{row['sharing']}.{row['n_threads']}": {
        "million_operations_per_s": row["operations_per_s"].value / 1e6,
        "rate_vs_unpadded": row["rate_vs_unpadded"].value} for row in rows if "rate_vs_unpadded" in row}
    return numbers | {f"filled.{row['layout']}": {name: row[name].value for name in ("first_filled_pct", "filled_pct")}
                      for row in rows if row["kind"] == "fragmentation"}


def tuple_of(cfg: Config) -> dict[str, str | None]:
    """The artifact's `tuple`: the configured model by name and hash. It takes no part and is not loaded."""
    sha256 = cfg.model.sha256 or ensure(cfg.model).sha256
    return {"model": cfg.model.name, "model_sha256": sha256, "embedder": None,
            "llama_cpp": f"llama-cpp-python {provenance.version('llama-cpp-python')}"}


def n_usable_cpus() -> int:
    """CPUs that this process may run on."""
    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count()


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/block_allocator.json`; cells measured earlier are not measured again."""
    sizes, tuple_, n_cpus = cfg.block_allocator, tuple_of(cfg), n_usable_cpus()
    inputs = timed_cell_inputs(NAME, cfg, tuple_["model_sha256"]) | {"n_cpus": n_cpus}
    cells = [Cell({**inputs, "kind": "contention", "n_threads": n_threads}, weight=n_threads,
                  label=f"{n_threads} threads") for n_threads in sizes.n_threads]
    cells += [Cell({**inputs, "kind": kind}, weight=1, label=kind) for kind in ("order", "fragmentation")]
    samples = measure_cells(cfg, cells, functools.partial(measure, cfg), "block allocator")
    table = summarise(samples, cfg.seed, cfg.statistics.level, n_cpus)
    return write_results(NAME, cfg, out, tuple_=tuple_, rows=table, samples=samples, isa="scalar",
                         threads=sizes.n_threads[-1], metrics=headline(table))


if __name__ == "__main__":
    experiment_main(NAME, run)
