"""The command line: what it accepts, and how it ends."""

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from nexus import cli, lockfile
from nexus.config import ROOT, ConfigError, params_text
from nexus.reproduce import overrides_for
from nexus.summary import summary


@pytest.mark.parametrize("command", ["repro", "verify", "compile", "doctor", "params", "stage"])
def test_help(command: str, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert command in capsys.readouterr().out


def test_error_is_one_line_and_debugging_shows_more(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.delenv("NEXUS_DEBUG", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    missing = ["stage", "figures", "--params", str(tmp_path / "none.yaml")]
    assert cli.main(missing) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setenv("NEXUS_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        cli.main(missing)


@pytest.mark.parametrize("command, said", [
    (["verify"], "nexus: stopped\n"),
    (["stage", "figures"], "nexus: stopped; the same command goes on where it stopped\n")])
def test_ctrl_c_is_one_line(command: list[str], said: str, capsys, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, f"_{command[0]}", stopped)
    assert cli.main(command) == 130
    assert capsys.readouterr() == ("", said)


def test_ctrl_c_while_modules_load_is_one_line():
    program = textwrap.dedent("""
        import builtins, signal, sys
        from nexus.cli import main
        before = builtins.__import__
        def interrupted(name, *rest):
            if name == "numpy":
                signal.raise_signal(signal.SIGINT)
            return before(name, *rest)
        builtins.__import__ = interrupted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main(["params", "--check"]))
        """)
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "nexus: stopped\n")


def test_an_output_that_takes_nothing_is_one_line():
    program = "import sys; from nexus import cli; cli._verify = lambda args: print('x'); sys.exit(cli.main(['verify']))"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "nexus: BrokenPipeError: [Errno 32] Broken pipe\n")


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


@pytest.mark.parametrize("behind", ["ensemble-4", "System"])
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
    with pytest.raises(ConfigError, match="is not a file"):
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
