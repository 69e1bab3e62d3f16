"""`nexus route`: what it prints for people and as JSON, and every error in one line; with the real MiniLM."""
from __future__ import annotations

import json

import numpy as np
import pytest
import routing_artifacts

from nexus import artifact, cli, config, listing, route_command
from nexus.collect import Collected, Failure
from nexus.config import ROOT
from nexus.registry import Tool
from nexus.route import SYSTEMS
from nexus.routing_setup import RoutingSetup

TOOLS = {"create_issue": "Open a new issue in a repository, with a title and a body.",
         "list_branches": "List the branches of a repository.",
         "get_weather": "Current weather and forecast of a city.",
         "send_email": "Send an e-mail [to] somebody [/soon], in \n your name and with an attachment if you want.",
         "play_music": "", "convert_currency": "Convert an amount of money from one currency to another."}
ENTRIES = [{"server": "home" if name != "play_music" else "stage", "name": name, "description": text, "inputSchema": {}}
           for name, text in TOOLS.items()]
QUERY = "What will the weather in Lisbon be like tomorrow?"


class Backwards:
    """A cross-encoder that prefers what comes last."""

    def score(self, query, documents):
        return np.arange(len(documents), dtype=np.float32)


@pytest.fixture
def registry(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(ENTRIES))
    return path


@pytest.fixture
def nexus(capsys, monkeypatch, tmp_path):
    """A function that runs `nexus route`; (status, output, errors). Results are in a folder of the test's own."""
    compose = config.compose
    monkeypatch.setattr(config, "compose", lambda: compose([
        f"results_folder={tmp_path / 'results'}", "routing.system=hybrid+gate"]))
    monkeypatch.delenv("NEXUS_DEBUG", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        capsys.readouterr()
        status = cli.main(["route", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """A stored calibration in which every gate fires, and the cross-encoder's stand-in."""
    monkeypatch.setattr(RoutingSetup, "cross_encoder", Backwards())
    cfg = config.validate(config.compose())
    rows = routing_artifacts.calibration()["rows"]
    for row in rows:
        if row["kind"] == "gate":
            row["threshold"] = 0.9
    artifact.write(ROOT / cfg.results_folder / cfg.run_name / "calibration.json", experiment="calibration",
                   tuple_={"model": "m", "model_sha256": "0" * 64, "embedder": "minilm", "llama_cpp": "b1"},
                   config=cfg.resolved("calibration"), rows=rows, samples=[{"n": 1}],
                   provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                               "versions": {}})


@pytest.mark.integration
def test_a_table_for_people(nexus, registry):
    status, out, err = nexus(QUERY, "--registry", registry, "--system", "hybrid", "--top", 3)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines if line.startswith("│")]
    assert len(rows) == 3 and [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[0][1:3] == ["home", "get_weather"] and rows[0][4] == TOOLS["get_weather"]
    assert float(rows[0][3]) >= float(rows[1][3]) and "cross-encoder" not in out
    assert lines[-1].startswith("hybrid over 6 tools: margin 0.0") and ", no gate; " in lines[-1]
    assert " ms, of which the scan " in lines[-1] and " µs (loading: " in lines[-1]


@pytest.mark.integration
def test_brackets_in_a_description_are_no_markup_and_long_ones_are_cut(nexus, registry):
    status, out, _ = nexus("Send an e-mail to Ann", "--registry", registry, "--system", "slb")
    assert status == 0 and "│ Send an e-mail [to] somebody [/soon], in your name and with …" in out


@pytest.mark.integration
def test_a_long_name_is_whole_in_a_narrow_terminal(nexus, registry, monkeypatch):
    name = "list_repository_security_advisories_of_an_org"
    registry.write_text(json.dumps([*ENTRIES, {"name": name, "description": "Known flaws. " * 9, "inputSchema": {}}]))
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = nexus("known flaws", "--registry", registry, "--system", "slb", "--top", 1)
    lines = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert "".join(cells[3].strip() for cells in lines) == name


@pytest.mark.integration
def test_json_for_programs(nexus, registry):
    status, out, err = nexus(QUERY, "--registry", registry, "--system", "slb", "--json", "--top", 2)
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert list(answer) == ["system", "margin", "gate_fired", "abstained", "scan_us", "total_ms", "candidates"]
    assert (answer["system"], answer["gate_fired"], answer["abstained"]) == ("slb", False, False)
    first, second = answer["candidates"]
    assert (first["server"], first["name"], first["cross_score"]) == ("home", "get_weather", None)
    assert answer["margin"] == pytest.approx(first["score"] - second["score"]) and answer["scan_us"] > 0
    assert answer["total_ms"] * 1e3 > answer["scan_us"]


@pytest.mark.integration
def test_a_lexical_system_may_find_nothing(nexus, registry):
    assert nexus("Quo vadis", "--registry", registry, "--system", "bm25") == (
        0, "no tool of 6 shares anything with the query\n", "")
    answer = json.loads(nexus("Quo vadis", "--registry", registry, "--system", "bm25", "--json")[1])
    assert answer["candidates"] == [] and answer["margin"] is None and answer["scan_us"] is None


@pytest.mark.integration
def test_a_gate_shows_what_the_cross_encoder_thought(nexus, registry, calibrated):
    status, out, _ = nexus(QUERY, "--registry", registry)
    assert status == 0 and "cross-encoder" in out and "│ 2.00 " in out
    assert "hybrid+gate over 6 tools: margin 0.0" in out and "τ 0.9000, the gate fired; " in out
    answer = json.loads(nexus(QUERY, "--registry", registry, "--json")[1])
    assert answer["system"] == "hybrid+gate" and answer["gate_fired"]
    # Three are asked about, from the last to the first.
    assert [candidate["cross_score"] for candidate in answer["candidates"]] == [2, 1, 0, None, None]
    assert answer["candidates"][2]["name"] == "get_weather"


@pytest.mark.integration
def test_where_no_tool_fits_it_says_so_and_still_shows_the_nearest(nexus, registry, calibrated):
    _, out, _ = nexus("Good morning! Slept well?", "--registry", registry, "--system", "slb+gate")
    assert "Probably no tool fits: the nearest has a cosine of 0." in out and "home" in out
    assert json.loads(nexus("Good morning!", "--registry", registry, "--json")[1])["abstained"]
    assert "Probably no tool fits" not in nexus(QUERY, "--registry", registry)[1]


@pytest.mark.integration
def test_entries_that_are_no_tools_are_told(nexus, registry):
    registry.write_text(json.dumps([*ENTRIES, {"name": 3}]))
    status, out, err = nexus(QUERY, "--registry", registry, "--system", "slb", "--json")
    assert status == 0 and json.loads(out)["candidates"] and err.startswith("nexus: left out entry 6 (no name): ")


@pytest.mark.integration
@pytest.mark.parametrize(("tool", "times"), [("odd_tool", 1), (None, 2)])
def test_without_a_file_servers_are_collected_once_unless_one_is_missing(nexus, monkeypatch, tmp_path, tool, times):
    monkeypatch.setattr(listing, "LISTINGS", tmp_path / "listings")
    asked = []

    def collect(spec):
        asked.append(spec.name)
        return Collected([Tool(entry["server"], entry["name"], entry["description"], {}) for entry in ENTRIES],
                         [Failure("slow", tool, "it said nothing", "give it more time")])

    monkeypatch.setattr(route_command, "collect", collect)
    for _ in range(2):
        status, out, err = nexus(QUERY, "--system", "slb", "--json")
        assert status == 0 and json.loads(out)["candidates"][0]["name"] == "get_weather"
        assert ("left out slow" in err) == ("is collected from" in err)
    assert asked == ["servers"] * times and ("not kept" in err) == (tool is None)


def failing(nexus, *arguments):
    """The one line of an error."""
    status, out, err = nexus(*arguments)
    assert status == 1 and out == "" and err.startswith("nexus: ") and len(err.splitlines()) == 1
    assert "Traceback" not in err
    return err


def test_an_unknown_system_is_one_line(nexus, registry):
    assert failing(nexus, QUERY, "--registry", registry, "--system", "hybird") == (
        f"nexus: --system hybird is unknown; use one of {', '.join(SYSTEMS)}\n")


@pytest.mark.parametrize(("query", "said"), [
    ("", "the query is blank; say what the tool shall do"), (" \n", "the query is blank; say what the tool shall do"),
    ("caf\udce9", "the query is not UTF-8 at character 4; give it in UTF-8")])
def test_a_query_that_says_nothing_is_one_line(nexus, registry, query, said):
    assert failing(nexus, query, "--registry", registry, "--system", "slb") == f"nexus: {said}\n"


def test_the_name_of_an_entry_that_is_left_out_does_not_move_a_terminals_cursor(nexus, tmp_path):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps([*ENTRIES, {"name": "wipe\x1b[2J\n"}]))
    status, _, err = nexus(QUERY, "--registry", path, "--system", "bm25")
    assert status == 0 and err.startswith("nexus: left out entry 6 (wipe\ufffd[2J\ufffd): ") and err.count("\n") == 1


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file or directory"), ("[]", "the list of tools is empty; give at least one tool"),
    ('{"tools": []}', "the list of tools is empty"), ("", "the file is empty"),
    ('[{"name": 1}]', "none of the 1 entries"),
    (json.dumps(ENTRIES[:1] * 2), "entries 0 and 1 are both tool 'create_issue' of server 'home'")])
def test_a_file_that_is_no_registry_is_one_line(nexus, tmp_path, content, message):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    said = failing(nexus, QUERY, "--registry", path)
    assert str(path) in said and message in said


@pytest.mark.integration
def test_a_gate_without_a_calibration_names_the_command(nexus, registry):
    said = failing(nexus, QUERY, "--registry", registry, "--system", "slb+gate")
    assert "calibration.json is missing; make it with: .venv/bin/python -m experiments.calibration" in said


@pytest.mark.parametrize("top", ["0", "-1", "x", "1.5", pytest.param("9" * 5000, id="huge")])
def test_how_many_is_a_number_from_one_on(nexus, top, capsys):
    with pytest.raises(SystemExit) as end:
        nexus(QUERY, "--top", top)
    assert end.value.code == 2
    assert f"argument --top: {top} is not a number from 1 on" in capsys.readouterr().err


def test_control_characters_of_a_listing_do_not_reach_the_terminal():
    assert route_command._cell("a\x1b[31m\u202eb 按").plain == "a\ufffd[31m\ufffdb 按"
