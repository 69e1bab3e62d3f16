"""Routing tables from synthetic artifacts: known numbers in known cells, bars worded right, the same bytes twice."""
from __future__ import annotations

import copy
import json

import pytest
import routing_artifacts as synthetic
import test_tables
from experiments import tables as experiment
from nexus import routing_tables, tables
from nexus.config import compose, validate
from test_tables import parsed

PUBLISHED = tables.published()
DEFAULT = synthetic.DEFAULT


def table4(made=None, calibration=None, latency=None):
    return routing_tables.table4(made or synthetic.accuracy(), calibration or synthetic.calibration(),
                                 latency or synthetic.latency(), PUBLISHED)


def default_row(made, n_tools=250):
    row, = tables.at(made["rows"], system=DEFAULT, n_tools=n_tools)
    return row


RENDERED = {"table4": table4,
            "generalisation": lambda: routing_tables.generalisation(synthetic.generalisation()),
            "scan": lambda: routing_tables.scan(synthetic.latency())}


@pytest.mark.parametrize("name", RENDERED)
def test_a_table_is_the_same_twice_and_well_formed(name):
    text = RENDERED[name]()
    assert RENDERED[name]() == text and text.endswith("\n")
    assert all(parsed(text)) and "95 %" in text and "synthetic" in text and "None" not in text


@pytest.mark.parametrize("name", synthetic.MAKERS)
def test_rendering_leaves_the_artifacts_alone(name):
    made = {each: make() for each, make in synthetic.MAKERS.items()}
    before = copy.deepcopy(made)
    routing_tables.table4(made["routing_accuracy_n250"], made["calibration"], made["slb_latency"], PUBLISHED)
    routing_tables.generalisation(made["routing_generalisation"])
    routing_tables.scan(made["slb_latency"])
    assert made[name] == before[name]


def test_the_synthetic_artifacts_have_the_form_that_experiments_write(tmp_path):
    cfg = validate(compose([f"routing.system={DEFAULT}"]))
    synthetic.write(tmp_path, cfg)
    for name, make in synthetic.MAKERS.items():
        assert tables.stored(cfg, tmp_path, name)["rows"] == json.loads(json.dumps(make()["rows"]))


def test_published_numbers_stand_beside_both_measured_systems():
    beside, *_ = parsed(table4())
    lines = {row[""]: row for row in beside}
    assert lines["accuracy at N = 250, %"] == {
        "": "accuracy at N = 250, %", "published": "89.0", "`slb+gate`, measured": "87.0 [79.0, 92.2]",
        f"`{DEFAULT}`, measured": "94.0 [87.5, 97.2]", "n": "100"}
    assert [lines[f"accuracy at N = {n}, %"]["published"] for n in (10, 50, 100)] == ["92.0", "90.0", "89.0"]
    recall = lines["recall@1 of the retriever at N = 250, %"]
    assert recall["published"] == "74 [64.6, 81.6]" and recall["`slb+gate`, measured"].startswith("70.0 [")
    assert lines["recall@3 of the retriever at N = 250, %"]["published"] == "95 [88.8, 97.8]"
    scan = lines["scan inside a route, µs"]
    assert scan["published"] == "17.6" and scan[f"`{DEFAULT}`, measured"] == "9.00 [8.55, 9.45]"
    # The published size alone, at every length of a vector.
    alone = {what: row for what, row in lines.items() if what.endswith("alone, µs")}
    assert list(alone) == ["scan of 250 × 384, alone, µs", "scan of 250 × 768, alone, µs"]
    assert alone["scan of 250 × 384, alone, µs"]["published"] == "8.25"
    assert alone["scan of 250 × 384, alone, µs"]["`slb+gate`, measured"].startswith("8.80 [")
    assert (lines["τ"]["published"], lines["τ"]["`slb+gate`, measured"], lines["τ"][f"`{DEFAULT}`, measured"]) == (
        "0.0136", "0.0136 [0.00816, 0.0190]", "0.00136 [0.000816, 0.00190]")
    fires = lines["fire rate on other queries than τ's, %"]
    assert fires["published"] == "20.8" and fires["`slb+gate`, measured"].startswith("10.0 [")
    assert fires[f"`{DEFAULT}`, measured"].startswith("20.0 ["), "of the development queries, not of the adversarial"


def test_all_schemas_in_the_prompt_overflow_with_their_tokens():
    _, fits, *_ = parsed(table4())
    assert [(row["N"], row["published"]) for row in fits] == [
        ("10", "98.0"), ("50", "overflow"), ("100", "overflow"), ("250", "overflow")]
    assert fits[0]["measured"].startswith("97.0 [")
    assert fits[3]["measured"] == "overflow (45000 (identical-samples) tokens)"


def test_every_system_is_there_at_every_size_and_an_overflow_is_no_zero():
    every = next(rows for rows in parsed(table4()) if "N" in rows[0] and "system" in rows[0])
    systems = [f"`{system}`" for system in (*synthetic.ROUTED, *synthetic.BASELINES)]
    assert [(row["N"], row["system"]) for row in every] == [(str(n), system) for n in synthetic.SIZES
                                                            for system in systems]
    lines = {(row["N"], row["system"]): row for row in every}
    over = lines["250", "`concat_all`"]
    assert over["accuracy"] == "overflow" and over["prompt, tokens"].startswith("45000") and over["n"] == "100"
    assert {over[column] for column in ("own words", "paraphrased", "recall@1", "recall@3", "gate fires", "scan, µs",
                                        "choice, ms")} == {tables.MISSING}
    first = lines["10", f"`{DEFAULT}`"]
    assert first["accuracy"].startswith("96.0 [") and first["paraphrased"].startswith("92.0 [")
    assert first["gate fires"].startswith("23.0 [") and first["prompt, tokens"].startswith("0 (")
    assert lines["10", "`bm25`"]["scan, µs"] == lines["10", "`rag_mcp`"]["scan, µs"] == tables.MISSING


@pytest.mark.parametrize(("right", "word"), [(94, "met"), (89, "met"), (88, "missed")])
def test_the_bar_on_accuracy(right, word):
    made = synthetic.accuracy()
    default_row(made)["accuracy"] = synthetic.share(right / 100)
    assert f"`{DEFAULT}` is right on {right}.0 [" in table4(made)
    assert f"the bar of 89 % is {word}." in table4(made)


@pytest.mark.parametrize(("fall", "word"), [(0.01, "kept"), (-0.03, "kept"), (-0.04, "exceeded")])
def test_the_bar_on_the_fall(fall, word):
    made = synthetic.accuracy()
    default_row(made)["accuracy_minus_fewest"] = synthetic.paired(fall)
    assert f"From the fewest tools to 250 accuracy changes by {100 * fall:.2f} [" in table4(made)
    assert f"a fall of at most 3 is {word}." in table4(made)


@pytest.mark.parametrize(("difference", "p", "verdict"), [
    (0.2, 0.001, "better"), (0.2, 0.05, "not shown to be better"), (-0.2, 0.001, "not shown to be better")])
@pytest.mark.parametrize(("rival", "named"), [("slb", "plain dense retrieval"), ("rag_mcp", "`rag_mcp`")])
def test_a_rival_is_beaten_by_a_significant_positive_difference(rival, named, difference, p, verdict):
    made = synthetic.accuracy()
    default_row(made).update({f"accuracy_minus_{rival}": synthetic.paired(difference), f"mcnemar_p_{rival}": p})
    line, = (line for line in table4(made).splitlines() if line.startswith(f"- Against {named}"))
    assert f"{100 * difference:.1f} [" in line and f"p = {tables.number(p)}: {verdict}." in line


def test_a_rival_that_was_not_measured_is_not_judged():
    made = synthetic.accuracy()
    default_row(made).update(accuracy_minus_rag_mcp=None, mcnemar_p_rag_mcp=None)
    assert "Against `rag_mcp`" not in table4(made) and "Against plain dense retrieval" in table4(made)


def test_a_smaller_registry_has_no_verdict_and_no_measured_numbers_at_250():
    text = table4(synthetic.accuracy(sizes=(10, 50)))
    assert f"`{DEFAULT}` was not measured at N = 250." in text and "the bar of" not in text
    beside, fits, *_ = parsed(text)
    assert [row[f"`{DEFAULT}`, measured"] for row in beside if "250, %" in row[""]] == [tables.MISSING] * 3
    assert [row["measured"] for row in fits][2:] == [tables.MISSING] * 2


def test_the_configured_default_is_what_is_judged():
    text = table4(synthetic.accuracy(default="hybrid"))
    assert "`hybrid` is right on 83.0 [" in text and "the bar of 89 % is missed." in text
    assert "`hybrid`, measured" in text


def test_the_gate_and_the_chosen_abstention_threshold():
    *_, gate, abstention = parsed(table4())
    assert [(row["system"], row["queries"]) for row in gate] == [
        (f"`{system}`", which) for system in ("slb+gate", DEFAULT) for which in ("adversarial", "development")]
    assert gate[0]["fires, %"].startswith("20.0 [") and gate[0]["n"] == "60"
    assert gate[0]["wrong above τ, %"].startswith("10.4 [") and gate[0]["wrong below τ, %"].startswith("50.0 [")
    assert [row["cosine"] for row in abstention] == ["0.360", "0.360"], "one line per system: the chosen threshold"
    assert abstention[0]["refused of the unanswerable, %"].startswith("70.0 [") and abstention[0]["n"] == "10 / 90"


def test_generalisation_has_every_set_and_system():
    made = synthetic.generalisation()
    table, = parsed(routing_tables.generalisation(made))
    assert [(row["set"], row["system"]) for row in table] == [
        (row["set"], f"`{row['system']}`") for row in made["rows"]]
    lines = {(row["set"], row["system"]): row for row in table}
    plain, ours = lines["bfcl", "`hybrid`"], lines["bfcl", f"`{DEFAULT}`"]
    assert plain["recall@1 minus hybrid"] == plain["p"] == plain["gate fires"] == tables.MISSING
    assert ours["recall@1 minus hybrid"] == "11.0 [6.00, 16.0]" and ours["p"] == "0.0300" and ours["n"] == "400"
    assert [ours[f"recall@{k}"].split(" ")[0] for k in (1, 3, 5)] == ["96.0", "100", "100"]


def test_the_scan_shows_its_share_of_the_ceiling_and_who_is_exact():
    table, = parsed(routing_tables.scan(synthetic.latency()))
    assert len(table) == len(synthetic.latency()["rows"])
    lines = {(row["vectors"], row["dim"], row["implementation"], row["instructions"]): row for row in table}
    ours = lines["250", "384", "`nexus`", "avx512vnni"]
    assert ours["of the ceiling, %"] == "75.0 [67.5, 82.5]", "stored in percent already"
    assert ours["p50, µs"] == "4.80 [4.56, 5.04]" and ours["exact"] == "yes" and ours["n"] == "400"
    assert ours["numkong / ours"] == "2.00 [1.90, 2.10]" and ours["faiss / ours"] == tables.MISSING
    assert lines["250", "384", "`usearch`", "auto"]["exact"] == "no"
    absent, ceiling = lines["250", "384", "`faiss`", "auto"], lines["250", "384", "`ceiling`", "avx512vnni"]
    assert {absent[column] for column in ("p50, µs", "p99, µs", "exact", "n")} == {tables.MISSING}
    assert ceiling["exact"] == ceiling["recall@1 to float32, %"] == tables.MISSING


def test_the_experiment_writes_the_routing_tables_and_the_same_bytes_twice(tmp_path):
    cfg = validate(compose([f"routing.system={DEFAULT}"]))
    test_tables.write_all(tmp_path, cfg)
    synthetic.write(tmp_path, cfg)
    folder = experiment.run(cfg, tmp_path)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {f"{name}.md" for name in RENDERED} <= set(first)
    assert f"`{cfg.routing.system}` is right on ".encode() in first["table4.md"]
    experiment.run(cfg, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


@pytest.mark.parametrize("name", synthetic.MAKERS)
def test_every_routing_artifact_is_needed(tmp_path, name):
    cfg = validate(compose([f"routing.system={DEFAULT}"]))
    test_tables.write_all(tmp_path, cfg)
    synthetic.write(tmp_path, cfg)
    (tmp_path / f"{name}.json").unlink()
    with pytest.raises(tables.MissingArtifact, match=f"{name}.json is missing; make it with: .*experiments.{name} "):
        experiment.run(cfg, tmp_path)
    assert not (tmp_path / "tables").exists()


def test_the_choice_of_the_default_is_told_best_first():
    text = table4()
    part = text.partition("## What the default was chosen by")[2].partition("##")[0]
    told = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| `")]
    assert [name.strip() for name, _ in told] == [f"`{DEFAULT}` (default)", "`slb`"]
    assert told[0][1].strip().startswith("70.0 [") and told[1][1].strip().startswith("50.0 [")


def test_the_scans_bars_go_by_the_fastest_kernel_and_the_nearest_peer():
    text = routing_tables.scan(synthetic.latency())
    assert ("- 250 × 384: 2.00 [1.90, 2.10] times as fast as the nearest peer (numkong), at least 1.5 times as fast: "
            "yes") in text
    assert "- 100000 × 384: 2.00 [1.90, 2.10] times as fast as the nearest peer (numkong), not slower" in text
    slow = synthetic.latency()
    for row in slow["rows"]:
        if row["impl"] == "nexus" and row["n_vectors"] == 100_000:
            row["speedup_vs_numkong"] = {**row["speedup_vs_numkong"], "value": 1.02, "ci_low": 0.97, "ci_high": 1.1}
    assert "- 100000 × 384: 1.02 [0.970, 1.10] times as fast as the nearest peer (numkong), not slower, by the lower " \
           "bound: NO" in routing_tables.scan(slow)


@pytest.mark.parametrize(("difference", "p", "verdict"), [(0.1, 0.01, "better"), (-0.1, 0.01, "worse"),
                                                          (-0.1, 0.2, "no different")])
def test_whether_the_default_is_worse_on_public_sets_goes_by_the_paired_test(difference, p, verdict):
    made = synthetic.generalisation()
    for row in made["rows"]:
        if row["system"] == DEFAULT:
            row["top1_minus_hybrid"] = {**row["top1_minus_hybrid"], "value": difference}
            row["mcnemar_p_hybrid"] = p
    text = routing_tables.generalisation(made)
    assert text.count(f": {verdict}.") == 2 and f"`{DEFAULT}`" in text
