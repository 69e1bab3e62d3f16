"""The command line: what it accepts, and how it ends."""

import sys
import types
from pathlib import Path

import pytest

from nexus import cli, lockfile
from nexus.config import ROOT, params_text
from nexus.reproduce import overrides_for
from nexus.summary import summary


@pytest.mark.parametrize("command", ["repro", "verify", "compile", "doctor", "params", "stage"])
def test_help(command: str, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["rerpo"], ["compile"], ["stage"]])
def test_wrong_usage(arguments: list[str], capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: nexus" in capsys.readouterr().err


def test_error_is_one_line_and_debugging_shows_more(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.delenv("NEXUS_DEBUG", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    missing = ["stage", "figures", "--params", str(tmp_path / "none.yaml")]
    assert cli.main(missing) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setenv("NEXUS_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        cli.main(missing)


def test_doctor_and_compile_are_handed_over(monkeypatch, tmp_path: Path):
    seen = {}
    doctor = types.SimpleNamespace(report=lambda args: seen.setdefault("doctor", 3))
    compile_blocks = types.SimpleNamespace(run=lambda args, cfg: seen.update(args=args, cfg=cfg) or 1)
    monkeypatch.setitem(sys.modules, "nexus.doctor", doctor)
    monkeypatch.setitem(sys.modules, "nexus.compile_blocks", compile_blocks)
    monkeypatch.setattr("nexus.doctor", doctor, raising=False)
    monkeypatch.setattr("nexus.compile_blocks", compile_blocks, raising=False)
    assert cli.main(["doctor"]) == 3
    assert cli.main(["compile", "tools.json", "--out", str(tmp_path), "--model", "smollm2-135m", "--profile", "quick"]) == 1
    assert (seen["args"].registry, seen["args"].out) == (Path("tools.json"), tmp_path)
    assert seen["cfg"].run_name == "smollm2-135m.quick" and seen["args"].behind == "system"
    cli.main(["compile", "tools.json", "--out", str(tmp_path), "--behind", "ensemble-4x256"])
    assert seen["args"].behind == "ensemble-4x256"


@pytest.mark.parametrize("behind", ["ensemble-4", "preamble-0", "System"])
def test_compiling_behind_another_name_is_one_line(behind: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.delenv("NEXUS_DEBUG", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert cli.main(["compile", "none.json", "--out", str(tmp_path), "--behind", behind]) == 1
    assert capsys.readouterr().err == (f"nexus: compiled_behind: {behind!r} is not system, preamble-<tokens> or "
                                       "ensemble-<texts>x<tokens>\n")


def test_verify_ends_with_one_for_differences(monkeypatch, capsys):
    monkeypatch.setattr(lockfile, "verify", lambda: ["dkl_sweep@a: result is missing"])
    assert cli.main(["verify"]) == 1
    assert capsys.readouterr().out == "dkl_sweep@a: result is missing\n"
    monkeypatch.setattr(lockfile, "verify", lambda: [])
    assert cli.main(["verify"]) == 0


def test_params_check(capsys):
    assert cli.main(["params", "--check"]) == 0
    assert (ROOT / "params.yaml").read_text(encoding="utf-8") == params_text()


def test_model_is_a_name_or_a_file(tmp_path: Path):
    gguf = tmp_path / "my model, v=1 [it's].gguf"
    gguf.touch()
    assert overrides_for(None, None) == []
    assert overrides_for("smollm2-135m", "quick") == ["model=smollm2-135m", "profile=quick"]
    assert overrides_for(str(gguf), None)[0] == "model=local"
    with pytest.raises(FileNotFoundError, match="is not a file"):
        overrides_for(str(tmp_path / "none.gguf"), None)


def test_models_path_survives_the_override_grammar(tmp_path: Path):
    from nexus.config import compose

    gguf = tmp_path / "my model, v=1 [it's] \\' {x}.gguf"
    gguf.touch()
    model = compose(overrides_for(str(gguf), None))["model"]
    assert (model["path"], model["name"]) == (str(gguf), "local-my-model-v-1-it-s-x-")


def test_summary_of_metrics(tmp_path: Path):
    from nexus.pipeline import write_metrics

    assert summary(tmp_path) == ""
    write_metrics(tmp_path, "dkl_sweep", {
        f"{arm}.{probe}.{offset}": {"dkl_nats": offset / 1000}
        for arm in ("bare", "bare-no-reanchor") for probe in ("query", "block_end") for offset in (2048, 0)
    })
    write_metrics(tmp_path, "splice_cost", {
        "row.contiguous.4096.200": {"total_us": 175.4, "total_per_memcpy": 3.43, "engine_shift_per_total": None},
        "row.contiguous.4096.50": {"total_us": 99.0}, "row.fragmented.4096.200": {"total_us": 1000.0},
    })
    lines = summary(tmp_path).splitlines()
    assert lines[1].split() == ["arm", "probe", "0", "2048"]
    assert lines[2].split() == ["bare", "query", "0.0000", "2.05"]
    assert lines[-1].split() == ["row", "4096", "175", "3.43", "-"]
    assert max(map(len, lines)) <= 120
