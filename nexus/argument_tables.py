"""Tables of arguments and of what serves them, in Markdown: the rest of Table IV. No model is loaded."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nexus.tables import MISSING, Row, at, cell, counts, document, heading, markdown, number, value_of

# Bars of the sidecar, and of the constraint right after a decode.
VALID_BAR = 1.0
SPECIFIED_BAR = 0.9
SPEEDUP_BAR = 1.66
SAVING_BAR = 0.8
TOKEN_P50_BAR_US = 100.0
TOKEN_P99_BAR_US = 1000.0
CHEAPER_BAR = 50.0
OURS = "nexus"
DEFAULT_GRAMMAR = "llama-cpp-python"


def table4_rest(sidecar: dict[str, Any], radix: dict[str, Any], claims: dict[str, Any]) -> str:
    """The rows of Table IV about arguments and the prefix cache, published beside measured."""
    said, cache = claims["sidecar_accuracy"], claims["l0_radix"]
    of = {row["metric"]: row["value"] for row in sidecar["rows"]}
    copies = [row for row in at(radix["rows"], part="copy")]
    ours = next(iter(at(radix["rows"], part="trace", arm=OURS)), {})
    lines = [[f"L0 copy {_length(row, 'of {} tokens', 'as in the traces')}, p50, µs", number(cache["copy_us_p50"]), cell(row["copy_us"]),
              counts(row["copy_us"])] for row in copies]
    lines.append([f"L0 warm-hit rate, {cache['slots']} slots, %", number(100 * cache["hit_rate"]),
                  cell(ours.get("hit_rate"), 100), counts(ours.get("hit_rate"))])

    def line(what: str, published: str, metric: str, scale: float = 1) -> None:
        lines.append([what, published, cell(of.get(metric), scale), counts(of.get(metric))])

    line("the right tool is chosen for a call, %", number(100 * said["routing"]), "routing_accuracy", 100)
    line("specified arguments right, where it is, %", _share(said["specified_args_correct"]),
         "specified_argument_accuracy", 100)
    line("specified arguments right, end to end, %", _share(said["end_to_end_args_correct"]),
         "end_to_end_argument_accuracy", 100)
    line("calls that are valid, %", _share(said["json_valid"]), "json_valid_rate", 100)
    line("calls with a placeholder, %", "0", "placeholder_leak_rate", 100)
    line("signature, median, tokens", number(said["ir_tokens_median"]), "ir_tokens_median")
    line("signature, 99th percentile, tokens", number(said["ir_tokens_p99"]), "ir_tokens_p99")
    line("first token of the arguments, ms", number(said["first_arg_token_ms"]), "first_argument_signature_ms")
    line("the same over the full schema, ms", number(said["full_schema_first_arg_token_ms"]),
         "first_argument_full_schema_ms")
    line("so much sooner, times", number(said["speedup"]), "first_argument_speedup")
    line("tokens saved in the context, %", number(100 * said["main_context_token_saving"]),
         "main_context_token_saving", 100)
    return document(
        "## Arguments and the prefix cache",
        f"From `sidecar/accuracy.json` and `l0_radix.json`, intervals as above. Published: {said['n_cases']} cases that "
        "are not public, another model and machine. `arguments.md` and `serving.md` say what each number is.",
        markdown(["", "published", "measured", "n"], lines))


def arguments(sidecar: dict[str, Any], constraint: dict[str, Any]) -> str:
    """Everything measured about arguments: the sidecar's metrics, the bars, and what the constraint costs per token."""
    lines = [[row["metric"].replace("_", " "), *_measured(row["metric"], row["value"]),
              MISSING if row.get("mcnemar_p") is None else number(row["mcnemar_p"]), counts(row["value"])]
             for row in sidecar["rows"]]
    return document(
        heading("Arguments from a compressed signature", sidecar),
        "The tool comes from routing over the whole registry, or is given (oracle routing, full schema). A specified "
        "argument is one that the query states; it is right where it equals an accepted value. Differences are on the "
        "same arguments, with McNemar's exact p. Coreference: the argument stands only in the conversation, which the "
        "sidecar reads through its pruned window, not at all, or whole. Signature tokens are over the whole registry.",
        markdown(["metric", "value", "unit", "p", "n"], lines),
        "## Against the bars", _bars(sidecar["rows"]),
        "## What the constraint costs",
        "Per token, right after a decode, without the search for the likeliest token (row `argmax`); everyone follows "
        "the same tokens under the same schemas. Compilation is over the whole registry where an engine is quick.",
        _constraint(constraint["rows"]), _constraint_bars(constraint["rows"]))


def serving(radix: dict[str, Any], allocator: dict[str, Any]) -> str:
    """The prefix cache on traces and on the model, and the allocator under contention, padded and not."""
    rows = radix["rows"]
    traces = [[f"`{row['arm']}`", cell(row["hit_rate"], 100), cell(row.get("token_reuse"), 100),
               cell(row.get("evictions")), cell(row.get("peak_cells")), counts(row["hit_rate"])]
              for row in at(rows, part="trace")]
    copies = [[_length(row, "{}", "as in the traces"), *(cell(row.get(name)) for name in ("copy_us", "copy_p99_us", "lookup_us",
                                                                  "lookup_p99_us")), counts(row["copy_us"])]
              for row in at(rows, part="copy")]
    answers = [[f"`{row['arm']}`", cell(row.get("ttft_ms")), cell(row.get("saved_ms")), cell(row.get("speedup_vs_none")),
                cell(row.get("speedup_vs_llama_cpp")), cell(row.get("token_reuse"), 100), cell(row.get("dkl_nats")),
                cell(row.get("top1"), 100), counts(row.get("ttft_ms"))] for row in at(rows, part="ttft")]
    controls = [[row["arm"], cell(row.get("bit_identical"), 100), cell(row.get("dkl_nats")), cell(row.get("floor_nats")),
                 counts(row.get("dkl_nats"))] for row in at(rows, part="identity")]
    sizes = radix["config"]["l0_radix"]
    return document(
        heading("The prefix cache", radix),
        f"Traces of simulated agents, {sizes['n_slots']} slots and {sizes['max_tokens']} cells; n counts traces. A "
        "request is a hit where more than the prefix that all agents of its kind share is resident.",
        markdown(["cache", "hits, %", "tokens reused, %", "evictions", "peak, cells", "n"], traces),
        "## One copy", "Cells are shared and nothing is copied, but llama.cpp marks each one.",
        markdown(["tokens", "copy p50, µs", "p99", "lookup p50, µs", "p99", "n"], copies),
        "## To the first token", "A short trace that the model really answers, every cache every request.",
        markdown(["cache", "ms, median", "saved, ms, mean", "times as fast as none", "as llama.cpp", "tokens reused, %",
                  "KL to none, nats", "top-1, %", "n"], answers),
        "## Controls", "Logits beside a prefill from an empty cache with the same batch split; the floor is the "
        "divergence between splits.",
        markdown(["case", "bit-identical, %", "KL, nats", "floor, nats", "n"], controls),
        "## The allocator of resident blocks",
        f"From `block_allocator.json` (configuration {allocator['config_sha256'][:12]}). `own`: each thread has its own "
        "allocator, so that only cache lines are shared; `one`: all contend for one. Above 1, padding pays.",
        _contention(allocator["rows"]),
        "## Blocks of random sizes in one arena",
        markdown(["blocks are", "lost inside blocks, %", "filled until the first refusal, %", "filled later, %", "n"],
                 [[row["layout"], *(cell(row.get(name)) for name in ("internal_pct", "first_filled_pct", "filled_pct")),
                   counts(row.get("filled_pct"))] for row in at(allocator["rows"], kind="fragmentation")]))


def _contention(rows: Sequence[Row]) -> str:
    lines = [[row["sharing"], row["n_threads"], row["layout"],
              "yes" if row.get("oversubscribed") else "no", cell(row.get("operations_per_s"), 1e-6),
              cell(row.get("p50_ns")), cell(row.get("p99_ns")), cell(row.get("rate_vs_unpadded")),
              cell(row.get("rate_vs_malloc")), counts(row.get("operations_per_s"))]
             for row in at(rows, kind="contention") if row["layout"] != "clock"]
    return markdown(["allocators", "threads", "layout", "more threads than CPUs", "million operations/s", "p50, ns",
                     "p99, ns", "rate over unpadded", "over malloc", "n"], lines)


def _length(row: Row, some: str, many: str) -> str:
    """`some` with the row's number of tokens, or `many` for the row of all lengths."""
    return many if row["n_tokens"] is None else some.format(row["n_tokens"])


def _share(of: Sequence[int]) -> str:
    right, n = of
    return f"{number(100 * right / n)} ({right}/{n})"


def _measured(metric: str, value: dict[str, Any] | None) -> tuple[str, str]:
    """The value with its interval, and its unit, which the metric's name tells."""
    if metric.endswith("_ms"):
        return cell(value), "ms"
    if "speedup" in metric:
        return cell(value), "times"
    if "prompt_tokens" in metric or "_tokens_" in metric:
        return cell(value), "tokens"
    return cell(value, 100), "points" if "_minus_" in metric else "%"


def _bars(rows: Sequence[Row]) -> str:
    of = {row["metric"]: row["value"] for row in rows}
    bars = (("json_valid_rate", "calls are valid", VALID_BAR, 100, "%"),
            ("specified_argument_accuracy", "specified arguments are right on routed cases", SPECIFIED_BAR, 100, "%"),
            ("first_argument_speedup", "the first argument comes sooner", SPEEDUP_BAR, 1, "times"),
            ("main_context_token_saving", "tokens are saved", SAVING_BAR, 100, "%"))
    lines = [f"- {what}: {cell(of[name], scale)} {unit}, at least {number(scale * bar)} wanted: "
             f"{'met' if of[name]['value'] >= bar else 'missed'}."
             for name, what, bar, scale, unit in bars if value_of(of.get(name)) is not None]
    if value_of(leaks := of.get("placeholder_leak_rate")) is not None:
        lines.append(f"- calls with a placeholder: {cell(leaks, 100)} %, none wanted: "
                     f"{'met' if leaks['value'] == 0 else 'missed'}.")
    return "\n".join([*lines, "- Met and missed go by the estimates."])


def _constraint(rows: Sequence[Row]) -> str:
    return markdown(
        ["engine", "p50, µs", "p99, µs", "times nexus", "rejected first, %", "same choice, %", "compiles a schema in, ms",
         "at most", "schemas", "refused", "n"],
        [[f"`{row['impl']}`" + ("" if row["status"] == "ok" else f" ({row['status']})"), cell(row["p50_us"]),
          cell(row["p99_us"]), cell(row.get("per_nexus")), cell(row.get("rejection_rate"), 100),
          cell(row.get("agrees"), 100), cell(row.get("compile_ms")), number(row.get("compile_ms_max")),
          *(MISSING if row.get(name) is None else row[name] for name in ("n_compiled", "n_failed")),
          counts(row["p50_us"])] for row in rows])


def _constraint_bars(rows: Sequence[Row]) -> str:
    of = {row["impl"]: row for row in rows}
    if value_of(of.get(OURS, {}).get("p50_us")) is None:
        return "Ours was not measured."
    ours, peer = of[OURS], of.get(DEFAULT_GRAMMAR, {}).get("per_nexus")
    lines = [f"- p50 {cell(ours['p50_us'])} µs, under {TOKEN_P50_BAR_US:g} wanted: "
             f"{'met' if ours['p50_us']['value'] < TOKEN_P50_BAR_US else 'missed'}.",
             f"- p99 {cell(ours['p99_us'])} µs, under {TOKEN_P99_BAR_US:g} wanted: "
             f"{'met' if ours['p99_us']['value'] < TOKEN_P99_BAR_US else 'missed'}."]
    if value_of(peer) is not None:
        lines.append(f"- {DEFAULT_GRAMMAR}'s grammar costs {cell(peer)} times as much, at least {CHEAPER_BAR:g} wanted: "
                     f"{'met' if peer['value'] >= CHEAPER_BAR else 'missed'}.")
    return "\n".join(lines)
