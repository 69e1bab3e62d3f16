"""Tables from synthetic artifacts: known numbers in known cells, what is missing, and the same bytes twice."""
from __future__ import annotations

import copy

import argument_artifacts
import pytest
import repair_artifacts as synthetic
import routing_artifacts
from experiments import tables as experiment
from nexus import artifact, tables
from nexus.config import compose, validate

PUBLISHED = tables.published()
RENDERED = {
    "table2": (synthetic.gating, lambda made: tables.table2(made, PUBLISHED)),
    "table3": (synthetic.ttft, lambda made: tables.table3(made, PUBLISHED)),
    "frontier": (synthetic.frontier, tables.frontier),
    "repair_policy": (synthetic.policy, tables.repair_policy),
    "layouts": (synthetic.layouts, tables.layouts),
}


def parsed(text):
    """The Markdown tables in `text`, each a list of rows, each a dict by column; columns of one name count up."""
    found, columns = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = None
        elif columns is None:
            names = split(line)
            columns = [f"{name}{names[:i].count(name) + 1 if name in names[:i] else ''}"
                       for i, name in enumerate(names)]
            found.append([])
        elif set(line) - set("|-"):
            cells = split(line)
            assert len(cells) == len(columns)
            found[-1].append(dict(zip(columns, cells)))
    return found


def split(line):
    return [cell.strip().replace("\0", "|") for cell in line.replace("\\|", "\0").strip("|").split("|")]


@pytest.mark.parametrize("name", RENDERED)
def test_a_table_is_the_same_twice_leaves_its_artifact_alone_and_is_well_formed(name):
    make, render = RENDERED[name]
    made = make()
    before = copy.deepcopy(made)
    text = render(made)
    assert render(made) == text and made == before and text.endswith("\n")
    assert all(parsed(text))
    assert f"`{made['experiment']}.json`" in text and "95 %" in text and "| n" in text and "synthetic" in text


@pytest.mark.parametrize("name", RENDERED)
def test_one_row_is_enough(name):
    make, render = RENDERED[name]
    made = make()
    made["rows"] = made["rows"][:1]
    assert parsed(render(made))


@pytest.mark.parametrize("name", RENDERED)
def test_null_metrics_are_shown_as_not_measured(name):
    make, render = RENDERED[name]
    made = make()
    for row in made["rows"]:
        for key in [key for key, metric in row.items() if isinstance(metric, dict)]:
            row[key] = None
    text = render(made)
    assert tables.MISSING in text and "no intervals (none)" in text and "None " not in text.replace("None was", "")


@pytest.mark.parametrize("make", [synthetic.gating, synthetic.ttft, synthetic.frontier])
def test_the_level_is_the_artifacts(make):
    text = tables.heading("t", make(level=0.8))
    assert "80 % intervals" in text and "95" not in text


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (0.0, "0"), (1.0, "1.00"), (207.1, "207"), (99.97, "100"), (97.84, "97.8"), (-0.1, "-0.100"),
    (0.0123456, "0.0123"), (12345.6, "12346"), (3.2e-7, "3.20e-07")])
def test_numbers(value, text):
    assert tables.number(value) == text


def test_cells():
    assert tables.cell(synthetic.metric(2.0, 0.5)) == "2.00 [1.00, 3.00]"
    assert tables.cell(synthetic.metric(0.25, 0.2), 100) == "25.0 [20.0, 30.0]"
    assert tables.cell(synthetic.metric(0.0, 0)) == "0 (identical-samples)"
    assert tables.cell(None) == tables.cell({**synthetic.metric(1.0), "value": None}) == tables.MISSING


def test_counts_name_every_n_where_they_differ():
    five, ten = synthetic.metric(1.0, n=5), synthetic.metric(1.0, n=10)
    assert tables.counts(ten, ten) == "10"
    assert tables.counts(ten, ten, five) == "10 / 10 / 5"
    assert tables.counts(ten, None) == "10 / –"
    assert tables.counts(None) == "–" and tables.counts() == ""


def test_pipes_and_line_breaks_stay_in_their_cell():
    assert tables.markdown(["a|b"], [["c\nd | e"]]) == "| a\\|b |\n|---|\n| c d \\| e |\n"


def test_the_front_has_what_nothing_beats():
    def row(name, speedup, dkl):
        return {"arm": name, "speedup": synthetic.metric(speedup), "dkl_nats": synthetic.metric(dkl)}

    rows = [row("slow", 1.0, 0.0), row("beaten", 2.0, 0.3), row("good", 3.0, 0.2), row("as fast, further", 3.0, 0.25),
            row("fast", 9.0, 0.9), row("as far, slower", 8.0, 0.9), {**row("untimed", 1, 0), "speedup": None}]
    assert [row["arm"] for row in tables.front(rows)] == ["slow", "good", "fast"]
    assert tables.front([]) == []


def test_table_2_sets_the_published_numbers_beside_the_measured():
    text = tables.table2(synthetic.gating(), PUBLISHED)
    paper, others, within = parsed(text)
    assert [row["n_past, tokens"] for row in paper] == ["256", "256", "1024", "1024", "2048", "2048"]
    assert paper[0] == {
        "n_past, tokens": "256", "context": "on", "max drift, published": "207", "measured": "20.0 [18.0, 22.0]",
        "mean drift, published": "105", "measured2": "9.00 [8.10, 9.90]", "Spearman ρ, published": "0.147",
        "measured3": "0.300 [0.240, 0.360]",
        "ρ within layers": "0.0500 [0.0450, 0.0550]", "n": "10 / 10 / 10 / 9"}
    assert "published 0.193, measured 0.300. Target: 0.4." in text
    assert [row["predictor"] for row in others] == ["`sink_key_norm`", "`block_key_norm`"]
    assert others[1]["n_past 2048, context off"] == "0.200 [0.180, 0.220]"
    assert [row["predictor"] for row in within] == [row["predictor"] for row in others]
    assert {row["n_past 2048, context off"] for row in within} == {"0.0500 [0.0450, 0.0550]"}


def test_table_2_leaves_out_what_an_older_artifact_has_not():
    made = synthetic.gating()
    for row in made["rows"]:
        del row["spearman_rho_within_layer"]
    assert {row["ρ within layers"] for row in parsed(tables.table2(made, PUBLISHED))[0]} == {tables.MISSING}


def test_table_2_means_the_measured_rows_alone():
    made = synthetic.gating({"context_k_variance": (0.3, 0.2)})
    made["rows"] = made["rows"][:2]
    made["rows"][0]["spearman_rho"], made["rows"][1]["spearman_rho"] = synthetic.metric(0.1), synthetic.metric(0.4)
    text = tables.table2(made, PUBLISHED)
    assert "measured 0.250" in text and "None was measured." in text
    assert parsed(text)[0][-1]["measured"] == tables.MISSING


@pytest.mark.parametrize(("rhos", "said"), [
    ({"context_k_variance": (0.3, 0.2), "a": (0.5, 0.3)}, "No predictor's lower bound reaches ρ = 0.4; the highest is "
     "0.350, of `a` (n_past 256, context on)."),
    ({"context_k_variance": (0.3, 0.2), "a": (0.5, 0.2)}, "The lower bound reaches ρ = 0.4 for `a` (6 of 6 rows)."),
    ({"context_k_variance": (0.9, 0)}, "No predictor has an interval"),
])
def test_table_2_says_whether_a_lower_bound_reaches_the_target(rhos, said):
    assert said in tables.table2(synthetic.gating(rhos), PUBLISHED)


def test_table_3_sets_the_published_numbers_beside_both_protocols():
    schedule, others = parsed(tables.table3(synthetic.ttft(), PUBLISHED))
    assert [(row["K"], row["n_past, tokens"]) for row in schedule] == [
        (curve, n_past) for curve in ("4", "16") for n_past in ("256", "512", "1024", "2048")]
    row = schedule[1]
    assert (row["R, % of block"], row["speed-up, published"]) == ("36.7", "1.24 [1.23, 1.25]")
    assert row["cold speed-up"].startswith("1.20 [") and row["warm speed-up"].startswith("2.26 [")
    assert row["KL query, nats"].startswith("0.0109 [") and row["KL block end, nats"].startswith("0.0218 [")
    assert (row["top-1 query, %"], row["top-1 block end, %"]) == ("90.0 [70.0, 100]", "80.0 [60.0, 90.0]")
    assert row["warm latency / ideal"] == "1.05 [1.02, 1.08]" and row["n (cold / warm / KL)"] == "15 / 15 / 10"
    assert {row["arm"] for row in others} == {"`none`", "`head-4`", "`head-10%`", "`engine-shift`", "`group-cache`",
                                              "`prefix-reuse`"}
    assert {row["protocol"] for row in others if row["arm"] == "`prefix-reuse`"} == {"cold"}


def test_table_3_of_one_protocol_and_of_a_depth_that_was_not_published():
    made = synthetic.artifact("deep_splice_ttft", [synthetic.ttft_row("suffix-R(n)", 64, "cold", 2.0, 0.5, 4.0, 5.0)])
    text = tables.table3(made, PUBLISHED)
    row = parsed(text)[0][-1]
    assert (row["n_past, tokens"], row["speed-up, published"], row["warm speed-up"]) == ("64", "–", "–")
    assert row["KL query, nats"] == "0.500 [0.300, 0.700]" and "None was measured." in text


def test_the_frontier_names_the_best_cheap_arm_and_the_bars():
    best, _, everything = parsed(tables.frontier(synthetic.frontier()))
    assert [row["n_past, tokens"] for row in best] == ["256", "512", "1024", "2048"]
    assert best[0] == {
        "n_past, tokens": "256", "arm": "`head`", "share, %": "10", "compiled behind": "ensemble-4x1000",
        "KL, nats": "0.00195 [0.000973, 0.00292]", "top-1, %": "90.0 [70.0, 100]", "speed-up": "4.76 [4.52, 5.00]",
        "noise floor, nats": "0.00150 [0.000750, 0.00225]", "mean KL ≤ 0.02 nats": "holds", "speed-up ≥ 4": "holds",
        "n (KL / time)": "12"}
    assert len(everything) == len(synthetic.frontier()["rows"]) / 2, "one probe"
    assert not [row for row in everything if row["on the front"] and row["arm"] in ("`oracle`", "`noise_floor`")]


def test_the_frontier_says_which_arms_take_longer_than_their_tokens_should():
    made = synthetic.frontier()
    within = tables.frontier(made)
    arms = {(row["arm"], row["recompute_pct"], row["compiled_behind"]) for row in made["rows"]
            if row["arm"] != "noise_floor"}
    timed = [row for row in made["rows"] if row["probe"] == "query" and row["arm"] != "noise_floor"]
    assert f"{len(arms)} of {len(arms)} arms keep to 1.3. Depth by depth, 0 of {len(timed)} cells are above" in within
    for row in made["rows"]:
        if row["arm"] == "blend":
            row["latency_per_ideal_all_depths"] = synthetic.metric(1.4 + row["recompute_pct"] / 1000, 0.01, 48)
        if row["arm"] == "none":
            row["latency_per_ideal_all_depths"] = synthetic.metric(1.31, 0.05, 48)
    blends = {row["recompute_pct"] for row in made["rows"] if row["arm"] == "blend"}
    _, slowest, _ = parsed(tables.frontier(made))
    assert [row["arm"] for row in slowest][:len(blends)] == ["`blend`"] * len(blends)
    assert slowest[0]["share, %"] == f"{max(blends):.3g}" and slowest[0]["≤ 1.3"] == "fails"
    assert {row["≤ 1.3"] for row in slowest if row["arm"] == "`none`"} <= {"fails, interval crosses"}


def test_an_older_frontier_without_pooled_latencies_says_so():
    made = synthetic.frontier()
    for row in made["rows"]:
        del row["latency_per_ideal_all_depths"]
    assert "## Latency against the token-count ideal\n\nNone was timed." in tables.frontier(made)


def test_cold_trials_decide_where_no_left_out_trial_crosses_one():
    rows = [synthetic.ttft_row("suffix-R(n)", n_past, "cold", speedup, 0.1, 4.0, 5.0)
            for n_past, speedup in ((256, 1.6), (512, 1.0), (1024, 0.9))]
    text = tables.table3(synthetic.artifact("deep_splice_ttft", rows), PUBLISHED)
    assert "In 2 of 3 cold cells no single trial decides" in text
    assert parsed(text)[0][0]["cold, one trial left out"] == "1.58 to 1.63"
    for row in rows:
        row["speedup_without_one_low"] = row["speedup_without_one_high"] = None
    text = tables.table3(synthetic.artifact("deep_splice_ttft", rows), PUBLISHED)
    assert "No cell has enough cold trials to leave one out." in text


def test_controls_and_dear_arms_are_never_the_best():
    rows = [synthetic.repair_row("oracle", 5.0, 256, 0.001, 9.0), synthetic.repair_row("head", 10.5, 256, 0.001, 9.0),
            synthetic.repair_row("noise_floor", 0.0, 256, 0.0, 1.0),
            synthetic.repair_row("suffix", 10.0, 256, 0.3, 3.9)]
    assert tables.best_within(rows)["arm"] == "suffix"
    assert tables.best_within(rows[:3]) is None
    best, *_ = parsed(tables.frontier(synthetic.artifact("repair_frontier", rows)))
    assert (best[0]["mean KL ≤ 0.02 nats"], best[0]["speed-up ≥ 4"]) == ("fails", "fails, interval crosses")
    assert parsed(tables.frontier(synthetic.artifact("repair_frontier", rows[:3])))[0][0]["arm"] == "none measured"


@pytest.mark.parametrize(("mean", "upper", "verdict"), [
    (0.01, 0.019, "holds: the upper bound is within ε"), (0.02, 0.02, "holds: the upper bound is within ε"),
    (0.01, 0.03, "open: the mean is within ε, the bound is not"), (0.03, 0.04, "fails: the mean is above ε"),
    (0.01, None, "mean within ε; no bound"), (None, None, "not tested")])
def test_the_verdict_on_the_policy(mean, upper, verdict):
    rows = [synthetic.policy_row(256, "test", mean, upper), synthetic.policy_row(256, "calibration", 0.001, 0.002)]
    sets, verdicts = parsed(tables.repair_policy(synthetic.artifact("calibrated_repair", rows)))
    assert [row["set"] for row in sets] == ["calibration", "test"]
    assert verdicts == [{"n_past, tokens": "256", "verdict": verdict}]


def test_the_policy_shows_violations_with_their_bounds():
    sets, _ = parsed(tables.repair_policy(synthetic.policy()))
    assert sets[1]["violations, %"] == "10.0 [0, 20.0]" and sets[1]["upper bound, nats"] == "0.0156"


def test_the_ladder_is_shown_and_the_rung_that_was_taken_is_marked():
    rows = [synthetic.policy_row(256, "calibration", 0.001, 0.002, arm="none", chosen=False),
            synthetic.policy_row(256, "calibration", 0.001, 0.002), synthetic.policy_row(256, "test", 0.001, 0.002),
            synthetic.policy_row(256, "test", 0.9, 0.9, arm="full", chosen=False)]
    sets, verdicts = parsed(tables.repair_policy(synthetic.artifact("calibrated_repair", rows)))
    assert [row["arm"] for row in sets] == ["`none`", "`head-10%` (taken)", "`head-10%` (taken)", "`full`"]
    assert verdicts[0]["verdict"] == "holds: the upper bound is within ε"


def test_a_depth_without_a_test_is_not_tested():
    rows = [synthetic.policy_row(256, "calibration", 0.001, 0.002)]
    assert "| 256 | not tested |" in tables.repair_policy(synthetic.artifact("calibrated_repair", rows))


def test_layouts_show_refusals_once_and_divergence_by_depth():
    status, divergence = parsed(tables.layouts(synthetic.layouts()))
    assert len(status) == 3
    assert status[-1] == {"model": "gemma", "V layout": "row", "setting": "swa | full", "status": "refused",
                          "message": "sliding window: use swa_full"}
    assert len(divergence) == 4 and divergence[0]["n_past 256"] == "0.257 [0.180, 0.334]"


OTHERS = ("table1", "table4", "generalisation", "scan", "arguments", "serving")


def write_all(out, cfg):
    """All artifacts that tables are written from in `out`, in the form that experiments write."""
    routing_artifacts.write(out, cfg)
    argument_artifacts.write(out, cfg)
    for make, _ in RENDERED.values():
        made = make()
        artifact.write(out / f"{made['experiment']}.json", experiment=made["experiment"],
                       tuple_={"model": "synthetic", "model_sha256": "0" * 64, "embedder": None, "llama_cpp": "b1"},
                       config=cfg.resolved(made["experiment"]), rows=made["rows"], samples=[{"n": 1}],
                       provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                                   "versions": {}})


def test_the_experiment_writes_every_table_and_the_same_bytes_twice(tmp_path):
    cfg = validate(compose([]))
    write_all(tmp_path, cfg)
    folder = experiment.run(cfg, tmp_path)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert folder == tmp_path / "tables"
    assert set(first) == {f"{name}.{form}" for name in (*RENDERED, *OTHERS) for form in ("md", "tex")}
    experiment.run(cfg, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


@pytest.mark.parametrize(("overrides", "choice"), [
    (["model=smollm2-135m", "profile=quick"], "model=smollm2-135m profile=quick"),
    (["model=local", "model.path='/a b/m.gguf'", "model.name=local-m"],
     "model=local 'model.path=/a b/m.gguf' model.name=local-m profile=full")])
def test_a_missing_artifact_names_the_file_and_the_command(tmp_path, overrides, choice):
    cfg = validate(compose(overrides))
    write_all(tmp_path, cfg)
    (tmp_path / "layouts.json").unlink()
    with pytest.raises(tables.MissingArtifact) as error:
        experiment.run(cfg, tmp_path)
    assert str(error.value) == (f"{tmp_path / 'layouts.json'} is missing; make it with: "
                                f".venv/bin/python -m experiments.layouts {choice}")
    assert not (tmp_path / "tables").exists(), "nothing is written where an artifact is missing"


def test_the_published_means_agree_with_the_published_rows():
    claims = PUBLISHED["gating_nogo"]
    mean = sum(row["spearman_rho"] for row in claims["rows"]) / len(claims["rows"])
    assert round(mean, 3) == claims["mean_spearman_rho"]
