"""`nexus repro`: the whole pipeline of one run through DVC, for real the first time and not at all the second time.

In a clean clone results and `dvc.lock` are committed, so that plain `dvc repro` has nothing to do. What was run *here*
is remembered by a git-ignored stamp. `params.yaml` and `dvc.lock` are DVC's; they hold another run only while it runs.
"""

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from nexus.canonical import sha256_of, write_atomically
from nexus.config import CONF, ROOT, Config, compose, params_text, validate
from nexus.lockfile import PARAMS, PIPELINE, Stage, drop_runs, locked_runs, stages
from nexus.locks import exclusive
from nexus.summary import summary
from nexus.weights import ensure

STAMPS = ROOT / ".nexus" / "stamp"
LOCKS = ROOT / ".nexus" / "locks"


class ReproError(RuntimeError):
    """The pipeline did not finish; the message says what to do."""


def overrides_for(model: str | None, profile: str | None) -> list[str]:
    """Hydra overrides for a model's name, or a GGUF file's path, and a profile's name; None means the default."""
    overrides = []
    if model and (os.sep in model or model.endswith(".gguf")):
        path = Path(model).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(f"model: {path} is not a file; give a GGUF file or a name from conf/model")
        # In Hydra's grammar a backslash counts only before a quote.
        quoted = re.sub(r"(\\*)'", r"\1\1\'", str(path))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:70]
        overrides += ["model=local", f"model.path='{quoted}'", f"model.name='local-{name}'"]
    elif model:
        overrides.append(f"model={model}")
    if profile:
        overrides.append(f"profile={profile}")
    return overrides


def reproduce(model: str | None = None, profile: str | None = None, force: bool = False) -> None:
    """None, after every result of the run is there and was made here, of this configuration, code and data.

    `force` measures again what was measured here before. Raises ConfigError, WeightsError, LockedError while another
    `repro` is at work, ReproError when a stage fails.
    """
    overrides = overrides_for(model, profile)
    cfg = validate(compose(overrides))
    if cfg.model.sha256 is None:
        # DVC must notice other bytes behind the same path.
        weights = ensure(cfg.model)
        overrides += [f"model.sha256={weights.sha256}", f"model.size_bytes={weights.size}"]
        cfg = validate(compose(overrides))
    plan = stages(cfg)
    # Held for the whole run: params.yaml can describe only one.
    with exclusive(LOCKS, "repro"):
        stamp = STAMPS / cfg.run_name
        before = _read(stamp)
        if not force and before.get("inputs") == _inputs(cfg, plan) and before.get("outputs") == _outputs(plan):
            print(f"{cfg.run_name}: nothing to do; measured here with this configuration, code and data.")
            _conclude(cfg, plan)
            return

        ensure(cfg.model)
        _announce(cfg, plan, before)
        start = time.monotonic()
        try:
            _write_params(params_text([*overrides, *(["force=true"] if force else [])]))
            # The inputs as they are before the run: what changes meanwhile counts as not measured.
            inputs = _inputs(cfg, plan)
            made_here = before.get("inputs") == inputs
            _dvc("repro", *([] if made_here and not force else ["--force"]))
        finally:
            _write_params(params_text())
            # Runs that git ignores leave no trace in a committed file; their stamp remembers them.
            drop_runs(run for run in locked_runs() if not _is_ignored(run))
        longest = max(time.monotonic() - start, before.get("seconds", 0))
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(stamp, json.dumps({"inputs": inputs, "outputs": _outputs(plan), "seconds": round(longest)}))
        _conclude(cfg, plan)


def _announce(cfg: Config, plan: list[Stage], before: dict[str, Any]) -> None:
    seconds = before.get("seconds")
    duration = f"{max(1, round(seconds / 60))} min here the last time" if seconds else (
        f"about {cfg.expected_minutes:g} min on 2 cores with the default model"
    )
    print(f"{cfg.run_name}: {', '.join(stage.name.partition('@')[0] for stage in plan)}; {duration}.")
    print("Stop it at any time with Ctrl-C; the same command goes on where it stopped.", flush=True)


def _conclude(cfg: Config, plan: list[Stage]) -> None:
    text = summary(ROOT / cfg.results_folder / cfg.run_name)
    print(*([text] if text else []), "Results:", *(f"  {out}" for stage in plan for out in stage.outs), sep="\n")


def _inputs(cfg: Config, plan: list[Stage]) -> str:
    made = {out for stage in plan for out in stage.outs}
    files = {PIPELINE, *(path for stage in plan for path in stage.deps)} - made
    params = [[stage.name, stage.cmd, stage.params] for stage in plan]
    return sha256_of({"files": {path: _sha256(path) for path in sorted(files)}, "params": params})


def _outputs(plan: list[Stage]) -> dict[str, str | None]:
    return {out: _sha256(out) for stage in plan for out in stage.outs}


def _sha256(path: str) -> str | None:
    try:
        with (ROOT / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _read(stamp: Path) -> dict[str, Any]:
    try:
        return json.loads(stamp.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _write_params(text: str) -> None:
    path = ROOT / PARAMS
    # Left alone where it is right, so that its time stamp stays.
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def _is_ignored(run: str) -> bool:
    profiles = {path.stem for path in (CONF / "profile").glob("*.yaml")} - {"full"}
    return any(run.endswith(f".{profile}") for profile in profiles)


def _dvc(*arguments: str) -> None:
    # In this process, not as a child: a killed `nexus repro` must not leave a DVC behind that starts the next stage.
    from dvc.cli import main

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if main(["--cd", str(ROOT), *arguments]):
        raise ReproError("the pipeline stopped before its end (see above); run the same command again to go on")
