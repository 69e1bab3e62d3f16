"""Synthetic artifacts of arguments, constraints, prefix cache and allocator, for the tests of tables."""
from __future__ import annotations

from nexus import artifact as stored_form
from repair_artifacts import artifact as envelope
from repair_artifacts import metric, top1

# Values of the sidecar's metrics, in their own unit.
SIDECAR = {
    "routing_accuracy": 0.8, "specified_argument_accuracy": 0.925, "end_to_end_argument_accuracy": 0.74,
    "json_valid_rate": 1.0, "placeholder_leak_rate": 0.0, "ir_tokens_median": 30.0, "ir_tokens_p99": 60.0,
    "first_argument_speedup": 2.5, "first_argument_speedup_tool_given_cold": 1.5, "first_argument_signature_ms": 700.0,
    "first_argument_full_schema_ms": 1750.0, "main_context_token_saving": 0.7,
    "specified_argument_signature_minus_full_schema": -0.04, "prompt_tokens_full": 420.0}


def sidecar(**values):
    rows = [{"metric": name, "value": metric(value, 0.1, 30)} for name, value in (SIDECAR | values).items()]
    for row in rows:
        if "_minus_" in row["metric"]:
            # A negative value times the spread would turn the bounds around.
            row["value"] |= {"ci_low": -0.1, "ci_high": 0.02}
            row["mcnemar_p"] = 0.25
    return envelope("sidecar_accuracy", rows)


def constraint(ours_us=40.0, peer_ratio=300.0):
    def row(impl, us, **more):
        return {"impl": impl, "status": "ok", "p50_us": metric(us, 0.05, 200), "p99_us": metric(6 * us, 0.1, 200),
                "per_nexus": metric(us / ours_us, 0.05, 200), "n_steps": 200, "rejection_rate": None, "agrees": None,
                "compile_ms": metric(0.5, 0.1, 313), "compile_ms_max": 4.0, "compile_grown_kib_max": 800.0,
                "n_compiled": 313, "n_failed": 0} | more

    return envelope("constrain_cost", [
        row("nexus", ours_us, rejection_rate=top1(0.1, 200)),
        row("llama-cpp-python", peer_ratio * ours_us, agrees=top1(1.0, 200), n_compiled=292, n_failed=21),
        {"impl": "xgrammar", "status": "not installed", **dict.fromkeys(
            ("p50_us", "p99_us", "per_nexus", "rejection_rate", "agrees", "compile_ms", "compile_ms_max",
             "compile_grown_kib_max", "n_compiled", "n_failed")), "n_steps": 0}])


def radix():
    rows = [{"part": "trace", "arm": arm, "n_tokens": None, "copy_us": None, "hit_rate": metric(hits, 0.02, 10),
             "token_reuse": metric(0.9 * hits, 0.02, 10), "n_requests": metric(300.0, 0.05, 10),
             "evictions": metric(50.0, 0.1, 10), "peak_cells": metric(9000.0, 0.1, 10)}
            for arm, hits in (("nexus", 0.8), ("llama.cpp", 0.3))]
    rows += [{"part": "copy", "arm": "nexus", "n_tokens": n, "copy_us": metric(1.5 + (n or 500) / 1000, 0.1, 500),
              "copy_p99_us": metric(4.0, 0.1, 500), "lookup_us": metric(0.6, 0.1, 500),
              "lookup_p99_us": metric(1.1, 0.1, 500), "hit_rate": None}
             # One row is of all copies that the traces need.
             for n in (None, 64, 1024)]
    rows += [{"part": "ttft", "arm": arm, "n_tokens": None, "copy_us": metric(2.0, 0.1, 24) if arm == "nexus" else None,
              "hit_rate": metric(0.8, 0, 1), "token_reuse": metric(0.85, 0, 1), "ttft_ms": metric(ms, 0.1, 24),
              "saved_ms": None if arm == "none" else metric(3000 - ms, 0.1, 24), "speedup_vs_none": None,
              "speedup_vs_llama_cpp": None, "saved_vs_llama_cpp_ms": None, "dkl_nats": None, "top1": None}
             for arm, ms in (("nexus", 300.0), ("llama.cpp", 1500.0), ("none", 3000.0))]
    rows.append({"part": "identity", "arm": "extended", "n_tokens": None, "copy_us": None, "hit_rate": None,
                 "bit_identical": top1(1.0, 3), "dkl_nats": metric(0.0, 0, 3), "top1": top1(1.0, 3),
                 "floor_nats": metric(0.001, 0.5, 3)})
    return envelope("l0_radix", rows) | {"config": {"l0_radix": {"n_slots": 32, "max_tokens": 16384}}}


def allocator():
    rows = [{"kind": "contention", "n_threads": n, "sharing": "own", "layout": layout, "order": None,
             "oversubscribed": n > 2, "operations_per_s": metric(rate * 1e6, 0.05, 15), "p50_ns": metric(40.0, 0.1, 15),
             "p99_ns": metric(90.0, 0.1, 15)}
            | ({"rate_vs_unpadded": metric(rate / 10, 0.05, 15)} if layout == "padded" else {})
            for n in (1, 4) for layout, rate in (("padded", 20.0), ("unpadded", 10.0), ("clock", 50.0))]
    rows.append({"kind": "fragmentation", "n_threads": 0, "sharing": "none", "layout": "trimmed", "order": None,
                 "internal_pct": metric(1.0, 0.1, 15), "first_filled_pct": metric(90.0, 0.05, 15),
                 "filled_pct": metric(85.0, 0.05, 15)})
    return envelope("block_allocator", rows)


MAKERS = {"sidecar_accuracy": sidecar, "constrain_cost": constraint, "l0_radix": radix, "block_allocator": allocator}


def write(out, cfg):
    """The four artifacts in `out`, in the form and place that experiments write."""
    for name, make in MAKERS.items():
        path = stored_form.path_of(name, out)
        path.parent.mkdir(parents=True, exist_ok=True)
        stored_form.write(path, experiment=name,
                          tuple_={"model": "synthetic", "model_sha256": "0" * 64, "embedder": "minilm",
                                  "llama_cpp": "b1"},
                          config=cfg.resolved(name), rows=make()["rows"], samples=[{"n": 1}],
                          provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                                      "versions": {}})
