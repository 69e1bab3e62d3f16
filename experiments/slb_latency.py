"""How long the lookaside scan takes, beside other exact INT8 searches, the machine's reading speed and an empty call.

Every contestant has the same codes and one thread, and answers with ids and scores of the k best within its time; its
query comes in the form that it likes best, made outside. Rounds call all of them in shuffled order, each once untimed
(so that each finds its own table as warm as its size allows) and once timed. Ratios pair the times of one round.

Exactness is checked on all queries: the scores must be the k largest integer products, and each id must have its score;
of our own we also ask for the lowest ids among equals. recall_at_1 compares with a float32 search over the vectors
before they were quantised.

Vectors are synthetic unit vectors in clusters, and a query is a row with noise: latency does not depend on them, and
recall is that of the rounding alone. Rows named `ceiling` read the same table and do nothing with it, `overhead` is an
empty call.
"""
from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from nexus import native, provenance, stats
from nexus.cells import Cell
from nexus.config import Config
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.slb import Lookaside, available_isas, quantise
from nexus.stats import Estimate
from nexus.weights import ensure

NAME = "slb_latency"
KEYS = ("n_vectors", "dim", "impl", "isa")
QUERIES = 100
CLUSTER_SIZE, SPREAD, NOISE = 20, 0.7, 0.5
# The reference, and some peers in large tables, are an order slower: enough for a median, not for a tail.
SCALAR_ROUNDS, SLOW_ROUNDS, LARGE_TABLE = 20, 100, 5_000_000
# A peer chooses its instruction set itself.
AUTO = "auto"
MOST_PASSES = 16
# Below every product of codes, in int32 and in float.
LOWEST = -2**31
OURS, IN_SITU, QUANTISE, CEILING, OVERHEAD = "nexus", "nexus in situ", "nexus quantise", "ceiling", "overhead"

Answer = tuple[np.ndarray, np.ndarray]


def best_of(products: np.ndarray, k: int) -> Answer:
    """Ids and products of the k largest, largest first: what a peer without a top-k of its own needs behind its scan.

    The quickest way that numpy has: a pass per hit, which beats a sort from 300 rows and a partition at any size, or a
    partition for many hits. Overwrites `products`.
    """
    k = min(k, len(products))
    if k > MOST_PASSES:
        ids = np.argpartition(products, len(products) - k)[len(products) - k:]
        ids = ids[np.argsort(products[ids])[::-1]]
        return ids, products[ids]
    ids, scores = np.empty(k, np.int64), np.empty(k, products.dtype)
    for i in range(k):
        ids[i] = best = products.argmax()
        scores[i] = products[best]
        products[best] = LOWEST
    return ids, scores


class NumKong:
    """`dots_packed`, or `cdist` where a trial is faster, into an array that is kept; then numpy's top-k."""

    package, slow = "numkong", False

    def __init__(self, codes: np.ndarray):
        import numkong

        packed, n = numkong.dots_pack(codes, "int8"), len(codes)
        tensor, floats = numkong.zeros((1, n), dtype="int32"), np.empty((1, n), np.float64)
        integers = np.asarray(tensor)  # shares its memory

        def dots_packed(query: np.ndarray) -> np.ndarray:
            numkong.dots_packed(query, packed, out=tensor)
            return integers[0]

        def cdist(query: np.ndarray) -> np.ndarray:
            numkong.cdist(query, codes, "dot", out=floats)
            return floats[0]

        self._products = min((dots_packed, cdist), key=lambda way: median_us(lambda: way(self.query(codes[0]))))
        self.nbytes = codes.nbytes

    def query(self, codes: np.ndarray) -> np.ndarray:
        return codes[None]

    def search(self, query: np.ndarray, k: int) -> Answer:
        return best_of(self._products(query), k)


class Faiss:
    """`IndexScalarQuantizer` with codes taken as they are, and its own top-k."""

    package, slow = "faiss-cpu", False

    def __init__(self, codes: np.ndarray):
        # It reports at INFO which of its libraries it loads.
        logging.getLogger("faiss").setLevel(logging.WARNING)
        import faiss

        faiss.omp_set_num_threads(1)
        self._index = faiss.IndexScalarQuantizer(codes.shape[1], faiss.ScalarQuantizer.QT_8bit_direct_signed,
                                                 faiss.METRIC_INNER_PRODUCT)
        self._index.add(codes.astype(np.float32))
        self.nbytes = codes.nbytes

    def query(self, codes: np.ndarray) -> np.ndarray:
        return codes[None].astype(np.float32)

    def search(self, query: np.ndarray, k: int) -> Answer:
        scores, ids = self._index.search(query, k)
        return ids[0], scores[0]


class Usearch:
    """`search(exact=True, threads=1)`; its distance is 1 - product."""

    package, slow = "usearch", True

    def __init__(self, codes: np.ndarray):
        from usearch.index import MetricKind, search

        self._search, self._metric, self._codes = search, MetricKind.IP, codes
        self.nbytes = codes.nbytes

    def query(self, codes: np.ndarray) -> np.ndarray:
        return codes

    def search(self, query: np.ndarray, k: int) -> Answer:
        found = self._search(self._codes, query, k, self._metric, exact=True, threads=1)
        return found.keys, 1 - found.distances


class Numpy:
    """A float32 product of the codes, which BLAS computes exactly while sums stay below 2^24; then a top-k."""

    package, slow = "numpy", True

    def __init__(self, codes: np.ndarray):
        one_blas_thread()
        self._table, self._products = codes.astype(np.float32), np.empty(len(codes), np.float32)
        self.nbytes = self._table.nbytes

    def query(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32)

    def search(self, query: np.ndarray, k: int) -> Answer:
        return best_of(np.dot(self._table, query, out=self._products), k)


PEERS = {"numkong": NumKong, "faiss": Faiss, "usearch": Usearch, "numpy": Numpy}


def one_blas_thread() -> bool:
    """Whether numpy's own OpenBLAS was found and told to use one thread, which holds for the rest of the process.

    It reads its environment only when it is loaded, long before this.
    """
    kernels = native.kernels()
    import cppyy

    cppyy.include("library_call.hpp")
    libraries = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*.so")
    return any([kernels.call_with_int(str(path), "scipy_openblas_set_num_threads64_", 1) for path in libraries])


@functools.cache
def reading_kernels():
    """The C++ namespace `nexus` with the readers that the scan is held against."""
    kernels = native.kernels()
    import cppyy

    cppyy.include("slb_ceiling.hpp")
    return kernels


def missing(peers: list[str]) -> list[str]:
    """Those of the named peers that are not installed."""
    found = []
    for peer in peers:
        try:
            importlib.import_module(peer)
        except ImportError:
            found.append(peer)
    return found


@dataclass(frozen=True)
class Contestant:
    """One column of the timings: call(i) is what is timed for query i."""

    impl: str
    isa: str
    call: Callable[[int], Any]
    answer: Callable[[int], Answer] | None = None
    """Ids and integer scores for query i; None for what does not search."""
    nbytes: int | None = None
    """What a search reads, in bytes."""
    most_rounds: int | None = None

    @property
    def column(self) -> str:
        return f"{self.impl}|{self.isa}"


def embeddings(n: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors in clusters, float32[n, dim], and queries near some of them, float32[QUERIES, dim]."""
    rng = np.random.default_rng([seed, n, dim])

    def unit(rows: np.ndarray) -> np.ndarray:
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def noise(rows: int) -> np.ndarray:
        return unit(rng.standard_normal((rows, dim), dtype=np.float32))

    centres = noise(max(1, n // CLUSTER_SIZE))
    vectors = unit(centres[rng.integers(len(centres), size=n)] + SPREAD * noise(n))
    return vectors, unit(vectors[rng.integers(n, size=QUERIES)] + NOISE * noise(QUERIES))


class Table:
    """One size: the codes, the queries, what is right, and everybody who competes."""

    def __init__(self, n: int, dim: int, k: int, peers: list[str], seed: int):
        vectors, self.queries = embeddings(n, dim, seed)
        self.k = min(k, n)
        self.nearest = np.argmax(vectors @ self.queries.T, axis=0)
        codes, scale = quantise(vectors)
        del vectors
        self.own = {isa: Lookaside.from_codes(codes, scale, isa) for isa in available_isas()}
        self.best_isa = available_isas()[-1]
        self.codes = np.stack([self.own[self.best_isa].quantise_query(query)[0] for query in self.queries])
        # Sums of integer products are exact in float64 whatever the order.
        self.products = (codes.astype(np.float64) @ self.codes.T.astype(np.float64)).T.astype(np.int64)
        self.expected = [np.argsort(-row, kind="stable")[:self.k] for row in self.products]
        self.peers = {name: PEERS[name](codes) for name in peers}

    def contestants(self) -> Iterator[Contestant]:
        """Everybody, in the order of the rows."""
        k = self.k
        for isa, table in self.own.items():
            def scan(i: int, table=table, prepared=list(self.codes)) -> Answer:
                return table.scan(prepared[i], k)

            yield Contestant(OURS, isa, scan, scan, table.nbytes, SCALAR_ROUNDS if isa == "scalar" else None)
        best = self.own[self.best_isa]
        scales = [best.quantise_query(query)[1] * best.scale for query in self.queries]

        queries = list(self.queries)

        def search(i: int) -> list[tuple[int, float]]:
            return best.search(queries[i], k)

        def dequantised(i: int) -> Answer:
            ids, scores = zip(*search(i))
            return np.array(ids), np.array(scores) / scales[i]

        yield Contestant(IN_SITU, self.best_isa, search, dequantised, best.nbytes)
        yield Contestant(QUANTISE, self.best_isa, lambda i: best.quantise_query(queries[i]))
        for name, peer in self.peers.items():
            prepared = [peer.query(codes) for codes in self.codes]

            def ask(i: int, peer=peer, prepared=prepared) -> Answer:
                return peer.search(prepared[i], k)

            large = best.n * best.dim > LARGE_TABLE
            yield Contestant(name, AUTO, ask, ask, peer.nbytes, SLOW_ROUNDS if peer.slow and large else None)
        kernels = reading_kernels()
        for reader in range(kernels.kSlbReaders):
            yield Contestant(CEILING, str(kernels.slb_reader_name(reader)),
                             lambda i, reader=reader: kernels.slb_read(reader, best.address, best.nbytes),
                             nbytes=best.nbytes)
        yield Contestant(OVERHEAD, "none", lambda i: kernels.slb_nothing(best.address, k, best.address))

    def check(self, contestant: Contestant) -> dict[str, Any]:
        """Whether its answers are exact, and how often its first is the nearest of the unquantised vectors."""
        exact, nearest = True, 0
        for i, products in enumerate(self.products):
            ids, scores = contestant.answer(i)
            ids = np.asarray(ids, np.int64)
            exact &= bool(len(set(ids.tolist())) == self.k and np.array_equal(np.rint(scores), products[ids])
                          and np.allclose(scores, np.rint(scores), rtol=1e-9, atol=1e-6)
                          and np.array_equal(products[ids], products[self.expected[i]]))
            if contestant.impl.startswith(OURS):
                exact &= np.array_equal(ids, self.expected[i])
            nearest += int(ids[0] == self.nearest[i])
        return {"exact": bool(exact), "nearest": nearest, "queries": len(self.products)}


def median_us(call: Callable[[], object], repetitions: int = 9) -> float:
    """Median wall time of a call, µs."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times)) / 1e3


def timed_rounds(contestants: list[Contestant], repetitions: int, seed: int) -> list[dict[str, float]]:
    """Per round, the wall time of one call of each contestant by column, µs; all shuffled anew in every round."""
    rng, clock, rounds = np.random.default_rng(seed), time.perf_counter_ns, []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for repetition in range(repetitions):
            times = {}
            query = repetition % QUERIES
            for i in rng.permutation(len(contestants)):
                contestant = contestants[i]
                if contestant.most_rounds is not None and repetition >= contestant.most_rounds:
                    continue
                call = contestant.call
                call(query)
                start = clock()
                call(query)
                times[contestant.column] = (clock() - start) / 1e3
            rounds.append({contestant.column: times[contestant.column] for contestant in contestants
                           if contestant.column in times})
    finally:
        if collecting:
            gc.enable()
    return rounds


class Bench:
    """Measures one size at a time."""

    def __init__(self, cfg: Config):
        self.cfg, self.sizes = cfg, cfg.slb_latency
        self.absent = missing(self.sizes.peers)

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one size: a check and facts per contestant, then the times of each round."""
        keys = {name: cell.inputs[name] for name in ("n_vectors", "dim")}
        sizes = self.sizes
        table = Table(keys["n_vectors"], keys["dim"], sizes.k,
                      [peer for peer in sizes.peers if peer not in self.absent], self.cfg.seed)
        contestants = list(table.contestants())
        samples = [{**keys, "impl": contestant.impl, "isa": contestant.isa, "kind": "check",
                    "nbytes": contestant.nbytes, **(table.check(contestant) if contestant.answer else {})}
                   for contestant in contestants]
        samples += [{**keys, "impl": peer, "isa": AUTO, "kind": "missing"} for peer in self.absent]
        return samples + [{**keys, "kind": "round", **times}
                          for times in timed_rounds(contestants, sizes.repetitions, self.cfg.seed)]


def p99(samples: list[float], level: float) -> Estimate:
    """The 99th percentile, with the exact interval of order statistics: it holds for every distribution.

    No interval where there are too few samples for its upper end (367 for a level of 0.95).
    """
    values, n, tail = np.sort(samples), len(samples), (1 - level) / 2
    value = float(values[int(np.ceil(0.99 * n)) - 1])
    low, high = int(binom.ppf(tail, n, 0.99)), int(binom.ppf(1 - tail, n, 0.99)) + 1
    if low < 1 or high > n:
        return Estimate(value, None, None, n, "too-few-samples", level)
    return Estimate(value, float(values[low - 1]), float(values[high - 1]), n, "order-statistics", level)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """The estimate in another unit."""
    ends = {name: None if (end := getattr(estimate, name)) is None else end * factor
            for name in ("value", "ci_low", "ci_high")}
    return replace(estimate, **ends)


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """One row per size and contestant; of the readers, the fastest. `speedup_vs_<peer>` above 1: we are faster."""
    table = []
    for n in cfg.slb_latency.n_vectors:
        for dim in cfg.slb_latency.dims:
            of_size = [s for s in samples if (s["n_vectors"], s["dim"]) == (n, dim)]
            table += rows_of_size(of_size, cfg.slb_latency.peers, cfg.seed, cfg.statistics.level)
    return table


def rows_of_size(samples: list[dict], peers: list[str], seed: int, level: float) -> list[dict]:
    """The rows of one size."""
    rounds = [s for s in samples if s["kind"] == "round"]
    checks = [s for s in samples if s["kind"] == "check"]

    def column(check: dict) -> str:
        return f"{check['impl']}|{check['isa']}"

    def times(name: str) -> list[float]:
        return [r[name] for r in rounds if name in r]

    def per(over: str, under: str) -> Estimate:
        """Ratio of the medians of two columns over the rounds that have both."""
        pairs = [(r[over], r[under]) for r in rounds if over in r and under in r]
        return stats.ratio_of_medians(*zip(*pairs), seed, level, paired=True)

    reader = min((column(c) for c in checks if c["impl"] == CEILING), key=lambda name: np.median(times(name)))
    present = {c["impl"]: column(c) for c in checks}
    table = []
    for check in checks:
        name = column(check)
        if check["impl"] == CEILING and name != reader:
            continue
        row = {key: check[key] for key in KEYS} | {
            "p50_us": stats.median(times(name), seed, level), "p99_us": p99(times(name), level),
            "exact": check.get("exact"), "recall_at_1": None, "gb_per_s": None, "ceiling_share_pct": None}
        if "exact" in check:
            row["recall_at_1"] = stats.wilson(check["nearest"], check["queries"], level)
        if check["nbytes"] is not None:
            row["gb_per_s"] = rate(check["nbytes"], row["p50_us"])
        if check["impl"] in (OURS, IN_SITU):
            row["ceiling_share_pct"] = scaled(per(reader, name), 100)
        row |= {f"speedup_vs_{peer}": per(present[peer], name)
                if peer in present and check["impl"] in (OURS, IN_SITU) else None for peer in peers}
        table.append(row)
    absent = [s for s in samples if s["kind"] == "missing"]
    return table + [{key: s[key] for key in KEYS} | {
        "status": "not installed", "p50_us": None, "p99_us": None, "exact": None, "recall_at_1": None} for s in absent]


def rate(n_bytes: int, us: Estimate) -> Estimate:
    """10⁹ bytes per second from the time that they took; the interval's ends change places."""
    value, low, high = (None if time_us is None else n_bytes / 1e3 / time_us
                        for time_us in (us.value, us.ci_high, us.ci_low))
    return replace(us, value=value, ci_low=low, ci_high=high)


def tuple_of(cfg: Config) -> dict[str, str | None]:
    """The artifact's `tuple`: the configured model by name and hash. It takes no part and is not loaded."""
    sha256 = cfg.model.sha256 or ensure(cfg.model).sha256
    return {"model": cfg.model.name, "model_sha256": sha256, "embedder": None,
            "llama_cpp": f"llama-cpp-python {provenance.version('llama-cpp-python')}"}


def headline(table: list[dict]) -> dict[str, dict[str, float | None]]:
    """Median times of every contestant by size, and our speed-ups."""
    def value(row: dict, name: str) -> float | None:
        return row[name].value if row.get(name) is not None else None

    return {f"{row['n_vectors']}.{row['dim']}.{row['impl']}.{row['isa']}".replace(" ", "-"): {
        name: value(row, name) for name in row if name in ("p50_us", "ceiling_share_pct") or name.startswith("speedup")
    } for row in table}


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/slb_latency.json`; sizes measured earlier are not measured again."""
    bench, sizes, tuple_ = Bench(cfg), cfg.slb_latency, tuple_of(cfg)
    for peer in bench.absent:
        print(f"{NAME}: {peer} is not installed and is left out; install the extra `peers`", file=sys.stderr)
    inputs = timed_cell_inputs(NAME, cfg, tuple_["model_sha256"]) | {
        "isas": available_isas(),
        "peers": {peer: provenance.version(PEERS[peer].package) for peer in sizes.peers if peer not in bench.absent}}
    cells = [Cell({**inputs, "n_vectors": n, "dim": dim}, weight=n * dim + 1e6, label=f"{n} x {dim}")
             for n in sizes.n_vectors for dim in sizes.dims]
    samples = measure_cells(cfg, cells, bench.measure, "lookaside scan")
    table = summarise(cfg, samples)
    return write_results(NAME, cfg, out, tuple_=tuple_, rows=table, samples=samples, isa=available_isas()[-1],
                         threads=1, metrics=headline(table))


if __name__ == "__main__":
    experiment_main(NAME, run)
