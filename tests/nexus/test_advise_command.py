"""`nexus advise`: what it prints for people and as JSON, which artifacts it takes, and errors in one line."""
from __future__ import annotations

import json
import shutil

import pytest
from choice_artifacts import spliced_choice

from nexus import advise_command, artifact, cli, config, weights
from nexus.advise import AdviceError, Tokens, advise
from nexus.advise_command import as_json, as_text, counted, told_options
from nexus.config import ROOT, compose, validate
from nexus.provenance import PACKAGES
from nexus.registry import Tool
from nexus.stats import Estimate, wilson

MODEL = "smollm2-135m"
SPEC = validate(compose([f"model={MODEL}"])).model
ENTRIES = [{"name": f"tool_{i}", "description": "A toy tool.", "inputSchema": {"type": "object"}} for i in range(10)]
CPU = "toy CPU"
LIMIT = 2_000


def share(value: float) -> Estimate:
    return wilson(round(100 * value), 100)


def write_routing(out, sha256: str = SPEC.sha256, cpu: str = CPU) -> None:
    """A routing artifact of ten toy tools in the folder `out`: routing is right on 90 %, reading all on 80 %."""
    rows, samples = [], []
    for system, value, ms in (("toy", 0.9, 12.0), ("concat_all", 0.8, 400.0)):
        keys = {"n_tools": 10, "system": system}
        rows.append({**keys, "status": "ok", "accuracy": share(value), "top1_recall": None, "top3_recall": None,
                     "prompt_tokens": Estimate(0.0, None, None, 100, "identical-samples", 0.95), "scan_us": None,
                     "choice_ms": Estimate(ms, 0.9 * ms, 1.1 * ms, 100, "percentile-bootstrap", 0.95)})
        samples += [{**keys, "case": f"eval-{i}", "right": i < 100 * value} for i in range(100)]
    # A block's length, which the tools of this toy do not have otherwise.
    samples[0] |= {"tool": "tool_0", "block_tokens": 40}
    artifact.write(out / "routing_accuracy_n250.json", experiment="routing_accuracy_n250", rows=rows, samples=samples,
                   tuple_={"model": MODEL, "model_sha256": sha256, "embedder": "toy", "llama_cpp": "toy"},
                   config={"routing": {"system": "toy"}, "model": {"n_ctx_train": LIMIT}},
                   provenance={"git_commit": None, "git_dirty": None, "cpu": cpu, "physical_cores": 1,
                               "logical_cores": 1, "memory_gb": 1.0, "os": "toy", "python": "3.11", "isa": None,
                               "threads": 1, "llama_cpp": None, "versions": dict.fromkeys(PACKAGES)})


@pytest.fixture
def out(tmp_path, monkeypatch):
    """The folder of the model's results, in a place of the test's own; weights are not on this machine."""
    composed = config.compose
    monkeypatch.setattr(config, "compose", lambda overrides=(): composed([
        *overrides, f"results_folder={tmp_path / 'results'}"]))
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setattr(advise_command, "cpu_model", lambda: CPU)
    monkeypatch.delenv("NEXUS_DEBUG", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path / "results" / MODEL


@pytest.fixture
def nexus(capsys, out):
    """A function that runs `nexus advise` for the model; (status, output, errors)."""
    def run(*arguments):
        capsys.readouterr()
        status = cli.main(["advise", "--model", MODEL, *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def registry(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def test_advice_for_people(nexus, out, registry):
    write_routing(out)
    status, said, errors = nexus("--registry", registry, "--depth", 256)
    assert status == 0
    flat = " ".join(said.split())
    assert said.startswith(f"{MODEL}: 10 tools (400 tokens; 1 measured tool, since the model's weights are not on this")
    assert "Advice: routing (toy), the only way that was measured for this." in flat
    assert "→ routing: toy" in said and "12 [11, 13]" in said and "90 [83, 94]" in said
    assert "measured (10 tools, any" in said and "nearest (10 tools, depth" in said
    assert "(yes: the reference)" in flat and "Equal accuracy: on the same queries" in flat
    assert "choosing from spliced tools was not measured" in flat
    assert "spliced_choice.json is missing" in errors and "Traceback" not in errors
    assert max(map(len, said.splitlines())) <= advise_command.WIDTH


def test_advice_as_json(nexus, out, registry):
    write_routing(out)
    status, said, _ = nexus("--registry", registry, "--depth", 0, "--json")
    told = json.loads(said)
    assert status == 0 and told["run"] == MODEL and (told["n_tools"], told["depth"]) == (10, 0)
    assert told["advised"]["name"] == "toy" and told["advised"]["ttft_ms"]["value"] == 12
    assert told["advised"]["accuracy"] == share(0.9).row() and told["advised"]["verdict"]["p"] < 0.05
    assert [o["basis"] for o in told["options"]] == ["measured", "measured"] and told["rule"]
    assert told["tokens"]["total"] == 400 and told["measured_on"] == CPU


def test_spliced_tools_are_read_from_their_artifact(nexus, out):
    write_routing(out)
    toy = spliced_choice({("full", 10, 256): 0.9, ("head-16", 10, 256): 0.9},
                         {("full", 10, 256): 900.0, ("head-16", 10, 256): 8.0})
    read = artifact.read(out / "routing_accuracy_n250.json")
    artifact.write(out / "spliced_choice.json", experiment="spliced_choice", tuple_=read["tuple"],
                   config=toy.artifact["config"], provenance=read["provenance"], rows=toy.artifact["rows"],
                   samples=toy.samples)
    status, said, errors = nexus("--tools", 10, "--depth", 256)
    flat = " ".join(said.split())
    assert status == 0 and "spliced_choice" not in errors
    assert "Advice: splicing (head-16, compiled behind system) is fastest at equal accuracy; next is routing" in flat
    assert "choosing from spliced tools was not measured" not in flat
    told = json.loads(nexus("--tools", 10, "--depth", 256, "--json")[1])
    assert told["advised"]["at"] == [[10, 256]] and told["advised"]["experiment"] == "spliced_choice"


def test_more_tools_than_measured_are_no_advice(nexus, out):
    write_routing(out)
    status, said, _ = nexus("--tools", 11, "--depth", 0)
    assert status == 0 and "No advice: no option was measured for so many tools" in " ".join(said.split())
    assert said.count("nearest (10 tools") == 2 and "since no registry was given" in " ".join(said.split())


def test_another_machines_numbers_are_said_to_be_so(nexus, out, monkeypatch):
    write_routing(out, cpu="other CPU")
    _, said, _ = nexus("--tools", 10, "--depth", 0)
    flat = " ".join(said.split())
    assert f"Advice: on other CPU, not on this machine ({CPU}): routing (toy)" in flat
    assert "measured on other CPU" in flat


def test_nothing_measured_is_an_error_with_the_command_that_measures(nexus, out):
    status, said, errors = nexus("--tools", 3, "--depth", 0)
    assert (status, said) == (1, "")
    assert f"nothing was measured for {MODEL}; measure it with:  make repro MODEL={MODEL}" in errors
    assert "Traceback" not in errors


def test_artifacts_of_other_weights_are_left_out(nexus, out):
    write_routing(out, sha256="f" * 64)
    status, said, errors = nexus("--tools", 10, "--depth", 0)
    assert status == 1 and "is of other weights than smollm2-135m's" in errors and not said


def test_a_broken_artifact_is_an_error(nexus, out):
    write_routing(out)
    (out / "l0_radix.json").write_text("{")
    status, said, errors = nexus("--tools", 10, "--depth", 0)
    assert (status, said) == (1, "") and "l0_radix.json: not valid JSON" in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize("arguments, said", [
    (["--depth", "5"], "give --registry FILE, or --tools N"),
    (["--depth", "5", "--registry", "/none.json"], "/none.json"),
])
def test_wrong_arguments_are_one_line(nexus, arguments, said):
    status, printed, errors = nexus(*arguments)
    assert (status, printed) == (1, "") and said in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--tools", "3"], ["--tools", "0", "--depth", "1"], ["--depth", "-1"],
                                       ["--depth", "1.5"], ["--depth", "1", "--reading", "loud"]])
def test_wrong_usage(nexus, arguments):
    with pytest.raises(SystemExit) as end:
        nexus(*arguments)
    assert end.value.code == 2


def test_a_name_that_hydra_would_read_is_refused(capsys):
    assert cli.main(["advise", "--model", "a,b", "--tools", "1", "--depth", "0"]) == 1
    assert "is no name; give the path of a GGUF file" in capsys.readouterr().err


def test_a_registry_without_tools_is_refused(nexus, out, tmp_path):
    write_routing(out)
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    status, _, errors = nexus("--registry", empty, "--depth", 1)
    assert status == 1 and len(errors.splitlines()) == 1 and str(empty) in errors


def test_lengths_need_weights_or_measured_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path))
    with pytest.raises(AdviceError, match="no artifact tells how long a tool is"):
        counted(SPEC, [Tool(None, "toy", "", {})], {})


def test_per_kind_and_artifact_one_option_is_shown_and_all_if_wanted():
    keys = [("full", 5, 256), ("head-16", 5, 256), ("head-8", 5, 256), ("bare", 5, 256)]
    found = {"spliced_choice": spliced_choice(
        dict.fromkeys(keys, 0.9) | {keys[3]: 0.2}, dict(zip(keys, (900.0, 300.0, 200.0, 100.0))),
        free={("head-8", 5, 256): (0.8, 0.25)})}
    advice = advise(found, 5, 256, Tokens((100,), "toy"), CPU)
    assert [o.name.split(",")[0] for o in told_options(advice)] == ["head-8", "full"]
    text, everything = as_text(advice, "toy"), as_text(advice, "toy", every=True)
    assert "2 more options were measured; --all shows them" in text and "bare" not in text
    assert "bare" in everything and "no: −70 points" in " ".join(everything.split()) and "--all" not in everything
    assert "no call, %" in text and "25 [" in text
    assert len(json.loads(as_json(advice, "toy"))["options"]) == 4


@pytest.mark.integration
def test_tools_are_counted_by_the_models_tokenizer(smollm2, tmp_path, monkeypatch):
    tools = [Tool(None, "list_files", "Lists files.", {"type": "object"}),
             Tool(None, "search", "Searches all of the files for a text. " * 9, {"type": "object"})]
    from nexus.prompt import block_tokens

    tokens = counted(SPEC, tools, {})
    assert tokens.lengths == tuple(len(block_tokens(smollm2, tool)) for tool in tools)
    assert tokens.total(2) == sum(tokens.lengths) and tokens.total(4) == 2 * sum(tokens.lengths)


@pytest.mark.integration
def test_a_users_own_file_is_told_by_its_hash(smollm2, tmp_path, capsys, monkeypatch):
    path = shutil.copy(smollm2.path, tmp_path / "mine.gguf")
    composed = config.compose
    monkeypatch.setattr(config, "compose", lambda overrides=(): composed([
        *overrides, f"results_folder={tmp_path / 'results'}"]))
    write_routing(tmp_path / "results" / "local-mine")
    assert cli.main(["advise", "--model", str(path), "--tools", "10", "--depth", "0"]) == 0
    assert "local-mine: 10 tools" in capsys.readouterr().out


def test_a_committed_run_gives_advice():
    found, left_out = advise_command.measured(SPEC, ROOT / "results" / MODEL)
    assert {"deep_splice_ttft", "repair_frontier", "routing_accuracy_n250", "splice_cost", "l0_radix"} <= found.keys()
    assert all("spliced_choice" in reason for reason in left_out)
    read = found["routing_accuracy_n250"].artifact
    advice = advise(found, 10, 0, Tokens((150,), "toy"), read["provenance"]["cpu"])
    assert advice.advised is not None and advice.advised.within and advice.costs
    assert "Advice: " in as_text(advice, MODEL, every=True)
