"""Synthetic routing artifacts with plausible numbers, for the tests of tables and figures."""
from __future__ import annotations

from nexus import artifact as stored_form
from nexus import stats
from repair_artifacts import artifact as envelope
from repair_artifacts import metric

SIZES = (10, 50, 100, 250)
DEFAULT = "hybrid+gate"
# Accuracy at the fewest tools and at the most.
ROUTED = {"slb": (0.9, 0.74), "slb-no-name": (0.85, 0.61), "bm25": (0.8, 0.58), "hybrid": (0.94, 0.83),
          "slb+gate": (0.93, 0.87), DEFAULT: (0.96, 0.94)}
BASELINES = {"concat_all": (0.97, None), "rag_mcp": (0.92, 0.79)}
# What the largest context of the baselines holds.
WINDOW = 16384
TOKENS_PER_TOOL = 180


def share(value, n=100, level=0.95):
    """The Wilson metric of the nearest count."""
    return stats.wilson(round(value * n), n, level).row()


def paired(value, n=100, level=0.95):
    """A difference of shares on the same queries."""
    return metric(value, 0, n, level) | {
        "ci_low": value - 0.05, "ci_high": value + 0.05, "method": "paired-bca-bootstrap"}


def accuracy_row(system, n_tools, accuracy, level=0.95, prompt_tokens=0):
    """A row of one system; an accuracy of None is an overflow."""
    row = {"n_tools": n_tools, "system": system, "status": "ok" if accuracy is not None else "overflow",
           "prompt_tokens": metric(float(prompt_tokens), 0, 100, level)}
    row |= dict.fromkeys(("accuracy", "accuracy_own", "accuracy_paraphrase", "top1_recall", "top3_recall", "fire_rate",
                          "scan_us", "choice_ms"))
    if accuracy is None:
        return row
    routed = system in ROUTED
    row |= {"accuracy": share(accuracy, level=level), "accuracy_own": share(accuracy, 50, level),
            "accuracy_paraphrase": share(max(0.0, accuracy - 0.04), 50, level),
            "choice_ms": metric(6.0 if routed else 2500.0, 0.1, 100, level)}
    if system != "concat_all":
        row |= {"top1_recall": share(0.8 * accuracy, level=level), "top3_recall": share(accuracy, level=level)}
    if routed and system != "bm25":
        row["scan_us"] = metric(9.0, 0.05, 100, level)
    if system.endswith("+gate"):
        row["fire_rate"] = share(0.23, level=level)
    return row


def accuracy(sizes=SIZES, default=DEFAULT, level=0.95, systems=ROUTED | BASELINES):
    """Accuracy falls evenly with every size; schemas overflow where they do not fit the window."""
    rows = []
    for i, n_tools in enumerate(sizes):
        for system, (first, last) in systems.items():
            tokens = {"concat_all": n_tools, "rag_mcp": 3}.get(system, 0) * TOKENS_PER_TOOL
            value = None
            if tokens <= WINDOW:
                value = first if last is None else first + (last - first) * i / max(1, len(sizes) - 1)
            rows.append(accuracy_row(system, n_tools, value, level, tokens))
            if system == default:
                rows[-1] |= {"accuracy_minus_slb": paired(0.2, level=level), "mcnemar_p_slb": 0.0001,
                             "accuracy_minus_rag_mcp": paired(0.15, level=level), "mcnemar_p_rag_mcp": 0.002,
                             "accuracy_minus_fewest": paired(-0.02 * i / max(1, len(sizes) - 1), level=level),
                             "mcnemar_p_fewest": 0.5}
    return envelope("routing_accuracy_n250", rows) | {"config": {
        "routing": {"system": default, "n_threads": 1}, "runtime": {"n_threads": 2},
        "routing_accuracy_n250": {"n_ctx": 16384}}}


def calibration(level=0.95, systems=("slb+gate", DEFAULT)):
    """A gate, a curve and abstention per system; the thresholds differ, so that they can be told apart."""
    rows = []
    for i, system in enumerate(systems):
        tau = 0.0136 / (1 + 9 * i)
        for which, n, fires in (("adversarial", 60, 0.2), ("development", 90, 0.1 + 0.1 * i)):
            rows.append({"system": system, "set": which, "kind": "gate", "threshold": tau,
                         "tau": metric(tau, 0.4, 60, level), "fire_rate": share(fires, n, level),
                         "risk_accepted": share(0.1, n - round(fires * n), level),
                         "risk_fired": share(0.5, round(fires * n), level)})
        for covered in (30, 60, 90):
            rows.append({"system": system, "set": "development", "kind": "risk_coverage",
                         "threshold": 0.3 - covered / 400, "coverage": share(covered / 90, 90, level),
                         "risk": share(covered / 450, covered, level)})
        for threshold in (0.3, 0.36, 0.4):
            rows.append({"system": system, "set": "development", "kind": "abstention", "threshold": threshold,
                         "chosen": threshold == 0.36, "refused_unanswerable": share(2 * threshold, 10, level),
                         "refused_answerable": share(threshold / 6, 90, level)})
    for i, system in enumerate(("slb", DEFAULT)):
        rows.append({"system": system, "set": "adversarial+development", "kind": "selection", "threshold": 0.0,
                     "accuracy": share(0.5 + 0.2 * i, 150, level)})
    return envelope("calibration", rows)


def latency_row(n_vectors, dim, impl, isa, us, exact=True, level=0.95, **others):
    searches = exact is not None
    return {"n_vectors": n_vectors, "dim": dim, "impl": impl, "isa": isa, "p50_us": metric(us, 0.05, 400, level),
            "p99_us": metric(1.3 * us, 0.05, 400, level), "exact": exact,
            "recall_at_1": share(0.99, level=level) if searches else None, "gb_per_s": metric(20.0, 0.05, 400, level),
            "ceiling_share_pct": None} | others


def latency(level=0.95):
    """The best of our kernels is twice as fast as NumKong; FAISS is not installed."""
    def ours(share_pct, times):
        return {"ceiling_share_pct": metric(share_pct, 0.1, 400, level),
                "speedup_vs_numkong": metric(times, 0.05, 400, level),
                "speedup_vs_usearch": metric(1.5 * times, 0.05, 400, level), "speedup_vs_faiss": None}

    rows = []
    for n_vectors, dim in ((250, 384), (250, 768), (100_000, 384)):
        us = n_vectors * dim / 20e3
        rows += [latency_row(n_vectors, dim, "nexus", "scalar", 30 * us, level=level, **ours(2.5, 1 / 15)),
                 latency_row(n_vectors, dim, "nexus", "avx512vnni", us, level=level, **ours(75.0, 2.0)),
                 latency_row(n_vectors, dim, "nexus in situ", "avx512vnni", us + 4, level=level),
                 latency_row(n_vectors, dim, "numkong", "auto", 2 * us, level=level),
                 latency_row(n_vectors, dim, "usearch", "auto", 3 * us, exact=False, level=level),
                 {"n_vectors": n_vectors, "dim": dim, "impl": "faiss", "isa": "auto", "status": "not installed",
                  "p50_us": None, "p99_us": None, "exact": None, "recall_at_1": None},
                 latency_row(n_vectors, dim, "ceiling", "avx512vnni", 0.75 * us, exact=None, level=level)]
    return envelope("slb_latency", rows) | {"config": {"slb_latency": {"peers": ["numkong", "faiss", "usearch"]}}}


def generalisation(level=0.95):
    rows = []
    for i, name in enumerate(("bfcl", "bfcl-live")):
        for system, (_, base) in ROUTED.items():
            if system == "slb-no-name":
                continue
            others = {"top1_minus_hybrid": None, "mcnemar_p_hybrid": None}
            if system != "hybrid":
                others = {"top1_minus_hybrid": paired(base - 0.83, 400, level), "mcnemar_p_hybrid": 0.03}
            rows.append({"set": name, "system": system, "n_tools": 1400, "choice_ms": metric(7.0, 0.1, 400, level),
                         "fire_rate": share(0.3, 400, level) if system.endswith("+gate") else None}
                        | {f"top{k}_recall": share(min(1, base - 0.1 * i + 0.02 * k), 400, level) for k in (1, 3, 5)}
                        | others)
    return envelope("routing_generalisation", rows) | {"config": {"routing": {"system": DEFAULT}}}


MAKERS = {"routing_accuracy_n250": accuracy, "calibration": calibration, "slb_latency": latency,
          "routing_generalisation": generalisation}


def write(out, cfg):
    """The four artifacts in `out`, in the form that experiments write."""
    for name, make in MAKERS.items():
        stored_form.write(out / f"{name}.json", experiment=name,
                          tuple_={"model": "synthetic", "model_sha256": "0" * 64, "embedder": "minilm",
                                  "llama_cpp": "b1"},
                          config=cfg.resolved(name), rows=make()["rows"], samples=[{"n": 1}],
                          provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                                      "versions": {}})
