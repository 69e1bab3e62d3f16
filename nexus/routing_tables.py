"""Tables of routing in Markdown (the routing half of Table IV), written from stored artifacts; no model is loaded."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nexus.tables import MISSING, Metric, Row, at, cell, counts, distinct, document, heading, markdown, number, value_of

# The system that the paper describes, whose numbers stand beside the published ones.
PAPER_SYSTEM = "slb+gate"
ACCURACY_BAR = 0.89
# How far accuracy may fall from the fewest tools to ACCURACY_BAR's number of tools.
MOST_FALL = 0.03
AT_SCALE = 250
# Bars of the scan: p50 inside a route; how much faster than any peer up to which size, behind which merely not slower.
IN_SITU_BAR_US = 5.0
SMALL_TABLE = 10_000
SMALL_TABLE_BAR = 1.5
SIGNIFICANT = 0.05


def table4(routing: dict[str, Any], calibration: dict[str, Any], latency: dict[str, Any],
           claims: dict[str, Any]) -> str:
    """The routing part of Table IV beside its measurement, every system at every N, and the bars."""
    rows, system = routing["rows"], routing["config"]["routing"]["system"]
    return document(
        heading("Table IV: is the right tool chosen, and are its arguments?", routing),
        "Accuracy and recall in %, on the same queries at every N; the other N − 1 tools are distractors, those of the "
        f"right tool's server first. Published: other model, queries, registry and machine. `{PAPER_SYSTEM}` is the "
        f"described system, `{system}` this project's default, chosen on other queries (below).",
        "A router's choice takes the time from the query's text to ranked tools, on "
        f"{routing['config']['routing']['n_threads']} thread. A baseline's is from tokens at hand to the first token "
        f"of the name, on {routing['config']['runtime']['n_threads']} threads, without `rag_mcp`'s retrieval "
        "and without what an earlier query left resident (`concat_all`: all schemas but for the first query). Where a larger "
        "registry offers the same schemas, the choice is not made again and its time is the first one's.",
        _beside(rows, system, calibration, latency, claims, routing["config"]["routing_accuracy_n250"]["n_ctx"]),
        "## Against the bars",
        *_verdicts(rows, system), _selection(calibration, system),
        "## Every system",
        markdown(["N", "system", "accuracy", "own words", "paraphrased", "recall@1", "recall@3", "gate fires",
                  "prompt, tokens", "scan, µs", "choice, ms", "n"], [_line(row) for row in rows]),
        "Recall is the retriever's, before the gate. `slb-no-name` embeds descriptions without names. The scan of a "
        "`hybrid` or `linear` returns the first 50 tools, that of the others the first 5.",
        *_gate(calibration))


def generalisation(artifact: dict[str, Any]) -> str:
    """Recall on public sets beside plain rank fusion, and whether the default is worse than that."""
    lines = [[row["set"], row["n_tools"], f"`{row['system']}`", *(cell(row[f"top{k}_recall"], 100) for k in (1, 3, 5)),
              cell(row.get("top1_minus_hybrid"), 100), number(row.get("mcnemar_p_hybrid")),
              cell(row.get("fire_rate"), 100), cell(row.get("choice_ms")), counts(row["top1_recall"])]
             for row in artifact["rows"]]
    return document(
        heading("Routing of tools and queries that it was not made for", artifact),
        "Public function-calling sets over one registry of all their functions; nothing was trained on them, but the "
        "strength of the embedder's tuning was chosen with a look at parts of them. The default system was chosen with "
        "a look at other queries of the same sources, the sets called selection. Recall in %, of the final order, "
        "behind the gate; the difference from plain rank fusion (`hybrid`) is in percentage points on the same "
        "queries, with McNemar's exact p.",
        _worse(artifact),
        markdown(["set", "N", "system", "recall@1", "recall@3", "recall@5", "recall@1 minus hybrid", "p", "gate fires",
                  "choice, ms", "n"], lines))


def _worse(artifact: dict[str, Any]) -> str:
    """Per set, whether the default is shown to be worse than plain rank fusion."""
    system = artifact["config"]["routing"]["system"]
    lines = []
    for row in artifact["rows"]:
        difference = row.get("top1_minus_hybrid")
        if row["system"] == system and value_of(difference) is not None:
            p = row["mcnemar_p_hybrid"]
            verdict = ("no different" if p >= SIGNIFICANT else "better" if difference["value"] > 0 else "worse")
            lines.append(f"- {row['set']}: the default, `{system}`, differs by {cell(difference, 100)} points, "
                         f"p = {number(p)}: {verdict}.")
    return "\n".join(lines) or f"The default, `{system}`, was not measured here."


def scan(artifact: dict[str, Any]) -> str:
    """Latency of the INT8 scan and of its peers."""
    peers = artifact["config"]["slb_latency"]["peers"]
    lines = []
    for row in artifact["rows"]:
        exact = row.get("exact")
        lines.append([row["n_vectors"], row["dim"], f"`{row['impl']}`", row["isa"], cell(row.get("p50_us")),
                      cell(row.get("p99_us")), cell(row.get("ceiling_share_pct")),
                      MISSING if exact is None else ("yes" if exact else "no"), cell(row.get("recall_at_1"), 100),
                      *(cell(row.get(f"speedup_vs_{peer}")) for peer in peers), counts(row.get("p50_us"))])
    return document(
        heading("INT8 scan with top-k, one thread", artifact),
        "Ceiling: the fastest of several streaming reads of the same buffer; a share is of its speed. `nexus in situ` "
        "quantises the query and returns Python objects, too. A peer's time over ours is above 1 where ours is "
        "faster. The "
        "vectors are synthetic clusters; what INT8 codes lose of real embeddings is in `calibration.json`.",
        _scan_bars(artifact["rows"], peers),
        markdown(["vectors", "dim", "implementation", "instructions", "p50, µs", "p99, µs", "of the ceiling, %",
                  "exact", "recall@1 to float32, %", *(f"{peer} / ours" for peer in peers), "n"], lines))


def _scan_bars(rows: Sequence[Row], peers: Sequence[str]) -> str:
    """What the scan was meant to reach, and whether it does; of our kernels, the fastest one of each size."""
    def best(n: int, dim: int, impl: str = "nexus") -> Row | None:
        some = [row for row in at(rows, n_vectors=n, dim=dim, impl=impl) if value_of(row.get("p50_us")) is not None]
        return min(some, key=lambda row: row["p50_us"]["value"], default=None)

    lines = []
    if (situ := best(250, 384, "nexus in situ")) is not None:
        lines.append(f"- In situ, 250 × 384: {cell(situ['p50_us'])} µs; under {IN_SITU_BAR_US:g}: "
                     f"{_said(situ['p50_us']['value'] < IN_SITU_BAR_US)}.")
    for n, dim in distinct(rows, "n_vectors", "dim"):
        row = best(n, dim)
        if row is None:
            continue
        ratios = {peer: row[f"speedup_vs_{peer}"] for peer in peers
                  if value_of(row.get(f"speedup_vs_{peer}")) is not None}
        if not ratios:
            continue
        rival = min(ratios, key=lambda peer: ratios[peer]["value"])
        nearest = ratios[rival]
        if n <= SMALL_TABLE:
            bar = f"at least {SMALL_TABLE_BAR:g} times as fast: {_said(nearest['value'] >= SMALL_TABLE_BAR)}"
        else:
            low = nearest["ci_low"] if nearest["ci_low"] is not None else nearest["value"]
            bar = f"not slower, by the lower bound: {_said(low >= 1)}"
        share = "" if value_of(row.get("ceiling_share_pct")) is None else (
            f"; {cell(row['ceiling_share_pct'])} % of the ceiling")
        lines.append(f"- {n} × {dim}: {cell(nearest)} times as fast as the nearest peer ({rival}), {bar}{share}.")
    return "\n".join(lines) or "No bar can be judged from these sizes."


def _said(reached: bool) -> str:
    return "yes" if reached else "NO"


def _selection(calibration: dict[str, Any], system: str) -> str:
    lines = [[f"`{row['system']}`" + (" (default)" if row["system"] == system else ""), cell(row["accuracy"], 100),
              counts(row["accuracy"])]
             for row in sorted(at(calibration["rows"], kind="selection"), key=lambda row: -row["accuracy"]["value"])]
    return document("## What the default was chosen by",
                    "Accuracy in % over the whole registry on development and adversarial queries together, gate "
                    "included (whose τ comes from the adversarial ones). The evaluation queries had no part in it.",
                    markdown(["system", "accuracy", "n"], lines)) if lines else "Nothing was measured for the choice."


def _beside(rows: Sequence[Row], system: str, calibration: dict, latency: dict, claims: dict, window: int) -> str:
    said = claims["routing_accuracy_n250"]
    lines = []

    def line(what: str, published: Any, *, scale: float = 1, **of: Metric) -> None:
        lines.append([what, published, *(cell(of.get(name), scale) for name in ("paper", "ours")),
                      counts(*(metric for metric in of.values() if metric))])

    for n, share in said["accuracy"].items():
        line(f"accuracy at N = {n}, %", number(100 * share), scale=100,
             paper=_of(rows, PAPER_SYSTEM, int(n), "accuracy"), ours=_of(rows, system, int(n), "accuracy"))
    for k in (1, 3):
        low, high = said[f"slb_top{k}_ci_250"]
        line(f"recall@{k} of the retriever at N = {AT_SCALE}, %",
             f"{100 * said[f'slb_top{k}_recall_250']:.3g} [{100 * low:.3g}, {100 * high:.3g}]", scale=100,
             paper=_of(rows, PAPER_SYSTEM, AT_SCALE, f"top{k}_recall"),
             ours=_of(rows, system, AT_SCALE, f"top{k}_recall"))
    line("scan inside a route, µs", number(said["scan_in_situ_us"]),
         paper=_of(rows, PAPER_SYSTEM, AT_SCALE, "scan_us"), ours=_of(rows, system, AT_SCALE, "scan_us"))
    scans = [row for row in latency["rows"] if row["n_vectors"] == claims["slb_latency"]["n_vectors"]
             and row["impl"] == "nexus in situ"]
    for row in scans:
        line(f"scan of {row['n_vectors']} × {row['dim']}, alone, µs", number(claims["slb_latency"]["scan_us"]),
             paper=row["p50_us"], ours=row["p50_us"])
    for name, what in (("tau", "τ"), ("fire_rate", "fire rate on other queries than τ's, %")):
        of = {which: next((row[name] for row in at(calibration["rows"], kind="gate", set="development",
                                                   system=gated)), None)
              for which, gated in (("paper", PAPER_SYSTEM), ("ours", system))}
        scale = 1 if name == "tau" else 100
        line(what, number(scale * claims["calibration"][name]), scale=scale, **of)
    table = markdown(["", "published", f"`{PAPER_SYSTEM}`, measured", f"`{system}`, measured", "n"], lines)
    others = [[n, share if isinstance(share, str) else number(100 * share), _fits(_row(rows, "concat_all", int(n)))]
              for n, share in said["concat_all_accuracy"].items()]
    return document(table, f"All schemas in the prompt (`concat_all`), accuracy in %; the window was {window} tokens, "
                    "which is this configuration's choice where the model was trained for more:",
                    markdown(["N", "published", "measured"], others))


def _fits(row: Row | None) -> str:
    if row is None:
        return MISSING
    return cell(row["accuracy"], 100) if row["status"] == "ok" else f"overflow ({cell(row['prompt_tokens'])} tokens)"


def _verdicts(rows: Sequence[Row], system: str) -> list[str]:
    row = _row(rows, system, AT_SCALE)
    if row is None or row["accuracy"] is None:
        return [f"`{system}` was not measured at N = {AT_SCALE}."]
    accuracy, fall = row["accuracy"], row.get("accuracy_minus_fewest")
    lines = [f"- At N = {AT_SCALE} `{system}` is right on {cell(accuracy, 100)} %; the bar of "
             f"{100 * ACCURACY_BAR:g} % is {'met' if accuracy['value'] >= ACCURACY_BAR else 'missed'}."]
    if value_of(fall) is not None:
        lines.append(f"- From the fewest tools to {AT_SCALE} accuracy changes by {cell(fall, 100)} points; a fall of "
                     f"at most {100 * MOST_FALL:g} is {'kept' if fall['value'] >= -MOST_FALL else 'exceeded'}.")
    lines.append("- Met, missed, kept and exceeded go by the estimates; the intervals stand beside them.")
    for rival, label in (("slb", "plain dense retrieval"), ("rag_mcp", "`rag_mcp`")):
        difference, p = row.get(f"accuracy_minus_{rival}"), row.get(f"mcnemar_p_{rival}")
        if difference is None or p is None:
            continue
        better = difference["value"] > 0 and p < SIGNIFICANT
        lines.append(f"- Against {label}, on the same queries: {cell(difference, 100)} points, p = {number(p)}: "
                     f"{'better' if better else 'not shown to be better'}.")
    return ["\n".join(lines)]


def _gate(calibration: dict[str, Any]) -> list[str]:
    lines = [[f"`{row['system']}`", row["set"], cell(row["tau"]), cell(row["fire_rate"], 100),
              cell(row["risk_accepted"], 100), cell(row["risk_fired"], 100), counts(row["fire_rate"])]
             for row in at(calibration["rows"], kind="gate")]
    chosen = [row for row in at(calibration["rows"], kind="abstention") if row["chosen"]]
    abstention = [[f"`{row['system']}`", number(row["threshold"]), cell(row["refused_unanswerable"], 100),
                   cell(row["refused_answerable"], 100), counts(row["refused_unanswerable"], row["refused_answerable"])]
                  for row in chosen]
    return ["## The gate",
            "Errors of the retriever's first candidate, where its margin is above τ and where the gate fires.",
            markdown(["system", "queries", "τ", "fires, %", "wrong above τ, %", "wrong below τ, %", "n"], lines),
            "## Abstention",
            "Below this cosine of the nearest tool no tool is said to fit. The threshold comes from the training "
            "queries, "
            "which the tuned embedder knows, so that its threshold is too strict.",
            markdown(["system", "cosine", "refused of the unanswerable, %", "refused of the answerable, %", "n"],
                     abstention)]


def _line(row: Row) -> list[Any]:
    if row["status"] != "ok":
        return [row["n_tools"], f"`{row['system']}`", "overflow", *[MISSING] * 5, cell(row["prompt_tokens"]), MISSING,
                MISSING, counts(row["prompt_tokens"])]
    shares = ("accuracy", "accuracy_own", "accuracy_paraphrase", "top1_recall", "top3_recall", "fire_rate")
    return [row["n_tools"], f"`{row['system']}`", *(cell(row.get(name), 100) for name in shares),
            cell(row["prompt_tokens"]), cell(row["scan_us"]), cell(row["choice_ms"]), counts(row["accuracy"])]


def _row(rows: Sequence[Row], system: str, n_tools: int) -> Row | None:
    return next(iter(at(rows, system=system, n_tools=n_tools)), None)


def _of(rows: Sequence[Row], system: str, n_tools: int, name: str) -> Metric:
    row = _row(rows, system, n_tools)
    return None if row is None else row.get(name)
