"""The report: whole, self-contained, the same bytes twice, and honest about what a run lacks."""
from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import test_tables

from nexus import artifact as stored_form
from nexus import cli, diagrams, figures, report, report_page, run_folder
from nexus.claims import claims
from nexus.config import ROOT, compose, validate
from nexus.document import Table, blocks
from nexus.sources import sources
from nexus.verdicts import RULE, UNTESTED

COMMITTED = ROOT / "results"
VOID = ("meta", "link", "input", "br")
# Attributes by which a page would fetch something.
FETCHING = ("src", "srcset", "data", "poster", "action", "background", "ping", "codebase")


class Page(HTMLParser):
    """The tags of a page that are open, its ids, and what refers to them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.labels, self.levels = [], [], [], []
        self.fetched, self.text, self.tables, self.scopes = [], [], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.labels += [name for key in ("aria-labelledby", "for") for name in values.get(key, "").split()]
        self.labels += [values["href"][1:]] if values.get("href", "").startswith("#") and tag == "a" else []
        self.levels += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.fetched += [f"{tag} {key}={value}" for key, value in attrs if key in FETCHING]
        self.fetched += [value for key, value in attrs if tag == "link" and key == "href" and value != "data:,"]
        self.fetched += [tag] if tag in ("script", "iframe", "object", "embed", "img") else []
        self.tables += tag == "table"
        self.scopes += [values.get("scope")] if tag == "th" else []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def copied(folder: Path, *experiments: str, run: str = "smollm2-135m") -> Path:
    """A run of these committed artifacts."""
    target = folder / run
    for experiment in experiments:
        source = stored_form.path_of(experiment, COMMITTED / run)
        place = stored_form.path_of(experiment, target)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    return target


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """A run with every artifact that tables are made of, and without the others."""
    out = tmp_path_factory.mktemp("results") / "synthetic"
    out.mkdir()
    test_tables.write_all(out, validate(compose([])))
    return out


@pytest.fixture(scope="module")
def written(synthetic):
    """Its page."""
    path = report.write([report.load(synthetic)], synthetic / report.NAME, "synthetic")
    return path.read_text(encoding="utf-8")


def test_the_page_is_whole_and_nothing_in_it_is_fetched(written):
    page = Page(written)
    assert page.open == [] and page.fetched == []
    assert "@import" not in written and not re.search(r"url\((?!#)", written)
    assert len(page.ids) == len(set(page.ids))
    assert set(page.labels) <= set(page.ids)


def test_headings_do_not_skip_a_level_and_every_heading_cell_has_a_scope(written):
    page = Page(written)
    assert page.levels[0] == 1 and page.levels.count(1) == 1
    assert all(then <= first + 1 for first, then in zip(page.levels, page.levels[1:]))
    assert page.tables > 20 and set(page.scopes) == {"col", "row"}


def test_the_page_has_every_claim_every_table_and_every_figure(written):
    text = re.sub(r"\s+", " ", " ".join(Page(written).text))
    for claim in claims():
        assert claim.text.replace("`", "").split("(")[0].strip()[:60] in text.replace(" )", ")"), claim.key
    for title in ("Table I:", "Table II:", "Table III:", "Table IV:", "Arguments and the prefix cache",
                  "Repair frontier", "Calibrated repair", "Layouts", "The prefix cache", "INT8 scan"):
        assert title in text, title
    for name in ("figure2", "figure3", "run-0-figure4", "run-0-figure5", "run-0-frontier"):
        assert f'<figure id="{name}">' in written
    assert written.count('role="img"') == written.count("</figure>") == 5


def test_the_page_says_what_the_run_lacks(synthetic, written):
    run = report.load(synthetic)
    assert {"dkl_sweep", "rope_boundary_gate"} <= set(run.lacking) and not set(run.lacking) & set(run.artifacts)
    assert ("<li><code>dkl_sweep</code>: not measured in this run; it would be made with <code>"
            ".venv/bin/python -m experiments.dkl_sweep ") in written
    assert "<p>Not drawn: <code>dkl_sweep</code> not measured in this run.</p>" in written


def test_each_artifact_has_its_command_commit_and_configuration(synthetic, written):
    run = report.load(synthetic)
    for name, artifact in run.artifacts.items():
        assert run.commands[name].startswith(f".venv/bin/python -m experiments.{name} ")
        assert artifact["config_sha256"][:12] in written


def test_equal_artifacts_give_equal_bytes_and_another_value_other_ones(tmp_path):
    folder = copied(tmp_path, "gating_nogo")
    first = report_page.render([report.load(folder)], "toy")
    assert report_page.render([report.load(folder)], "toy") == first
    path = folder / "gating_nogo.json"
    stored = json.loads(path.read_text())
    stored["rows"][0]["spearman_rho"]["value"] += 1e-3 * (stored["rows"][0]["spearman_rho"]["ci_high"]
                                                          - stored["rows"][0]["spearman_rho"]["value"])
    stored["rows"][0]["spearman_rho"]["ci_low"] -= 0.5
    path.write_text(json.dumps(stored))
    assert report_page.render([report.load(folder)], "toy") != first


def test_reasons_for_what_was_skipped_are_shown_and_escaped(tmp_path):
    folder = copied(tmp_path, "gating_nogo")
    (folder / run_folder.SKIPPED).write_text(json.dumps({"dkl_sweep": "no room for <2048> tokens"}))
    run = report.load(folder)
    assert run.lacking["dkl_sweep"] == "skipped: no room for <2048> tokens"
    drift = next(verdict for verdict in run.verdicts() if verdict.claim.key == "drift-query")
    assert drift.verdict == UNTESTED and drift.reason == "dkl_sweep: skipped: no room for <2048> tokens"
    text = report_page.render([run], "toy")
    assert "no room for &lt;2048&gt; tokens" in text and "<2048>" not in text


def test_a_broken_artifact_is_said_to_be_broken_and_the_rest_is_reported(tmp_path):
    folder = copied(tmp_path, "gating_nogo", "dkl_sweep")
    (folder / "dkl_sweep.json").write_text("{")
    run = report.load(folder)
    assert list(run.artifacts) == ["gating_nogo"]
    assert run.lacking["dkl_sweep"].startswith("not readable: dkl_sweep.json: not valid JSON")
    # Table I is made of whatever artifact it finds.
    (folder / "routing_accuracy_n250.json").write_text("{")
    text = report_page.render([report.load(folder)], "toy")
    assert "<h4>Table I</h4>\n<p>Not made: routing_accuracy_n250.json: not valid JSON" in text


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_reasons_of_another_form_are_an_error_that_names_the_file(tmp_path, text):
    folder = copied(tmp_path, "gating_nogo")
    (folder / run_folder.SKIPPED).write_text(text)
    with pytest.raises(report.ReportError, match="skipped.json: .*remove it"):
        report.load(folder)


def test_several_runs_have_a_tab_each_and_one_table_of_verdicts(tmp_path):
    runs = [report.load(copied(tmp_path, "gating_nogo")),
            report.load(copied(tmp_path, "calibration", run="qwen2.5-coder-1.5b"))]
    text = report_page.render(runs, "toys")
    page = Page(text)
    assert text.count('type="radio"') == 2 and text.count(" checked>") == 1
    assert "#tab-1:checked) > #run-1" in text and '<th scope="col">qwen2.5-coder-1.5b</th>' in text
    assert len(page.ids) == len(set(page.ids)) and page.open == []


def test_verdicts_are_a_table_in_markdown_and_latex_with_the_rule(tmp_path):
    run = report.load(copied(tmp_path, "gating_nogo"))
    first = [path.read_bytes() for path in report.write_verdicts(run)]
    assert [path.read_bytes() for path in report.write_verdicts(run)] == first
    text = first[0].decode()
    table, = (block for block in blocks(text) if isinstance(block, Table))
    assert [line[0] for line in table.lines] == [claim.text for claim in claims()]
    assert [line[4] for line in table.lines] == [verdict.verdict for verdict in run.verdicts()]
    assert all(f"- {rule}" in text for rule in RULE) and r"\begin{longtable}" in first[1].decode()


def test_a_run_without_any_artifact_is_refused(tmp_path):
    with pytest.raises(report.ReportError, match="no artifact to report; make some with: make repro"):
        report.load(tmp_path)
    with pytest.raises(report.ReportError, match="make repro PROFILE=full"):
        report.committed(tmp_path)


def test_committed_runs_are_those_of_models_with_the_full_profile_the_default_first(tmp_path):
    for name in ("smollm2-135m", "qwen2.5-coder-0.5b"):
        copied(tmp_path, "gating_nogo", run=name)
    for other in ("smollm2-135m.quick", "own-mine", "multirun"):
        shutil.copytree(tmp_path / "smollm2-135m", tmp_path / other)
    assert [run.name for run in report.committed(tmp_path)] == ["qwen2.5-coder-0.5b", "smollm2-135m"]


def test_a_command_composes_the_configuration_that_the_artifact_states(tmp_path):
    name = "qwen2.5-coder-1.5b"
    run = report.load(copied(tmp_path, "repair_frontier", "calibration", run=name))
    assert run.commands["repair_frontier"].endswith(f"experiments.repair_frontier model={name}")
    assert run.commands["calibration"].endswith(f"experiments.calibration model={name}")
    for experiment, stored in run.artifacts.items():
        python, dash, module, *overrides = run.commands[experiment].split()
        assert (python, dash, module) == (".venv/bin/python", "-m", f"experiments.{experiment}")
        assert validate(compose(overrides)).sha256(experiment) == stored["config_sha256"]
    assert run.commands["dkl_sweep"].endswith(f"experiments.dkl_sweep model={name} profile=full")


def test_a_command_says_when_no_configuration_fits_any_more(tmp_path):
    folder = copied(tmp_path, "gating_nogo")
    stored = json.loads((folder / "gating_nogo.json").read_text())
    stored["config"]["gating_nogo"]["n_cases"] += 1
    stored["config_sha256"] = stored_form.config_sha256(stored["config"])
    (folder / "gating_nogo.json").write_text(json.dumps(stored))
    assert report.load(folder).commands["gating_nogo"].endswith("   # the configuration has changed since")


def test_a_run_with_its_own_params_file_names_it(tmp_path):
    folder = copied(tmp_path, "gating_nogo")
    (folder / run_folder.PARAMS).write_text("")
    assert report.load(folder).commands["gating_nogo"] == (
        f".venv/bin/python -m nexus stage gating_nogo --params {folder / run_folder.PARAMS} --run smollm2-135m")


def test_the_report_needs_nothing_that_loads_a_model():
    needed = set(sources("experiments.report"))
    assert {"nexus/report.py", "nexus/report_page.py", "nexus/report.css", "nexus/claims.py"} <= needed
    assert not needed & {"nexus/runtime.py", "nexus/native.py", "nexus/splice.py", "nexus/encoder.py"}


def test_the_committed_report_is_about_the_committed_artifacts():
    path = COMMITTED / report.NAME
    assert path.is_file(), "results/report.html is missing; write it with: nexus report"
    text, runs = path.read_text(encoding="utf-8"), report.committed(COMMITTED)
    assert report_page.overview(runs, [run.verdicts() for run in runs]) in text, "write it again with: nexus report"
    assert report_page.STYLE.read_text(encoding="utf-8") in text
    for run in runs:
        assert [name for name, made in run.artifacts.items() if made["config_sha256"][:12] not in text] == []


def test_the_command_writes_the_page_of_a_run_and_prints_its_place(tmp_path, monkeypatch, capsys):
    folder = copied(tmp_path, "gating_nogo")
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / report.NAME}\n"
    assert (folder / report.NAME).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_the_command_refuses_a_folder_without_artifacts(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"nexus: {tmp_path}: no artifact to report; make some with: make repro\n"


def test_drawings_in_the_page_are_those_that_are_saved(written):
    drawn = figures.svg(diagrams.figure3())
    path = re.search(r'<path d="([^"]+)"', drawn[drawn.index("patch_2"):])[1]
    assert path in written
