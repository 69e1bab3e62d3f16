"""What the prefix cache saves: on traces of agents, per copy, and to the first token of a real model.

trace      requests of simulated agents (nexus/agent_trace.py), without a model; a row per cache, estimates over seeds
copy       the cache's own sequence copy and lookup, by length of the prefix and as the traces need them, between
           sequences of the real model
ttft       a short trace that the model really answers; every cache gets every request, in shuffled order, in a context
           of its own of equal size and options
identity   logits of cached prefills beside prefills from an empty cache with the same batch splits

Caches: `nexus`; `llama.cpp`, plain reuse in one sequence: what the previous prompt has in common stays, the rest is
decoded (as its server does in one slot); `none`, every prompt decoded from its start; and on traces `unlimited`, which
keeps every prompt: nothing can reuse more. Rates on traces are the same on every run; what is timed has its own cells.

A request is warm (`hit_rate`) where more is reused than what begins every prompt of its kind of agent, that is, some of
its own conversation. `token_reuse` is the share of all prompt tokens that were not decoded. The ttft rows' divergence
is read against `none`, whose split differs: the floor of batch splits is in it. `floor_nats` is that floor.
"""
from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nexus import stats
from nexus.agent_trace import Request, Traffic, agent_trace
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.fidelity import divergence
from nexus.model_tuple import context_options, open_model, tuple_of
from nexus.pipeline import cell_inputs, experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.prefix_cache import PrefixCache, arena_kernel
from nexus.runtime import Model, Runtime
from nexus.workload import load_conversation

NAME = "l0_radix"
OURS, PEER, NONE, CEILING = "nexus", "llama.cpp", "none", "unlimited"
ARMS = (OURS, PEER, NONE)
CONTEXT_TOKENS = 4096
COPY_TOKENS = (64, 256, 1024, 2048)
# The same agents with shorter texts, so that a request without a cache takes seconds and not minutes.
SHORT = {"n_sessions": 3, "system_tokens": 250, "subagent_tokens": 120, "user_tokens": 20, "call_tokens": 20,
         "result_tokens": 60, "answer_tokens": 40, "summary_tokens": 80, "context_tokens": 900}
# Length of the prompts, that of the part that is resident, and how many prompts there are.
IDENTITY_TOKENS, IDENTITY_SPLIT, IDENTITY_TEXTS = 240, 151, 3


class Plain:
    """One sequence in which the common part of the previous prompt stays; `reuse` off decodes every prompt anew."""

    def __init__(self, runtime: Runtime, reuse: bool):
        self.runtime, self.reuse, self.previous = runtime, reuse, np.empty(0, np.int32)

    def prefill(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        """Logits behind the prompt, and how many of its tokens were reused."""
        n = min(len(tokens) - 1, len(self.previous)) if self.reuse else 0
        differ = np.flatnonzero(tokens[:n] != self.previous[:n])
        n = int(differ[0]) if len(differ) else n
        self.runtime.seq_rm(0, n, -1)
        self.previous = tokens
        return self.runtime.decode(tokens[n:], n, 0, logits=True), n


class Bench:
    """Measures one cell at a time."""

    def __init__(self, cfg: Config):
        self.cfg, self.sizes = cfg, cfg.l0_radix
        self.model: Model = open_model(cfg.model)
        turns = [turn for path in (cfg.workload.conversation, cfg.workload.off_topic)
                 for turn in load_conversation(ROOT / path)]
        self.text = self.model.tokenize("\n".join(turn["content"] for turn in turns))

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one part; of one seed, where it is a trace."""
        part = cell.inputs["part"]
        samples = self.trace(cell.inputs["trace"]) if part == "trace" else getattr(self, part)()
        return [{"part": part, **sample} for sample in samples]

    def requests(self, seed: int, **short: int) -> list[Request]:
        sizes = self.sizes
        traffic = {"n_sessions": sizes.n_sessions, "context_tokens": CONTEXT_TOKENS} | short
        traffic["context_tokens"] = min(traffic["context_tokens"], sizes.max_tokens)
        return agent_trace(Traffic(n_turns=sizes.n_turns, **traffic), self.text, self.cfg.seed + seed)

    def options(self, **more):
        return context_options(self.cfg.runtime, **more)

    def trace(self, seed: int) -> list[dict]:
        """A sample per cache and request of one trace."""
        requests, sizes = self.requests(seed), self.sizes
        limits = {OURS: (sizes.n_slots, sizes.max_tokens), PEER: (1, sizes.max_tokens),
                  CEILING: (len(requests), sum(len(request.tokens) for request in requests))}
        return [{"arm": arm, "trace": seed, "request": index, "session": request.session, "kind": request.kind,
                 **reused} for arm, (n_slots, max_tokens) in limits.items()
                for index, (request, reused) in enumerate(zip(requests, simulate(requests, n_slots, max_tokens)))]

    def copy(self) -> list[dict]:
        """A sample per repetition and length of a copy and a lookup, and per request of all traces, as they need them.

        The copies are of cells of the real model. A lookup by length is of a prompt that is wholly resident among full
        slots, since that takes longest; one of a trace includes the choice of slots and evictions.
        """
        sizes, rng, samples = self.sizes, np.random.default_rng(self.cfg.seed), []
        traces = [self.requests(trace) for trace in range(sizes.n_seeds)]
        prompt = self.text[:min(CONTEXT_TOKENS, sizes.max_tokens)].copy()
        lengths = [n for n in COPY_TOKENS if n <= len(prompt)]
        full = arena_of(traces[0], sizes.n_slots, sizes.max_tokens)
        for tokens in (*(request.tokens for request in traces[0]), prompt):
            full.place(tokens.ctypes.data, len(tokens))
        with Runtime(self.model, self.options(n_ctx=sizes.max_tokens + 1, n_seq_max=sizes.n_slots + 1)) as runtime:
            # A copy cares for cells and not for what is in them: the first layer's attention is enough.
            runtime.context.stop_after("kqv_out-0")
            runtime.decode(prompt, 0, 0)

            def copied(n_tokens: int) -> float:
                us = microseconds(lambda: runtime.seq_cp(0, 1, 0, n_tokens))
                if runtime.pos_max(1) != n_tokens - 1:
                    raise RuntimeError(f"a copy of {n_tokens} tokens ends at position {runtime.pos_max(1)}")
                runtime.seq_rm(1)
                return us

            collecting = gc.isenabled()
            gc.disable()
            try:
                # The first two are warm-up.
                for repetition in range(-2, sizes.copy_repetitions):
                    for n_tokens in rng.permutation(lengths).tolist():
                        times = {"copy_us": copied(n_tokens), "lookup_us": microseconds(
                            lambda n_tokens=n_tokens: full.match(prompt.ctypes.data, n_tokens))}
                        if repetition >= 0:
                            samples.append({"arm": OURS, "n_tokens": n_tokens, **times})
                for trace, requests in enumerate(traces):
                    arena = arena_of(requests, sizes.n_slots, sizes.max_tokens)
                    for request in requests:
                        address, n_prompt = request.tokens.ctypes.data, len(request.tokens)
                        placed = microseconds(lambda: arena.place(address, n_prompt))
                        n_copied = 0 if arena.plan().in_place else int(arena.plan().n_reused)
                        # The text may be shorter than the longest prompt.
                        n_copied = min(n_copied, len(prompt))
                        samples.append({"arm": OURS, "n_tokens": None, "trace": trace, "n_copied": n_copied,
                                        "copy_us": copied(n_copied) if n_copied else None, "lookup_us": placed})
            finally:
                if collecting:
                    gc.enable()
        return samples

    def ttft(self) -> list[dict]:
        """A sample per cache and request of a short trace, answered by the model."""
        cfg, sizes = self.cfg, self.sizes
        requests = self.requests(0, **SHORT)[:sizes.n_requests]
        arena = arena_of(requests, sizes.n_slots, sizes.max_tokens)
        n_cells = 0
        for request in requests:
            arena.place(request.tokens.ctypes.data, len(request.tokens))
            n_cells = max(n_cells, arena.n_cells())
        runtimes = [Runtime(self.model, self.options(n_ctx=n_cells + 1, n_seq_max=n_seq_max))
                    for n_seq_max in (sizes.n_slots + 1, 2, 2)]
        try:
            cache = PrefixCache(runtimes[0], max_tokens=n_cells, n_slots=sizes.n_slots)
            plain = {PEER: Plain(runtimes[1], True), NONE: Plain(runtimes[2], False)}
            for runtime in runtimes:
                # Touches pages and caches.
                runtime.decode(requests[0].tokens[:64], 0, 0)
                runtime.clear()
            rng, samples = np.random.default_rng(cfg.seed), []
            for index, request in enumerate(requests):
                logits, answers = {}, {}
                for arm in rng.permutation(ARMS).tolist():
                    start = time.perf_counter_ns()
                    if arm == OURS:
                        filled = cache.prefill(request.tokens)
                        logits[arm], n_reused = filled.logits, filled.n_reused
                    else:
                        logits[arm], n_reused = plain[arm].prefill(request.tokens)
                    answers[arm] = {"ttft_ms": (time.perf_counter_ns() - start) / 1e6, "n_reused": n_reused}
                answers[OURS] |= {"copy_us": filled.copy_us, "lookup_us": filled.lookup_us,
                                  "n_evicted": filled.n_evicted}
                for arm in ARMS:
                    distance = divergence(logits[NONE], logits[arm])
                    samples.append({"arm": arm, "request": index, "session": request.session, "kind": request.kind,
                                    "n_prompt": len(request.tokens), "n_common": request.n_common, **answers[arm],
                                    "dkl_nats": distance.kl_nats, "top1": distance.top1})
        finally:
            for runtime in runtimes:
                runtime.close()
        return samples

    def identity(self) -> list[dict]:
        """A sample per case and text: a cached prefill beside one with the same splits, and that beside another split.

        extended   the prompt goes on where a resident one ends, so that its cells lie as those of the control
        resident   the whole prompt is resident
        branched   it shares its first part with a longer prompt, whose other cells lie between
        """
        n, split, samples = IDENTITY_TOKENS, IDENTITY_SPLIT, []
        with Runtime(self.model, self.options(n_ctx=1024, n_seq_max=5)) as runtime:
            cache = PrefixCache(runtime, max_tokens=1023, n_slots=4)

            def control(prompt: np.ndarray, *sizes: int) -> np.ndarray:
                cache.clear()
                runtime.clear()
                return runtime.decode(prompt, 0, 0, logits=True, split=sizes)

            for index in range(IDENTITY_TEXTS):
                begin = index * (len(self.text) - 2 * n) // IDENTITY_TEXTS
                prompt = self.text[begin:begin + n]
                behind = self.text[begin + n:begin + n + 80]
                # The branch leaves the prompt with its first token.
                begins = int(np.argmax(behind != prompt[split]))
                other = np.concatenate([prompt[:split], behind[begins:begins + 64]])
                cache.clear()
                runtime.clear()
                cache.prefill(prompt[:split])
                cached = {"extended": (cache.prefill(prompt), split), "resident": (cache.prefill(prompt), n - 1)}
                cache.clear()
                runtime.clear()
                cache.prefill(prompt[:split])
                cache.prefill(other)
                cached["branched"] = cache.prefill(prompt), split
                same = control(prompt, split)
                controls = {"extended": same, "resident": control(prompt, split, n - 1 - split), "branched": same}
                whole = control(prompt)
                for case, (filled, n_reused) in cached.items():
                    if filled.n_reused != n_reused:
                        raise RuntimeError(f"{case}: {filled.n_reused} tokens were reused; {n_reused} were meant to be")
                    distance = divergence(controls[case], filled.logits)
                    samples.append({"arm": case, "text": index, "n_prompt": n, "n_reused": n_reused,
                                    "bit_identical": distance.bit_identical, "dkl_nats": distance.kl_nats,
                                    "top1": distance.top1,
                                    "floor_nats": divergence(controls[case], whole).kl_nats})
        return samples


def microseconds(call: Callable[[], object]) -> float:
    """Wall time of one call, µs."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def arena_of(requests: list[Request], n_slots: int, max_tokens: int):
    """An empty arena for these requests."""
    longest = max(CONTEXT_TOKENS, *(len(request.tokens) for request in requests))
    return arena_kernel().RadixArena(n_slots, max_tokens, longest)


def simulate(requests: list[Request], n_slots: int, max_tokens: int) -> list[dict]:
    """Per request, what a cache of this size reuses and evicts, and the cells that are in use behind it."""
    arena, answers = arena_of(requests, n_slots, max_tokens), []
    for request in requests:
        plan = arena.place(request.tokens.ctypes.data, len(request.tokens))
        answers.append({"n_prompt": len(request.tokens), "n_common": request.n_common, "n_reused": int(plan.n_reused),
                        "n_evicted": int(plan.n_evicted) + bool(plan.evicts_rest), "n_cells": int(arena.n_cells()),
                        "copied": not plan.in_place and plan.n_reused > 0})
    return answers


def hit_rate(samples: list[dict]) -> float:
    """Share of requests of which more is reused than begins every prompt of their kind, 0 to 1."""
    return float(np.mean([sample["n_reused"] > sample["n_common"] for sample in samples]))


def token_reuse(samples: list[dict]) -> float:
    """Share of prompt tokens that were not decoded, 0 to 1."""
    return sum(sample["n_reused"] for sample in samples) / sum(sample["n_prompt"] for sample in samples)


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """One row per part and cache, or prefix length, or case."""
    seed, level = cfg.seed, cfg.statistics.level
    blank = {"n_tokens": None, "copy_us": None, "hit_rate": None}

    def of(part: str, arm: str) -> list[dict]:
        return [sample for sample in samples if (sample["part"], sample["arm"]) == (part, arm)]

    def of_one_trace(share: float) -> stats.Estimate:
        """Its requests depend on each other: no interval."""
        return stats.Estimate(share, None, None, 1, "single-sample", level)

    table = []
    for arm in (OURS, PEER, CEILING):
        by_seed = [[s for s in of("trace", arm) if s["trace"] == trace] for trace in range(cfg.l0_radix.n_seeds)]

        def over_seeds(statistic: Callable[[list[dict]], float], by_seed=by_seed) -> stats.Estimate:
            return stats.mean([statistic(of_seed) for of_seed in by_seed], seed, level)

        table.append(blank | {"part": "trace", "arm": arm, "hit_rate": over_seeds(hit_rate),
                              "token_reuse": over_seeds(token_reuse), "n_requests": over_seeds(len),
                              "evictions": over_seeds(lambda of_seed: sum(s["n_evicted"] for s in of_seed)),
                              "peak_cells": over_seeds(lambda of_seed: max(s["n_cells"] for s in of_seed))})
    copies = of("copy", OURS)
    # None, as the traces need them, comes first: its n is how many copies they need, all other prefixes go on in place.
    for n_tokens in sorted({sample["n_tokens"] for sample in copies}, key=lambda n: n or 0):
        columns = {name: [s[name] for s in copies if s["n_tokens"] == n_tokens and s[name] is not None]
                   for name in ("copy_us", "lookup_us")}
        table.append(blank | {"part": "copy", "arm": OURS, "n_tokens": n_tokens}
                     | {name: stats.median(times, seed, level) for name, times in columns.items()}
                     | {name.replace("_us", "_p99_us"): stats.quantile(times, 0.99, seed, level)
                        for name, times in columns.items()})
    times = {arm: [sample["ttft_ms"] for sample in of("ttft", arm)] for arm in ARMS}
    for arm in ARMS:
        answered = of("ttft", arm)
        copied = [sample["copy_us"] for sample in answered if sample.get("copy_us") is not None]
        table.append(blank | {
            "part": "ttft", "arm": arm, "copy_us": stats.median(copied, seed, level) if arm == OURS else None,
            "lookup_us": stats.median([s["lookup_us"] for s in answered], seed, level) if arm == OURS else None,
            "hit_rate": of_one_trace(hit_rate(answered)), "token_reuse": of_one_trace(token_reuse(answered)),
            "ttft_ms": stats.median(times[arm], seed, level),
            "saved_ms": None if arm == NONE else stats.mean_difference_paired(times[NONE], times[arm], seed, level),
            "speedup_vs_none": None if arm == NONE else
            stats.ratio_of_medians(times[NONE], times[arm], seed, level, paired=True),
            "speedup_vs_llama_cpp": None if arm != OURS else
            stats.ratio_of_medians(times[PEER], times[arm], seed, level, paired=True),
            "saved_vs_llama_cpp_ms": None if arm != OURS else
            stats.mean_difference_paired(times[PEER], times[arm], seed, level),
            "dkl_nats": None if arm == NONE else stats.mean([s["dkl_nats"] for s in answered], seed, level),
            "top1": None if arm == NONE else stats.wilson(sum(s["top1"] for s in answered), len(answered), level)})
    for case in ("extended", "resident", "branched"):
        read = of("identity", case)
        table.append(blank | {
            "part": "identity", "arm": case,
            "bit_identical": stats.wilson(sum(s["bit_identical"] for s in read), len(read), level),
            "dkl_nats": stats.mean([s["dkl_nats"] for s in read], seed, level),
            "top1": stats.wilson(sum(s["top1"] for s in read), len(read), level),
            "floor_nats": stats.mean([s["floor_nats"] for s in read], seed, level)})
    return table


def headline(table: list[dict]) -> dict[str, dict[str, float | None]]:
    """The numbers of Table IV, and what is saved to the first token."""
    names = ("copy_us", "copy_p99_us", "hit_rate", "token_reuse", "ttft_ms", "speedup_vs_none", "speedup_vs_llama_cpp")
    return {".".join(str(row[key]) for key in ("part", "arm", "n_tokens") if row[key] is not None): {
        name: row[name].value for name in names if row.get(name) is not None} for row in table
        if row["part"] != "identity"}


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/l0_radix.json`; cells measured earlier are not measured again."""
    bench, sizes = Bench(cfg), cfg.l0_radix
    inputs = cell_inputs(NAME, cfg, bench.model.sha256)
    timed = timed_cell_inputs(NAME, cfg, bench.model.sha256)
    cells = [Cell({**inputs, "part": "trace", "trace": trace}, weight=1, label=f"trace {trace}")
             for trace in range(sizes.n_seeds)]
    # Bits of logits belong to the machine as times do.
    cells += [Cell({**timed, "part": part}, weight=weight, label=part)
              for part, weight in (("copy", 15), ("ttft", 5 * sizes.n_requests), ("identity", 20))]
    samples = measure_cells(cfg, cells, bench.measure, "prefix cache")
    table = summarise(cfg, samples)
    return write_results(NAME, cfg, out, tuple_=tuple_of(bench.model, cfg.model), rows=table, samples=samples,
                         metrics=headline(table), isa="scalar")


if __name__ == "__main__":
    experiment_main(NAME, run)
