"""`nexus repro`: the whole pipeline of one run, for real the first time and not at all the second time.

In a clean clone results and `dvc.lock` are committed, so that plain `dvc repro` has nothing to do. What was run *here*
is remembered by a git-ignored stamp. `params.yaml` and `dvc.lock` are DVC's; they hold another run only while it runs.

Runs of the models of conf/model go through DVC. A user's own case (a GGUF file, a registry, queries) does not: DVC takes
a stage without its outputs for failed, and such a run skips what its model or texts cannot do. Its stages are the same
commands in the order of `dvc.yaml`'s graph, each in a process of its own, with their own params file; they resume and
are stamped alike, and leave `dvc.lock` and `params.yaml` alone.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nexus import compare_runs, own_tuple, run_folder, stage_times
from nexus.artifact import ArtifactError, experiments
from nexus.canonical import sha256_of, write_atomically
from nexus.config import ROOT, Config, ConfigError, compose, params_text, validate
from nexus.lockfile import (PARAMS, PIPELINE, Stage, drop_broken_rwlock, drop_runs, keep_lock, locked_runs, mend_lock,
                            stages)
from nexus.locks import exclusive
from nexus.model_probe import ModelFacts, probe
from nexus.own_tuple import OwnTuple
from nexus.progress import duration
from nexus.run_folder import COMMITTED_PROFILE, profile_of
from nexus.summary import summary
from nexus.weights import ensure

# The profile of the committed results takes hours.
DEFAULT_PROFILE = "laptop"
STAMPS = ROOT / ".nexus" / "stamp"
LOCKS = ROOT / ".nexus" / "locks"
LOCK_COPY = ROOT / ".nexus" / "dvc.lock"


class ReproError(RuntimeError):
    """The pipeline did not finish; the message says what to do."""


def overrides_for(model: str | None, profile: str | None) -> list[str]:
    """Hydra overrides for a model's name, or a GGUF file's path, and a profile's name; None means the default."""
    overrides = []
    if model and own_tuple.is_path(model):
        path = own_tuple.placed(model)
        if not path.is_file():
            raise ConfigError(f"model: {path} is not a file; give a GGUF file or a name from conf/model")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:70]
        overrides += ["model=local", f"model.path={own_tuple.quoted(str(path))}", f"model.name='local-{name}'"]
    elif model:
        overrides.append(f"model={model}")
    if profile:
        overrides.append(f"profile={profile}")
    return overrides


def reproduce(model: str | None = None, profile: str | None = None, force: bool = False,
              registry: Path | None = None, queries: Path | None = None) -> None:
    """None, after every result of the run is there and was made here, of this configuration, code and data.

    `profile` is DEFAULT_PROFILE without one. `force` measures again what was measured here before. A model given as a
    path, a `registry` and `queries` are a user's own case, which skips what it cannot do and tells why. Raises
    ConfigError, WeightsError, RegistryError, WorkloadError, LockedError while another `repro` is at work, ReproError
    when a stage fails.
    """
    profile = profile or DEFAULT_PROFILE
    if registry is not None or queries is not None or (model and own_tuple.is_path(model)):
        files = (None if path is None else own_tuple.placed(path) for path in (registry, queries))
        _reproduce_own(OwnTuple(model, *files), profile, force)
    else:
        _reproduce_named(overrides_for(model, profile), force)


def _reproduce_named(overrides: list[str], force: bool) -> None:
    cfg = validate(compose(overrides))
    plan = stages(cfg)
    # Held for the whole run: params.yaml can describe only one.
    with exclusive(LOCKS, "repro"):
        mend_lock(LOCK_COPY)
        stamp = STAMPS / cfg.run_name
        before = _read(stamp)
        if not force and before.get("inputs") == _inputs(cfg, plan) and before.get("outputs") == _outputs(plan):
            print(f"{cfg.run_name}: nothing to do; measured here with this configuration, code and data.")
            _conclude(cfg, plan)
            return

        ensure(cfg.model)
        # The inputs as they are before the run: what changes meanwhile counts as not measured.
        inputs = _inputs(cfg, plan)
        made_here = before.get("inputs") == inputs
        kept = [stage for stage in plan if _outputs([stage]).items() <= before.get("outputs", {}).items()]
        _announce(cfg, plan, kept if made_here and not force else [])
        try:
            drop_broken_rwlock()
            keep_lock(LOCK_COPY)
            _write_params(params_text([*overrides, *(["force=true"] if force else [])]))
            _dvc("repro", *([] if made_here and not force else ["--force"]))
        finally:
            _write_params(params_text())
            mend_lock(LOCK_COPY)
            # Runs that git ignores leave no trace in a committed file; their stamp remembers them.
            drop_runs(run for run in locked_runs() if profile_of(run) == COMMITTED_PROFILE)
        _write_stamp(stamp, inputs, plan)
        _conclude(cfg, plan, measured=True)


def _reproduce_own(own: OwnTuple, profile: str, force: bool) -> None:
    suffix = None if profile == COMMITTED_PROFILE else profile
    values = compose([*overrides_for(own.model, profile), *own_tuple.overrides(own, suffix)])
    cfg = validate(values)
    with exclusive(LOCKS, "repro"):
        weights = ensure(cfg.model)
        if cfg.model.sha256 is None:
            # Other bytes behind the same path are another model.
            values["model"] |= {"sha256": weights.sha256, "size_bytes": weights.size}
        out = ROOT / cfg.results_folder / cfg.run_name
        left_out = own_tuple.write_inputs(own, values, out / own_tuple.INPUTS)
        cfg = validate(values)
        plan = in_order(stages(cfg))
        stamp = STAMPS / cfg.run_name
        before = _read(stamp)
        # What sizes and skips follow from, beside the model and the texts.
        also = ["nexus/own_tuple.py", "nexus/model_probe.py", *([str(own.registry)] if own.registry else [])]
        inputs = _inputs(cfg, plan, also)
        if not force and before.get("inputs") == inputs and before.get("outputs") == _outputs(plan):
            print(f"{cfg.run_name}: nothing to do; measured here with this configuration, code and data.")
            _conclude(cfg, plan)
            return

        params = out / run_folder.PARAMS
        own_tuple.write_params(values, params)
        too_large = own_tuple.memory_problem(weights.size)
        facts = ModelFacts(problem=too_large) if too_large else probe(params)
        skipped, changed = own_tuple.fit(values, own, facts)
        own_tuple.write_params(values | {"force": force}, params)
        for line in left_out:
            print(f"{cfg.run_name}: left out: {line}")
        for line in changed:
            print(f"{cfg.run_name}: {line}")
        _announce(cfg, [stage for stage in plan if _name(stage) not in skipped], [])
        failed = _run_stages(plan, params, out, skipped)
        if failed:
            raise ReproError(f"failed: {', '.join(failed)} (see above); all other results are in "
                             f"{cfg.results_folder}/{cfg.run_name}; run the same command again to go on")
        _write_stamp(stamp, inputs, plan)
        _conclude(cfg, plan, measured=True)


def in_order(plan: Sequence[Stage]) -> list[Stage]:
    """The stages such that each comes behind those whose outputs it reads, else in the given order."""
    waiting, ordered = list(plan), []
    while waiting:
        missing = {out for stage in waiting for out in stage.outs}
        ready = next(stage for stage in waiting if not missing & (set(stage.deps) - set(stage.outs)))
        waiting.remove(ready)
        ordered.append(ready)
    return ordered


def _run_stages(plan: Sequence[Stage], params: Path, out: Path, skipped: dict[str, str]) -> list[str]:
    """The names of the stages that failed, after every other one has run or stands, with its reason, in `skipped`."""
    failed = []
    makers = {path: _name(stage) for stage in plan for path in stage.outs}
    with tempfile.TemporaryDirectory() as folder:
        for stage in plan:
            name = _name(stage)
            lacking = [makers[path] for path in stage.deps if makers.get(path) in skipped]
            if lacking and name in experiments():
                skipped.setdefault(name, f"it needs {lacking[0]}, which was skipped")
            elif name not in skipped:
                reason = Path(folder) / name
                command = [sys.executable, "-m", "nexus", "stage", name, "--params", str(params),
                           "--run", out.name, "--skipped", str(reason)]
                status = subprocess.run(command, cwd=ROOT).returncode
                if status == 130:
                    raise KeyboardInterrupt
                if status < 0:
                    print(f"{name}: ended by signal {-status}; is there enough memory?", file=sys.stderr)
                if status != 0:
                    failed.append(name)
                elif reason.is_file():
                    skipped[name] = reason.read_text(encoding="utf-8")
            if name in skipped:
                print(f"{name}: skipped: {skipped[name]}", flush=True)
                stage_times.pass_over(out.name, name)
                # An earlier run of other files may have left some.
                for path in stage.outs:
                    (ROOT / path).unlink(missing_ok=True)
            own_tuple.write_skipped(skipped, out)
    return failed


def _announce(cfg: Config, plan: Sequence[Stage], kept: Sequence[Stage]) -> None:
    """Tell what will run and how long it will take, here and to the stages themselves; `kept` are done already."""
    expected = stage_times.expected_seconds(cfg.profile_name, cfg.expected_minutes)
    times = stage_times.begin(cfg.run_name, map(_name, plan), map(_name, kept), expected)
    here = "as long as here before" if times.seconds else "on 2 cores with the default model"
    print(f"{cfg.run_name}: {', '.join(map(_name, plan))}; about {duration(times.left())}, {here}.")
    print("Stop it at any time with Ctrl-C; the same command goes on where it stopped.", flush=True)


def _conclude(cfg: Config, plan: Sequence[Stage], measured: bool = False) -> None:
    """Tell what came out, what was skipped, where the time went, and how it compares with the committed run."""
    out = ROOT / cfg.results_folder / cfg.run_name
    times = stage_times.end(cfg.run_name)
    parts = [summary(out), stage_times.shares(times)]
    if skipped := run_folder.read_skipped(out):
        parts.append("\n".join(["Skipped", *(f"  {name}: {reason}" for name, reason in skipped.items())]))
    committed = ROOT / cfg.results_folder / cfg.model.name
    if measured and cfg.run_name == f"{cfg.model.name}.{cfg.profile_name}" and committed.is_dir():
        try:
            parts.append(compare_runs.write(out, committed))
        except ArtifactError as error:
            parts.append(f"Not compared with {committed.name}: {error}")
    outs = [*(path for stage in plan for path in stage.outs),
            *(f"{cfg.results_folder}/{cfg.run_name}/{name}" for name in (compare_runs.COMPARED, run_folder.SKIPPED))]
    parts.append("\n".join(["Results:", *(f"  {path}" for path in outs if (ROOT / path).is_file())]))
    print("\n".join(part for part in parts if part))


def _name(stage: Stage) -> str:
    return stage.name.partition("@")[0]


def _inputs(cfg: Config, plan: Sequence[Stage], also: Iterable[str] = ()) -> str:
    made = {out for stage in plan for out in stage.outs}
    files = {PIPELINE, *also, *(path for stage in plan for path in stage.deps)} - made
    params = [[stage.name, stage.cmd, stage.params] for stage in plan]
    return sha256_of({"files": {path: _sha256(path) for path in sorted(files)}, "params": params})


def _outputs(plan: Sequence[Stage]) -> dict[str, str | None]:
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


def _write_stamp(stamp: Path, inputs: str, plan: Sequence[Stage]) -> None:
    stamp.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(stamp, json.dumps({"inputs": inputs, "outputs": _outputs(plan)}))


def _write_params(text: str) -> None:
    path = ROOT / PARAMS
    # Left alone where it is right, so that its time stamp stays.
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def _dvc(*arguments: str) -> None:
    # In this process, not as a child: a killed `nexus repro` must not leave a DVC behind that starts the next stage.
    from dvc.cli import main

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if main(["--cd", str(ROOT), *arguments]):
        raise ReproError("the pipeline stopped before its end (see above); run the same command again to go on")
