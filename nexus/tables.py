"""Tables in Markdown, written from stored artifacts; no model is loaded. Equal artifacts give equal bytes.

A cell is `value [low, high]`; the level of the intervals stands above each table, and n in a column of its own.
"""
from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nexus import artifact as stored_form
from nexus.config import ROOT, Config

PUBLISHED = ROOT / "results" / "published.json"
# A repair is worth its name if it recomputes at most this share of a block …
MOST_PCT = 10.0
# … stays this near to a full prefill (mean, nats) and is this many times as fast (context resident).
KL_BAR_NATS = 0.02
SPEEDUP_BAR = 4.0
# Warm time of an arm over the time that its tokens take in a prefill.
LATENCY_BAR = 1.3
# Needs the answer, or is the reference itself: neither is a method.
CONTROLS = ("oracle", "noise_floor")
# The published predictor of drift, a name of `drift.PREDICTORS`.
PAPER_PREDICTOR = "context_k_variance"
WITHIN = "spearman_rho_within_layer"
MISSING = "–"

Row = dict[str, Any]
Metric = dict[str, Any] | None


class MissingArtifact(FileNotFoundError):
    """A table or figure needs an artifact that is not there; the message has the command that makes it."""


def stored(cfg: Config, out: Path, experiment: str) -> dict[str, Any]:
    """The experiment's artifact in `out`. Raises MissingArtifact, and ArtifactError where it is broken."""
    path = stored_form.path_of(experiment, out)
    try:
        artifact = stored_form.read(path)
    except FileNotFoundError:
        model = [f"model={cfg.model.name}"]
        if cfg.model.path is not None:
            model = ["model=local", f"model.path={cfg.model.path}", f"model.name={cfg.model.name}"]
        command = shlex.join([".venv/bin/python", "-m", f"experiments.{experiment}", *model,
                              f"profile={cfg.profile_name}"])
        raise MissingArtifact(f"{path} is missing; make it with: {command}") from None
    if artifact["experiment"] != experiment:
        raise stored_form.ArtifactError(f"{path} is the artifact of {artifact['experiment']!r}, not of {experiment!r}; "
                                        "remove it and measure again")
    return artifact


def published() -> dict[str, Any]:
    """The published numbers that are tested, `results/published.json`. Raises ArtifactError where it is broken."""
    try:
        return json.loads(PUBLISHED.read_text(encoding="utf-8"))
    except ValueError as error:
        raise stored_form.ArtifactError(f"{PUBLISHED}: not valid JSON ({error}); restore it with: git checkout "
                                        f"results/{PUBLISHED.name}") from None


def value_of(metric: Metric) -> float | None:
    """The metric's value in its own unit; None where it was not measured."""
    return None if metric is None else metric["value"]


def level_text(artifact: dict[str, Any]) -> str:
    """The confidence level of the artifact's intervals, such as '95 %'; 'no' where nothing was measured."""
    levels = {metric["level"] for row in artifact["rows"] for metric in row.values() if isinstance(metric, dict)}
    return " / ".join(f"{100 * level:g} %" for level in sorted(levels)) or "no"


def placed(rows: Iterable[Row]) -> list[Row]:
    """The rows that have both a divergence and a speed-up: only these have a place on the frontier."""
    return [row for row in rows if value_of(row["dkl_nats"]) is not None and value_of(row["speedup"]) is not None]


def front(rows: Iterable[Row]) -> list[Row]:
    """Rows, by ascending speed-up, such that no other is at once at least as fast and at least as near to prefill."""
    chosen: list[Row] = []
    for row in sorted(placed(rows), key=lambda row: (-row["speedup"]["value"], row["dkl_nats"]["value"])):
        if not chosen or row["dkl_nats"]["value"] < chosen[-1]["dkl_nats"]["value"]:
            chosen.append(row)
    return chosen[::-1]


def methods(rows: Iterable[Row]) -> list[Row]:
    """The rows without controls."""
    return [row for row in rows if row["arm"] not in CONTROLS]


def best_within(rows: Iterable[Row], most_pct: float = MOST_PCT) -> Row | None:
    """The nearest method that meets both bars and recomputes at most `most_pct` of a block on average.

    Where none meets both, the nearest of all; None without any.
    """
    able = [row for row in methods(rows)
            if row["recompute_pct"] <= most_pct and value_of(row["dkl_nats"]) is not None]
    both = [row for row in able if row["dkl_nats"]["value"] <= KL_BAR_NATS
            and (value_of(row["speedup"]) or 0) >= SPEEDUP_BAR]
    return min(both or able, key=lambda row: row["dkl_nats"]["value"], default=None)


def at(rows: Iterable[Row], **keys: Any) -> list[Row]:
    """The rows whose columns have these values."""
    return [row for row in rows if all(row[key] == value for key, value in keys.items())]


def distinct(rows: Iterable[Row], *columns: str) -> list[tuple]:
    """The values of `columns` in the order of appearance."""
    return list(dict.fromkeys(tuple(row[column] for column in columns) for row in rows))


def number(value: float | None) -> str:
    """Three significant digits, whole numbers from 100 on."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def cell(metric: Metric, scale: float = 1) -> str:
    """`value [low, high]`, times `scale`; without an interval the method says why there is none."""
    if value_of(metric) is None:
        return MISSING
    low, high = metric["ci_low"], metric["ci_high"]
    interval = f"({metric['method']})" if low is None else f"[{number(scale * low)}, {number(scale * high)}]"
    return f"{number(scale * metric['value'])} {interval}"


def counts(*metrics: Metric) -> str:
    """The sample counts of the metrics in their order, one number where they are equal."""
    all_counts = [MISSING if metric is None else str(metric["n"]) for metric in metrics]
    return " / ".join(all_counts if len(set(all_counts)) > 1 else all_counts[:1])


def markdown(columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table that ends with a newline. Pipes and line breaks in a cell stay in that cell."""
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(" ".join(str(item).split()).replace("|", "\\|") for item in cells) + " |\n"

    return line(columns) + "|" + "---|" * len(columns) + "\n" + "".join(map(line, lines))


def heading(title: str, artifact: dict[str, Any]) -> str:
    """Title, what was measured and how to read a cell."""
    of = artifact["tuple"]
    ways = {metric["method"] for row in artifact["rows"] for metric in row.values()
            if isinstance(metric, dict) and metric["ci_low"] is not None}
    return (f"# {title}\n\nMeasured: {of['model']}, llama.cpp {of['llama_cpp']}; from `{artifact['experiment']}.json` "
            f"(configuration {artifact['config_sha256'][:12]}). Cells: value [low, high] with {level_text(artifact)} "
            f"intervals ({', '.join(sorted(ways)) or 'none'}), or value (why there is no interval); n counts "
            f"samples; {MISSING} is not measured.\n")


def document(*parts: str) -> str:
    """The parts of a document, one blank line between them."""
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def table2(artifact: dict[str, Any], claims: dict[str, Any]) -> str:
    """Table II beside its measurement, and what other predictors achieve. ρ has no unit."""
    claims = claims["gating_nogo"]
    paper = at(artifact["rows"], predictor=PAPER_PREDICTOR)
    names = ("max_drift", "mean_drift", "spearman_rho")
    lines = []
    for key in _both(claims["rows"], paper, "n_past", "context"):
        claim, row = _found(claims["rows"], key), _found(paper, key)
        lines.append([*key.values(), *(text for name in names for text in (number(claim.get(name)),
                                                                           cell(row.get(name)))),
                      cell(row.get(WITHIN)), counts(*(row.get(name) for name in (*names, WITHIN)))])
    columns = ["n_past, tokens", "context", "max drift, published", "measured", "mean drift, published", "measured",
               "Spearman ρ, published", "measured", "ρ within layers", "n"]
    mean_claim = _mean(row["spearman_rho"] for row in claims["rows"])
    mean_rho = _mean(value_of(row["spearman_rho"]) for row in paper)
    return document(
        heading("Table II: does the context predict the drift of keys?", artifact),
        "Drift is how far a spliced block's keys lie from those of a full prefill (L2 over a head's dims, mean over "
        "the block), maximum and mean over heads; its unit is the model's own, so that only ρ compares between models. "
        f"Predictor here: `{PAPER_PREDICTOR}`, the published one, on keys without their rotation; the description does "
        "not say which it means, so the same on keys as they lie in the cache is among the others below. ρ ranks heads "
        "over all layers; within layers, each layer's mean rank is taken out first, so that knowing the layer is worth "
        f"nothing ({MISSING}: no rank is left, as with one KV head per layer).",
        markdown(columns, lines),
        f"Mean ρ of the rows: published {number(mean_claim)}, measured {number(mean_rho)}. "
        f"Target: {claims['target_spearman_rho']:g}.",
        "## Spearman ρ of other predictors",
        _other_predictors(artifact, "spearman_rho"), _reaching(artifact, claims["target_spearman_rho"]),
        "## ρ within layers of other predictors",
        _other_predictors(artifact, WITHIN))


def _other_predictors(artifact: dict[str, Any], metric: str) -> str:
    rows = [row for row in artifact["rows"] if row["predictor"] != PAPER_PREDICTOR]
    places = sorted(distinct(rows, "n_past", "context"), key=lambda place: place[0])
    lines = []
    for (predictor,) in distinct(rows, "predictor"):
        rhos = [_found(rows, {"predictor": predictor, "n_past": n_past, "context": context}).get(metric)
                for n_past, context in places]
        lines.append([f"`{predictor}`", *map(cell, rhos), counts(*rhos)])
    if not lines:
        return "None was measured."
    return markdown(["predictor", *(f"n_past {n_past}, context {context}" for n_past, context in places), "n"], lines)


def _reaching(artifact: dict[str, Any], target: float) -> str:
    bounded = [row for row in artifact["rows"] if row["spearman_rho"] and row["spearman_rho"]["ci_low"] is not None]
    if not bounded:
        return f"No predictor has an interval, so none is shown to reach ρ = {target:g}."

    reaching = [row["predictor"] for row in bounded if row["spearman_rho"]["ci_low"] >= target]
    if reaching:
        told = ", ".join(f"`{predictor}` ({reaching.count(predictor)} of {len(at(bounded, predictor=predictor))} rows)"
                         for predictor in dict.fromkeys(reaching))
        return (f"The lower bound reaches ρ = {target:g} for {told}. ρ ranks heads over all layers, so that "
                "`layer_depth`, which looks at nothing but the layer's index, is what a predictor has to beat; "
                "intervals are over tools.")
    highest = max(bounded, key=lambda row: row["spearman_rho"]["ci_low"])
    return (f"No predictor's lower bound reaches ρ = {target:g}; the highest is "
            f"{number(highest['spearman_rho']['ci_low'])}, of `{highest['predictor']}` (n_past {highest['n_past']}, "
            f"context {highest['context']}).")


def table3(artifact: dict[str, Any], claims: dict[str, Any]) -> str:
    """Table III beside its measurement (speed-up: prefill time over splice time), then the other arms and peers."""
    claims = claims["deep_splice_ttft"]
    rows = artifact["rows"]
    scheduled = [row for row in rows if row["curve_k"] is not None]
    lines = []
    for key in _both(claims["rows"], scheduled, "curve_k", "n_past"):
        claim = _found(claims["rows"], key)
        cold, warm = (_found(scheduled, key | {"protocol": protocol}) for protocol in ("cold", "warm"))
        said = MISSING if not claim else "{} [{}, {}]".format(*map(number, (claim["speedup"], *claim["ci"])))
        lines.append([f"{key['curve_k']:g}", key["n_past"], f"{(warm or cold or claim)['r_pct']:.3g}", said,
                      cell(cold.get("speedup")), _without_one(cold), cell(warm.get("speedup")),
                      *_fidelity(warm or cold),
                      *(cell(row.get("latency_per_ideal")) for row in (cold, warm)),
                      counts(cold.get("speedup"), warm.get("speedup"), (warm or cold).get("dkl_nats"))])
    fidelity = ["KL query, nats", "KL block end, nats", "top-1 query, %", "top-1 block end, %"]
    other = [[f"`{row['arm']}`", row["n_past"], row["protocol"], f"{row['r_pct']:.3g}", row["compiled_behind"],
              cell(row["prefill_ms"]), cell(row["splice_ms"]), cell(row["speedup"]), *_fidelity(row),
              cell(row.get("latency_per_ideal")), counts(row["speedup"], row["dkl_nats"])]
             for row in rows if row["curve_k"] is None]
    return document(
        heading("Table III: time to first token of a spliced and repaired block", artifact),
        "Speed-up is prefill time over splice time, so that more than 1 gains. Cold starts with an empty cache, warm "
        "with the context resident; the cold peers `prefix-reuse` and `group-cache` find what they cache resident and "
        "stand beside the same cold prefill. Latency / ideal is 1 where a decoded token costs what it costs in a "
        "prefill. KL is from a full prefill, in nats, read behind the query and right behind the block (of the warm runs where there "
        f"are any). Published: {claims['protocol']}, {claims['trials']} trials, intervals as printed, other model and "
        "machine.",
        "## The schedule R(n)",
        markdown(["K", "n_past, tokens", "R, % of block", "speed-up, published", "cold speed-up",
                  "cold, one trial left out", "warm speed-up", *fidelity, "cold latency / ideal",
                  "warm latency / ideal", "n (cold / warm / KL)"], lines),
        _decided([row for row in scheduled if row["protocol"] == "cold"]),
        "## Other arms and peers",
        markdown(["arm", "n_past, tokens", "protocol", "R, % of block", "compiled behind", "prefill, ms", "splice, ms",
                  "speed-up", *fidelity, "latency / ideal", "n (time / KL)"], other) if other else "None was measured.")


def _without_one(row: Row) -> str:
    low, high = row.get("speedup_without_one_low"), row.get("speedup_without_one_high")
    return MISSING if low is None else f"{number(low)} to {number(high)}"


def _decided(rows: list[Row]) -> str:
    """Whether the cold trials are enough to say that a splice is faster or slower than a prefill."""
    told = [row for row in rows if row.get("speedup_without_one_low") is not None]
    if not told:
        return "No cell has enough cold trials to leave one out."
    decided = sum((row["speedup_without_one_low"] > 1) == (row["speedup_without_one_high"] > 1) for row in told)
    return (f"In {decided} of {len(told)} cold cells no single trial decides whether the splice is faster than the "
            "prefill; in the others these trials leave it undecided.")


def _fidelity(row: Row) -> list[str]:
    return [cell(row.get("dkl_nats")), cell(row.get("dkl_block_end_nats")), cell(row.get("top1"), 100),
            cell(row.get("top1_block_end"), 100)]


def frontier(artifact: dict[str, Any]) -> str:
    """The best cheap repair of each depth against the bars, then every arm; read behind the query, context resident."""
    rows = at(artifact["rows"], probe="query")
    depths = sorted(n_past for (n_past,) in distinct(rows, "n_past"))
    best_lines, lines = [], []
    for n_past in depths:
        here = at(rows, n_past=n_past)
        floor = (at(here, arm="noise_floor") or [{}])[0]
        best = best_within(here)
        if best is None:
            best_lines.append([n_past, "none measured", *[MISSING] * 5, cell(floor.get("dkl_nats")), *[MISSING] * 3])
        else:
            best_lines.append([
                n_past, f"`{best['arm']}`", f"{best['recompute_pct']:.3g}", best["compiled_behind"],
                cell(best["dkl_nats"]), cell(best["top1"], 100), cell(best["speedup"]), cell(floor.get("dkl_nats")),
                _bar(best["dkl_nats"], most=KL_BAR_NATS), _bar(best["speedup"], least=SPEEDUP_BAR),
                counts(best["dkl_nats"], best["speedup"])])
        leading = front(methods(here))
        lines += [[n_past, f"`{row['arm']}`", f"{row['recompute_pct']:.3g}", row["compiled_behind"],
                   cell(row["dkl_nats"]), cell(row["top1"], 100), cell(row["speedup"]),
                   cell(row.get("ideal_speedup")), cell(row.get("latency_per_ideal")),
                   "yes" if row in leading else "", counts(row["dkl_nats"], row["speedup"])] for row in here]
    return document(
        heading("Repair frontier: what recomputing a part of a block buys", artifact),
        "KL is from a full prefill, in nats, read behind the query; speed-up is prefill time over splice time with the "
        "context resident. The oracle needs the answer and does not compete.",
        f"## Best arm that recomputes at most {MOST_PCT:g} % of a block on average: both bars first, then KL",
        markdown(["n_past, tokens", "arm", "share, %", "compiled behind", "KL, nats", "top-1, %", "speed-up",
                  "noise floor, nats", f"mean KL ≤ {KL_BAR_NATS:g} nats", f"speed-up ≥ {SPEEDUP_BAR:g}",
                  "n (KL / time)"], best_lines),
        "## Latency against the token-count ideal",
        *_latencies(rows),
        "## All arms",
        markdown(["n_past, tokens", "arm", "share, %", "compiled behind", "KL, nats", "top-1, %", "speed-up",
                  "ideal speed-up", "latency / ideal", "on the front", "n (KL / time)"], lines))


def _latencies(rows: list[Row]) -> list[str]:
    """Which arms keep to the bar, each over all depths, and those that come nearest to it or do not."""
    timed = [row for row in rows if value_of(row.get("latency_per_ideal_all_depths")) is not None
             and row["arm"] != "noise_floor"]
    if not timed:
        return ["None was timed."]
    arms = {(row["compiled_behind"], row["arm"], f"{row['recompute_pct']:.3g}"): row["latency_per_ideal_all_depths"]
            for row in timed}
    slowest = sorted(arms.items(), key=lambda item: -item[1]["value"])
    above = sum(metric["value"] > LATENCY_BAR for metric in arms.values())
    cells = sum(row["latency_per_ideal"]["value"] > LATENCY_BAR for row in timed)
    certain = sum((row["latency_per_ideal"]["ci_low"] or 0) > LATENCY_BAR for row in timed)
    return [f"An arm's time over what its tokens take in the prefill beside it. All depths together, "
            f"{len(arms) - above} of {len(arms)} arms keep to {LATENCY_BAR:g}. Depth by depth, {cells} of {len(timed)} cells are above it, "
            f"{certain} of them with their whole interval. The slowest arms over all depths:",
            markdown(["arm", "share, %", "compiled behind", "latency / ideal", f"≤ {LATENCY_BAR:g}", "n"],
                     [[f"`{arm}`", share, behind, cell(metric), _bar(metric, most=LATENCY_BAR), counts(metric)]
                      for (behind, arm, share), metric in slowest[:6]])]


def _bar(metric: Metric, most: float | None = None, least: float | None = None) -> str:
    """Whether the value keeps the bar, and whether the interval leaves that open."""
    if value_of(metric) is None:
        return "not measured"

    def keeps(value: float) -> bool:
        return value <= most if least is None else value >= least

    ends = [metric[name] for name in ("ci_low", "ci_high") if metric[name] is not None]
    crosses = any(keeps(end) != keeps(metric["value"]) for end in ends)
    return ("holds" if keeps(metric["value"]) else "fails") + (", interval crosses" if crosses else "")


def repair_policy(artifact: dict[str, Any]) -> str:
    """The calibrated policy on its calibration set and on what it has not seen (KL in nats, shares in percent)."""
    rows = artifact["rows"]
    lines, verdicts = [], []
    for n_past in sorted(n_past for (n_past,) in distinct(rows, "n_past")):
        for name in ("calibration", "test"):
            lines += [[n_past, name, f"`{row['arm']}`" + " (taken)" * row["chosen"], f"{row['recompute_pct']:.3g}",
                       row["compiled_behind"], f"{row['epsilon_nats']:g}", cell(row["dkl_nats"]),
                       number(row["dkl_upper_nats"]),
                       cell(row["violation_rate"], 100), cell(row.get("top1"), 100), cell(row.get("noise_floor_nats")),
                       cell(row.get("speedup")), counts(row["dkl_nats"], row.get("speedup"))]
                      for row in at(rows, n_past=n_past, set=name)]
        verdicts.append([n_past, policy_verdict(_found(rows, {"n_past": n_past, "set": "test", "chosen": True}))])
    return document(
        heading("Calibrated repair: the promise and its test", artifact),
        "Per depth, arms are tested on the calibration set from the dearest down, each by whether the upper bound of its "
        "mean stays within ε, until one fails; the last that passed is taken, else a prefill (`full`). KL is from a "
        "full prefill, in nats, behind the query; its upper bound is one-sided. "
        "A violation is a case above ε, with a Wilson interval. Speed-up is with the context resident. `test` holds "
        "tools, queries and a conversation that calibration has not seen.",
        markdown(["n_past, tokens", "set", "arm", "share, %", "compiled behind", "ε, nats", "mean KL, nats",
                  "upper bound, nats", "violations, %", "top-1, %", "noise floor, nats", "speed-up", "n (KL / time)"],
                 lines),
        "## Verdict on the test set",
        markdown(["n_past, tokens", "verdict"], verdicts))


def policy_verdict(row: Row) -> str:
    """Whether the test row's mean divergence stays within ε, and whether its bound does."""
    mean = value_of(row.get("dkl_nats"))
    if mean is None:
        return "not tested"
    epsilon, upper = row["epsilon_nats"], row["dkl_upper_nats"]
    if mean > epsilon:
        return "fails: the mean is above ε"
    if upper is None:
        return "mean within ε; no bound"
    return "holds: the upper bound is within ε" if upper <= epsilon else "open: the mean is within ε, the bound is not"


def layouts(artifact: dict[str, Any]) -> str:
    """What can be spliced and what is refused, with the divergence (nats) of what was spliced."""
    rows = artifact["rows"]
    cases = ("model", "v_layout", "setting")
    status = [[*case, said, message or ""]
              for *case, said, message in distinct([{"message": None, **row} for row in rows],
                                                   *cases, "status", "message")]
    spliced = at(rows, status="spliced")
    depths = sorted(n_past for (n_past,) in distinct(spliced, "n_past"))
    lines = []
    for case in distinct(spliced, *cases, "arm"):
        metrics = [_found(spliced, dict(zip((*cases, "arm"), case)) | {"n_past": n_past}).get("dkl_nats")
                   for n_past in depths]
        lines.append([*case, *map(cell, metrics), counts(*metrics)])
    return document(
        heading("Layouts: what can be spliced", artifact),
        markdown(["model", "V layout", "setting", "status", "message"], status),
        "## KL from a full prefill behind the query, nats, by depth in tokens",
        markdown(["model", "V layout", "setting", "arm", *(f"n_past {n_past}" for n_past in depths), "n"], lines)
        if lines else "Nothing was spliced.")


def _both(claims: Iterable[Row], rows: Iterable[Row], *columns: str) -> list[Row]:
    """The keys of the published rows, then those that only the measurement has."""
    return [dict(zip(columns, key)) for key in dict.fromkeys([*distinct(claims, *columns), *distinct(rows, *columns)])]


def _found(rows: Iterable[Row], keys: Row) -> Row:
    """The row with these keys, or an empty one."""
    return next(iter(at(rows, **keys)), {})


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
