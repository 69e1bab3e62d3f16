"""The page of `nexus/report.py`: verdicts first, then a tab per run with verdicts, figures, tables and provenance."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nexus import argument_tables, diagrams, figures, html_page, peer_table, routing_tables, tables
from nexus.artifact import ArtifactError
from nexus.document import blocks
from nexus.report import Run, machines
from nexus.verdicts import FAILS, HOLDS, PART, RULE, UNTESTED, VERDICTS, Verdict

STYLE = Path(__file__).with_name("report.css")
SIGNS = {HOLDS: ("✓", "holds"), PART: ("◐", "part"), FAILS: ("✗", "fails"), UNTESTED: ("–", "untested")}
# Title, the experiments it is made of, and the table. Table I is made of whatever a run has.
TABLES: tuple[tuple[str, tuple[str, ...], Callable[..., str]], ...] = (
    ("Table II", ("gating_nogo",), lambda gating: tables.table2(gating, tables.published())),
    ("Table III", ("deep_splice_ttft",), lambda timed: tables.table3(timed, tables.published())),
    ("Table IV, routing", ("routing_accuracy_n250", "calibration", "slb_latency"),
     lambda *of: routing_tables.table4(*of, tables.published())),
    ("Table IV, arguments and the prefix cache", ("sidecar_accuracy", "l0_radix"),
     lambda *of: argument_tables.table4_rest(*of, tables.published())),
    ("Repair frontier", ("repair_frontier",), tables.frontier),
    ("Calibrated repair", ("calibrated_repair",), tables.repair_policy),
    ("Layouts", ("layouts",), tables.layouts),
    ("Arguments", ("sidecar_accuracy", "constrain_cost"), argument_tables.arguments),
    ("Serving", ("l0_radix", "block_allocator"), argument_tables.serving),
    ("Generalisation", ("routing_generalisation",), routing_tables.generalisation),
    ("INT8 scan", ("slb_latency",), routing_tables.scan),
)


def render(runs: Sequence[Run], about: str) -> str:
    """The whole page about these runs, of which there is at least one."""
    judged = [run.verdicts() for run in runs]
    title = f"Nexus: published claims and what was measured ({about})"
    content = [
        "<header>", f"<h1>{escape(title)}</h1>",
        "<p>Can a precompiled block of keys and values be moved to another place in the context, and what does it cost "
        "to make that faithful? Can the choice of a tool avoid the context altogether? Every published claim is tested "
        f"on the artifacts of {len(runs)} run{'s' * (len(runs) > 1)}, measured on {escape(', '.join(machines(runs)))}. "
        "Published numbers are of a 14B model on other hardware.</p>", "</header>", "<main>",
        overview(runs, judged), _tabs(runs, judged), _mechanisms(), "</main>"]
    return html_page.page(title, STYLE.read_text(encoding="utf-8") + _switches(len(runs)), "\n".join(content))


def overview(runs: Sequence[Run], judged: Sequence[Sequence[Verdict]]) -> str:
    """The section of verdicts: one line per claim, one column per run, and the rule."""
    lines = []
    for verdicts in zip(*judged):
        claim = verdicts[0].claim
        said = next((f"; published: {verdict.published}" for verdict in verdicts if verdict.cells), "")
        lines.append([f'{html_page.inline(claim.text)} <span class="measured">{escape(claim.where + said)}</span>',
                      *(f'{_badge(verdict)} <span class="measured">{html_page.inline(_told(verdict))}</span>'
                        for verdict in verdicts)])
    rule = html_page.folded("The rule by which a verdict is reached",
                            "<ul>" + "".join(f"<li>{html_page.inline(item)}</li>" for item in RULE) + "</ul>")
    return "\n".join([
        '<section aria-labelledby="verdicts"><h2 id="verdicts">Verdicts</h2>',
        "<p>Below each verdict is what was measured: the value with its interval, or the least and the largest of "
        "several cells. The runs below the table have every cell, and the command that measures it again.</p>", rule,
        # What the page is about.
        html_page.table(["claim", *(run.name for run in runs)], lines, "Verdicts", "claims", may_fold=False),
        "</section>"])


def _told(verdict: Verdict) -> str:
    if verdict.verdict == UNTESTED:
        return verdict.reason
    return verdict.measured if len(verdict.cells) == 1 else f"{verdict.measured}; {verdict.count}"


def _badge(verdict: Verdict) -> str:
    sign, name = SIGNS[verdict.verdict]
    return f'<span class="verdict {name}"><span aria-hidden="true">{sign}</span> {verdict.verdict}</span>'


def _tabs(runs: Sequence[Run], judged: Sequence[Sequence[Verdict]]) -> str:
    choices = "".join(f'<input type="radio" name="run" id="tab-{i}"{" checked" * (i == 0)}>'
                      f'<label for="tab-{i}">{escape(run.name)}</label>' for i, run in enumerate(runs))
    panels = "\n".join(_panel(i, run, verdicts) for i, (run, verdicts) in enumerate(zip(runs, judged)))
    return f'<div class="tabs">\n<fieldset><legend>Run</legend>{choices}</fieldset>\n{panels}\n</div>'


def _switches(count: int) -> str:
    return "".join(f".tabs:has(#tab-{i}:checked) > #run-{i} {{ display: block; }}\n" for i in range(count))


def _panel(index: int, run: Run, verdicts: Sequence[Verdict]) -> str:
    key = f"run-{index}"
    counted = Counter(verdict.verdict for verdict in verdicts)
    return "\n".join([
        f'<section class="panel" id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(run.name)}</h2>',
        f"<p>{len(run.artifacts)} of {len(run.artifacts) + len(run.lacking)} artifacts, model {escape(run.model)}.</p>",
        _lacking(run), "<h3>Verdicts, cell by cell</h3>",
        '<ul class="counts">' + "".join(
            f'<li><span class="{SIGNS[name][1]}">{counted[name]}</span> {name}</li>' for name in VERDICTS) + "</ul>",
        *(_claim(run, verdict) for verdict in verdicts),
        "<h3>Figures</h3>", *_figures(key, run), "<h3>Tables</h3>", *_tables(run), "<h3>Provenance</h3>",
        _provenance(run), "</section>"])


def _lacking(run: Run) -> str:
    if not run.lacking:
        return ""
    items = "".join(f"<li><code>{escape(name)}</code>: {html_page.inline(reason)}; it would be made with "
                    f"<code>{escape(run.commands[name])}</code></li>" for name, reason in run.lacking.items())
    return f"<h3>What this run lacks</h3>\n<ul>{items}</ul>"


def _claim(run: Run, verdict: Verdict) -> str:
    claim = verdict.claim
    parts = []
    if verdict.reason:
        parts.append(f"<p>{html_page.inline(verdict.reason)}.</p>")
    if verdict.cells:
        unit = f", {claim.unit}" if claim.unit else ""
        lines = [[escape(cell.label), escape(cell.published), escape(cell.measured), escape(cell.n),
                  escape(cell.verdict)] for cell in verdict.cells]
        columns = ["cell", f"published{unit}", f"measured{unit}", "n", "verdict"]
        parts.append(html_page.table(columns, lines, claim.text))
    if claim.experiment is not None:
        parts.append(html_page.command(run.commands[claim.experiment]))
    summary = f"{_badge(verdict)} {html_page.inline(claim.text)} <span class=\"small\">({escape(claim.where)})</span>"
    return html_page.folded(summary, "\n".join(parts))


def _figures(key: str, run: Run) -> list[str]:
    published = tables.published()
    drawn = [
        ("figure1", "dkl_sweep", lambda of: figures.figure1(of, published)),
        ("figure4", "deep_splice_ttft", lambda of: figures.figure4(of, published)),
        ("figure5", "routing_accuracy_n250", lambda of: figures.figure5(of, published)),
        ("frontier", "repair_frontier", figures.frontier),
        ("choice", "spliced_choice", figures.spliced_choice),
    ]
    parts = []
    for name, experiment, draw in drawn:
        title, caption = CAPTIONS[name]
        parts.append(f"<h4>{title}</h4>")
        if experiment in run.artifacts:
            artifact = run.artifacts[experiment]
            told = DESCRIPTIONS[name](artifact)
            parts += [html_page.figure(figures.svg(draw(artifact)), f"{key}-{name}", title, told, caption),
                      html_page.command(run.commands[experiment])]
        else:
            parts.append(f"<p>Not drawn: <code>{experiment}</code> {html_page.inline(run.lacking[experiment])}.</p>")
    return parts


def _mechanisms() -> str:
    drawn = ""
    for name, draw in (("figure2", diagrams.figure2), ("figure3", diagrams.figure3)):
        title, told = CAPTIONS[name]
        drawn += f"<h3>{title}</h3>" + html_page.figure(figures.svg(draw()), name, title, told, told)
    return f'<section aria-labelledby="mechanisms"><h2 id="mechanisms">Mechanisms</h2>{drawn}</section>'


CAPTIONS = {
    "figure1": ("Figure 1: divergence of a bare splice against the distance moved",
                "Mean KL from a full prefill, with intervals, over the published band; the vertical line is the "
                "published start of repair."),
    "figure2": ("Figure 2: the way of a request",
                "Routing by retrieval (solid) reads the query and the registry alone: query, embedding, INT8 scan, "
                "margin gate, cross-encoder below τ, tool, arguments from a signature. Placing a compiled block "
                "(dashed) depends on the depth: up to P tokens it is spliced bare, beyond, R(n) of it is decoded "
                "again."),
    "figure3": ("Figure 3: from a block file into the cache",
                "The header is compared with the live model; keys are rotated pair by pair from where they were "
                "compiled to where they go, values are copied as rows or transposed; then the last ⌈S·R/100⌉ tokens "
                "are decoded again, which is the published repair."),
    "figure4": ("Figure 4: speed-up over a prefill against depth",
                "Medians with intervals: the published schedule cold (with the published numbers) and warm, beside the "
                "best other arms."),
    "figure5": ("Figure 5: right tool chosen against the number of tools",
                "Shares with Wilson intervals, every query asked at every size; published numbers are dashes."),
    "frontier": ("The frontier: what recomputing a part of a block buys",
                 "KL from a full prefill, behind the query, against warm speed-up; a panel per depth, each with its "
                 "Pareto front."),
    "choice": ("Choosing from spliced tools: right tool chosen against the time to the first token",
               "Every arm that places several tools in one context, by depth and by how the answer is read."),
}


def _listed(rows: Sequence[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], str], metric: str,
            scale: float = 1) -> str:
    return "; ".join(f"{label(row)}: {tables.cell(row[metric], scale)}" for row in rows if row.get(metric))


DESCRIPTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "figure1": lambda of: "Bare splice, nats behind the query, by tokens moved. " + _listed(
        tables.at(of["rows"], arm="bare", probe="query"), lambda row: str(row["offset"]), "dkl_nats"),
    "figure4": lambda of: "Speed-up of the schedule. " + _listed(
        [row for row in of["rows"] if row["curve_k"] is not None],
        lambda row: f"K {row['curve_k']:g}, {row['n_past']} tokens, {row['protocol']}", "speedup"),
    "figure5": lambda of: "Percent right. " + _listed(
        tables.at(of["rows"], system=of["config"]["routing"]["system"]),
        lambda row: f"{row['system']} among {row['n_tools']}", "accuracy", 100),
    "frontier": lambda of: "Best arm of at most a tenth of the block, nats. " + "; ".join(
        f"{n_past} tokens: {best['arm']}, {tables.cell(best['dkl_nats'])}, {tables.cell(best['speedup'])} times"
        for (n_past,) in tables.distinct(of["rows"], "n_past")
        if (best := tables.best_within(tables.at(of["rows"], probe="query", n_past=n_past)))),
    "choice": lambda of: "Percent right. " + _listed(
        of["rows"], lambda row: f"{row['arm']}, {row['depth']} tokens, {row['reading']}", "accuracy", 100),
}


def _tables(run: Run) -> list[str]:
    try:
        parts = [html_page.document(blocks(peer_table.table1(run.folder)), 4, "Table I")]
    except ArtifactError as error:
        parts = [f"<h4>Table I</h4>\n<p>Not made: {html_page.inline(str(error))}.</p>"]
    for title, needed, made in TABLES:
        missing = [name for name in needed if name not in run.artifacts]
        if missing:
            parts.append(f"<h4>{title}</h4>\n<p>Not made: " + "; ".join(
                f"<code>{name}</code> {html_page.inline(run.lacking[name])}" for name in missing) + ".</p>")
            continue
        text = made(*(run.artifacts[name] for name in needed))
        # A part of a table begins with a heading of the second level.
        parts.append(html_page.document(blocks(text), 4 if text.startswith("# ") else 3, title))
        parts.append(html_page.folded("Measure these numbers again",
                                      "\n".join(html_page.command(run.commands[name]) for name in needed)))
    return parts


def _provenance(run: Run) -> str:
    """What all artifacts have in common as a list, the rest as a table."""
    facts = {name: _origin(artifact) for name, artifact in run.artifacts.items()}
    columns = [fact for fact in next(iter(facts.values())) if len({origin[fact] for origin in facts.values()}) > 1]
    common = "".join(f"<li>{escape(fact)}: {escape(value)}</li>" for fact, value in next(iter(facts.values())).items()
                     if fact not in columns and value != tables.MISSING)
    lines = [[f"<code>{escape(name)}</code>", f"<code>{escape(run.commands[name])}</code>",
              *(escape(origin[fact]) for fact in columns)] for name, origin in facts.items()]
    return ("<p>The samples that the rows of an artifact summarise lie beside it. Where there is no date, the "
            "commit has one: artifacts hold none, so that equal measurements give equal bytes.</p>\n"
            f"<p>Of all artifacts:</p>\n<ul>{common}</ul>\n"
            + html_page.table(["artifact", "command", *columns], lines, "Provenance"))


def _origin(artifact: Mapping[str, Any]) -> dict[str, str]:
    origin, of = artifact["provenance"], artifact["tuple"]
    versions = ", ".join(f"{package} {version}" for package, version in sorted((origin.get("versions") or {}).items())
                         if version)
    commit = (origin.get("git_commit") or "unknown")[:12] + (", with changes" if origin.get("git_dirty") else "")
    told = {"commit": commit, "configuration": artifact["config_sha256"][:12], "rows": len(artifact["rows"]),
            "CPU": origin.get("cpu"), "cores": origin.get("physical_cores"), "memory, GB": origin.get("memory_gb"),
            "threads": origin.get("threads"), "instructions": origin.get("isa"), "system": origin.get("os"),
            "date": origin.get("date"), "Python": origin.get("python"), "llama.cpp": of.get("llama_cpp"),
            "embedder": of.get("embedder"), "model's SHA-256": of.get("model_sha256"), "versions": versions or None}
    return {fact: _text(value) for fact, value in told.items()}


def _text(value: Any) -> str:
    return tables.MISSING if value is None else str(value)
