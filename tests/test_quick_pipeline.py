"""The whole pipeline for real, once: SmolLM2 with the profile `quick`, through DVC, in a copy of the repository."""
from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nexus import artifact
from nexus.config import compose, validate
from nexus.lockfile import stages
from repository_copy import EXPERIMENTS, make_copy


@pytest.mark.integration
@pytest.mark.slow
def test_quick_pipeline_measures_draws_and_then_has_nothing_to_do(tmp_path: Path):
    copy = make_copy(tmp_path / "repository", real=True)
    choices = ("--model", "smollm2-135m", "--profile", "quick")
    cfg = validate(compose(["model=smollm2-135m", "profile=quick"]))
    first = copy.python("nexus", "repro", *choices, timeout=1500)
    assert first.returncode == 0, first.stdout + first.stderr

    results = copy.path / cfg.results_folder / cfg.run_name
    written = {name: artifact.read(artifact.path_of(name, results)) for name in artifact.experiments()
               if name in EXPERIMENTS}
    rows = {name: content["rows"] for name, content in written.items()}
    for name, content in written.items():
        assert content["config_sha256"] == cfg.sha256(name)
        assert artifact.read_samples(artifact.path_of(name, results))

    identity = [row for row in rows["dkl_sweep"] if row["offset"] == 0 and row["arm"] == "bare"]
    assert len(identity) == 2 and all(row["dkl_nats"]["value"] == 0 for row in identity)
    assert all(row["total_us"]["value"] > 0 for row in rows["splice_cost"])
    # A prefill, too, but of other batches than the reference.
    for control in ("full", "noise_floor"):
        same = [row for row in rows["repair_frontier"] if row["arm"] == control]
        assert {row["n_past"] for row in same} == set(cfg.repair_frontier.n_past)
        assert all(row["recompute_pct"] == 100 and row["dkl_nats"]["value"] < 0.05 for row in same)
    faithful = [row for row in rows["rope_boundary_gate"] if row["faithful"]]
    assert faithful and all(row["cells_per_position"]["value"] == 1 for row in faithful)
    assert {(row["n_past"], row["set"]) for row in rows["calibrated_repair"]} == {
        (n_past, part) for n_past in cfg.repair_frontier.n_past for part in ("calibration", "test")}
    assert all(row["noise_floor_nats"]["value"] < 0.05 for row in rows["calibrated_repair"])
    assert {row["protocol"] for row in rows["deep_splice_ttft"]} == {"cold", "warm"}
    assert all(row["splice_ms"]["value"] > 0 for row in rows["deep_splice_ttft"])
    assert {row["context"] for row in rows["gating_nogo"]} == set(cfg.gating_nogo.contexts)
    assert all(row["mean_drift"]["value"] > 0 for row in rows["gating_nogo"])
    anchored = [row for row in rows["layouts"] if (row["model"], row["setting"]) == (cfg.model.name, "default")
                and row["n_past"] == 0 and row["arm"] in ("none", "noise_floor")]
    assert {row["v_layout"] for row in anchored} == {"row", "transposed"}
    assert all(row["dkl_nats"]["value"] < 0.05 for row in anchored)
    assert all(row["bit_identical"]["value"] == 1 for row in anchored if row["arm"] == "none")

    listing = json.loads((results / "registry.json").read_text(encoding="utf-8"))
    assert len(listing) > 300 and len({(tool["server"], tool["name"]) for tool in listing}) == len(listing)
    assert listing[0]["server"] == "github" and {tool["server"] for tool in listing} == {
        server.name for server in cfg.registry.servers}
    scans = [row for row in rows["slb_latency"] if row["impl"].startswith("nexus") and row["exact"] is not None]
    assert scans and all(row["exact"] and row["p50_us"]["value"] > 0 for row in scans)
    chosen = {(row["system"], row["n_tools"]): row for row in rows["routing_accuracy_n250"]}
    systems = [*cfg.routing_accuracy_n250.systems, *cfg.routing_accuracy_n250.baselines]
    assert set(chosen) == {(system, n) for system in systems for n in cfg.routing_accuracy_n250.n_tools}
    assert all((row["status"] == "overflow") == (row["accuracy"] is None) for row in chosen.values())
    assert chosen["concat_all", 50]["status"] == "overflow", "fifty schemas do not fit 4096 tokens"
    assert chosen["slb", 10]["prompt_tokens"]["value"] == 0 < chosen["rag_mcp", 10]["prompt_tokens"]["value"]
    assert {row["set"] for row in rows["routing_generalisation"]} == {
        "bfcl", "bfcl-live", "bfcl-selection", "bfcl-live-selection"}
    assert all(row["n_tools"] > 1000 for row in rows["routing_generalisation"])
    gates = [row for row in rows["calibration"] if row["kind"] == "gate" and row["set"] == "adversarial"]
    assert gates and all(0.19 < row["fire_rate"]["value"] < 0.3 for row in gates)

    told = {row["metric"]: row["value"]["value"] for row in rows["sidecar_accuracy"]}
    assert told["json_valid_rate_oracle_routing"] == 1 and 0 < told["ir_tokens_median"] < told["schema_tokens_median"]
    constraints = {row["impl"]: row for row in rows["constrain_cost"]}
    assert constraints["nexus"]["n_compiled"] == len(listing) and constraints["nexus"]["n_failed"] == 0
    assert constraints["nexus-full-mask"]["agrees"]["value"] == 1
    hits = {row["arm"]: row["hit_rate"]["value"] for row in rows["l0_radix"] if row["part"] == "trace"}
    assert hits["llama.cpp"] <= hits["nexus"] <= hits["unlimited"]
    assert all(row["operations_per_s"]["value"] > 0 for row in rows["block_allocator"] if row["kind"] == "contention")

    outs = [copy.path / out for stage in stages(cfg) for out in stage.outs]
    assert all(path.is_file() for path in outs)
    drawn = [path for path in outs if path.suffix in (".png", ".svg", ".md")]
    assert {path.parent.name for path in drawn} == {"figures", "tables"}
    assert all(path.stat().st_size > (10_000 if path.suffix == ".png" else 200) for path in drawn)
    assert "published band" in (results / "figures" / "figure1.svg").read_text()
    assert all("|---|" in path.read_text() for path in drawn if path.suffix == ".md")
    # A run that git ignores leaves nothing behind in the files that git knows.
    assert copy.git("status", "--porcelain") == ""

    start = time.monotonic()
    second = copy.python("nexus", "repro", *choices)
    assert "nothing to do" in second.stdout, second.stdout + second.stderr
    assert time.monotonic() - start < 10
