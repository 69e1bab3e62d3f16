"""The published claims in the order of the description, each with how it is tested (see nexus/verdicts.py)."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nexus import claim_cells as cells
from nexus.claim_cells import PROBES
from nexus.routing_tables import AT_SCALE, PAPER_SYSTEM
from nexus.verdicts import Claim

# What a time may grow by and still count as independent of the number of tools.
SAME_TIME = 0.1
SHARE = {"unit": "%", "scale": 100, "better": "higher"}


def claims() -> list[Claim]:
    """Every claim of the description that a number or a refusal can settle, and why others are not tested here."""
    return [*_splice(), *_gate(), *_repair(), *_routing(), *_arguments(), *_systems()]


def _splice() -> list[Claim]:
    sweep = {"experiment": "dkl_sweep"}
    scattered = {"experiment": "rope_boundary_gate", "also": ("repair_frontier",), "unit": "nats"}
    found = [Claim(f"anchor-divergence-{probe}", "§ IV-A",
                   f"At its compile position a spliced block is output-exact: KL ≈ 0, read {told}",
                   cells=cells.drift(probe, "dkl_nats", anchor=True), better="lower", unit="nats",
                   said="≈ 0", **sweep)
             for probe, told in PROBES.items()]
    found.append(Claim("anchor-top1", "§ IV-A", "At its compile position the most likely token is always the same",
                       cells=cells.drift("query", "top1", anchor=True), **SHARE, **sweep))
    for probe, told in PROBES.items():
        found += [
            Claim(f"drift-{probe}", "Fig. 1",
                  f"Moved by up to 2048 tokens, a bare splice drifts by 0.008 to 0.038 nats, read {told}",
                  cells=cells.drift(probe, "dkl_nats"), rule="range", better="lower", unit="nats", **sweep),
            Claim(f"drift-top1-{probe}", "Fig. 1",
                  f"Moved by up to 2048 tokens, a bare splice keeps the most likely token, read {told}",
                  cells=cells.drift(probe, "top1"), **SHARE, **sweep)]
    return [
        *found,
        Claim("reanchor", "§ III-B", "Re-anchoring recovers the relative rotation of keys and queries exactly",
              untested="no artifact holds single keys; tests/nexus/test_splice.py has them beside llama.cpp's shift"),
        Claim("scattered-value", "§ IV-A", "Scattered recompute at 1024 tokens is 5.7 nats from a full prefill",
              cells=cells.scattered, **scattered),
        Claim("scattered-corrupts", "§ IV-A",
              "Scattered recompute corrupts instead of repairing: it is worse than a bare splice",
              cells=cells.corrupts, rule="range", better="higher", **scattered)]


def _gate() -> list[Claim]:
    return [
        Claim("gate-fails", "Table II",
              "The variance of the context's keys predicts no drift: ρ stays below the target of 0.40",
              "gating_nogo", cells.below_target, rule="range", better="lower"),
        Claim("gate-rho", "Table II", "ρ per depth and context is as printed", "gating_nogo", cells.printed_rho),
        Claim("gate-drift", "Table II", "The largest drift of a head is 175 to 207, the mean 91 to 105",
              untested="its unit is the model's own, so that it does not compare between models; table2 has both")]


def _repair() -> list[Claim]:
    timed = {"experiment": "deep_splice_ttft"}
    found = [
        Claim("schedule", "Table III", "Equation 2 gives the printed shares R(n), to a tenth of a percent",
              cells=cells.schedule, rule="range", unit="%", **timed),
        Claim("speedup", "Table III", "Speed-up of the repaired splice over a prefill, cold, as printed",
              cells=cells.speedups, better="higher", unit="times", **timed),
        Claim("speedup-moderate", "Abstract", "1.1 to 1.7 times as fast at moderate depth (256 and 512 tokens), cold",
              cells=cells.moderate, rule="range", better="higher", unit="times", **timed)]
    for probe, told in PROBES.items():
        suffix = "" if probe == "query" else f"_{probe}"
        found += [
            Claim(f"never-regress-{probe}", "Table III",
                  f"Repaired by the schedule KL ≈ 0 in every cell, read {told}",
                  cells=cells.never_regress(probe, f"dkl{suffix}_nats"), also=("repair_frontier",), better="lower",
                  unit="nats", said="≈ 0", **timed),
            Claim(f"never-regress-top1-{probe}", "Table III",
                  f"Repaired by the schedule the most likely token is kept, read {told}",
                  cells=cells.scheduled_top1(f"top1{suffix}"), **SHARE, **timed)]
    return found


def _routing() -> list[Claim]:
    routing, calibrated = {"experiment": "routing_accuracy_n250"}, {"experiment": "calibration"}
    return [
        Claim("routing-described", "Fig. 5", f"Right tool chosen by the described system (`{PAPER_SYSTEM}`)",
              cells=cells.accuracies(lambda config: PAPER_SYSTEM), **routing, **SHARE),
        Claim("routing-default", "Fig. 5", "The same accuracy, reached by this project's default router",
              cells=cells.accuracies(lambda config: config["routing"]["system"]), **routing, **SHARE),
        Claim("routing-flat", "Fig. 5",
              f"Accuracy is nearly flat: at N = {AT_SCALE} its interval meets that of the fewest tools",
              cells=cells.flat, **routing, **SHARE),
        Claim("routing-time", "§ VII-B",
              "The number of tools does not inflate the time of a choice (tolerance: a tenth)",
              cells=cells.choice_time, better="lower", tolerance=SAME_TIME, unit="ms", **routing),
        Claim("concat-accuracy", "Fig. 5", "All schemas in the prompt: right tool chosen", cells=cells.concat,
              **routing, **SHARE),
        Claim("concat-overflow", "Fig. 5", "All schemas in the prompt overflow the window from N = 50 on",
              cells=cells.overflow, rule="word", **routing),
        *(Claim(f"recall-{k}", "Table IV", f"Recall@{k} of the retriever", cells=cells.recall(k), **routing, **SHARE)
          for k in (1, 3)),
        Claim("scan-in-situ", "Table IV", "INT8 scan inside a route (other machine)", cells=cells.scan_in_situ,
              better="lower", unit="µs", **routing),
        Claim("scan-alone", "Table IV", "INT8 scan alone (other machine; here with quantising the query)",
              "slb_latency", cells.scan_alone, better="lower", unit="µs"),
        Claim("tau", "Table IV", "Threshold τ of the gate: the 20th percentile of adversarial margins",
              cells=cells.gate_number("tau", "adversarial"), **calibrated),
        Claim("fire-rate", "Table IV", "Share of decisions at which the gate fires",
              cells=cells.gate_number("fire_rate", "development"), unit="%", scale=100, **calibrated)]


def _arguments() -> list[Claim]:
    def claim(key: str, text: str, published: Callable[[Mapping[str, Any]], float], metrics: Mapping[str, str],
              where: str = "Table IV", **options: Any) -> Claim:
        return Claim(key, where, text, "sidecar_accuracy", cells.sidecar(metrics, published), **options)

    def of(name: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda said: said[name][0] / said[name][1] if isinstance(said[name], list) else said[name]

    tokens = {"unit": "tokens", "better": "lower"}
    return [
        claim("call-routing", "The right tool is chosen for a call", of("routing"), {"routing_accuracy": "cases"},
              **SHARE),
        claim("specified-arguments", "Specified arguments are right where the tool is", of("specified_args_correct"),
              {"specified_argument_accuracy": "arguments"}, **SHARE),
        claim("end-to-end-arguments", "Specified arguments are right end to end", of("end_to_end_args_correct"),
              {"end_to_end_argument_accuracy": "arguments"}, **SHARE),
        claim("valid-calls", "Calls are valid", of("json_valid"), {"json_valid_rate": "calls"}, **SHARE),
        claim("placeholders", "No call holds a placeholder", lambda said: 0.0, {"placeholder_leak_rate": "calls"},
              **SHARE | {"better": "lower"}),
        claim("signature-median", "Length of a signature, median", of("ir_tokens_median"),
              {"ir_tokens_median": "tools"}, **tokens),
        claim("signature-p99", "Length of a signature, 99th percentile", of("ir_tokens_p99"),
              {"ir_tokens_p99": "tools"}, **tokens),
        claim("first-argument", "The first argument comes so much sooner than over the full schema", of("speedup"),
              {"first_argument_speedup": "what all calls begin with resident",
               "first_argument_speedup_cold": "nothing resident"}, better="higher", unit="times"),
        claim("first-argument-time", "First token of the arguments (other model and machine)", of("first_arg_token_ms"),
              {"first_argument_signature_ms": "cases"}, better="lower", unit="ms"),
        claim("context-saving", "Tokens saved in the main context", of("main_context_token_saving"),
              {"main_context_token_saving": "cases"}, **SHARE),
        claim("coreference",
              "The pruned window keeps what a conversation refers to: it loses nothing beside the whole of it",
              lambda said: 0.0, {"coreference_window_minus_full_history": "window minus whole"}, "§ VII-C",
              **SHARE | {"unit": "points"})]


def _systems() -> list[Claim]:
    cache = {"experiment": "l0_radix"}
    return [
        Claim("copy-time", "Table IV", "Copy of a cached prefix, p50 (other machine)", cells=cells.copies,
              better="lower", unit="µs", **cache),
        Claim("hit-rate", "Table IV", "Warm-hit rate of the prefix cache (traces of our own)", cells=cells.hit_rate,
              **SHARE, **cache),
        Claim("transposed-v", "§ VI-B", "A transposed V is spliced faithfully: KL ≈ 0 at the compile position",
              "layouts", cells.transposed, better="lower", unit="nats", said="≈ 0"),
        Claim("fail-closed", "§ VI-B",
              "What cannot be spliced is refused: remote models (here also recurrent memory, M-RoPE)",
              "layouts", cells.refused, rule="word"),
        Claim("other-scaling", "§ VI-A", "A block compiled for another RoPE scaling is rejected",
              untested="no artifact holds it; tests/nexus/test_splice.py does"),
        Claim("discrete-gpu", "§ VI-B", "Discrete GPUs decline a transposed V", untested="measured on CPUs only"),
        Claim("allocator", "§ VI-C", "Padding the block allocator to cache lines",
              untested="no effect was published; block_allocator.json measures it (table serving)"),
        Claim("concurrency", "§ VI-C", "Turns under one lock are bit-stable under concurrency",
              untested="no artifact holds it; tests/nexus/test_agent.py does"),
        Claim("peers", "Table I", "Numbers of other systems",
              untested="contextual: other hardware and workloads, and the description claims no advantage")]
