"""What `dvc.yaml` asks of a run and what `dvc.lock` says was done, read without starting DVC."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from nexus.canonical import write_atomically
from nexus.config import ROOT, Config, ConfigError, compose, validate

PIPELINE, LOCK, PARAMS = "dvc.yaml", "dvc.lock", "params.yaml"


@dataclass(frozen=True)
class Stage:
    """One stage of one run, with the templates of `dvc.yaml` filled in."""

    name: str
    cmd: str
    deps: tuple[str, ...]
    params: Mapping[str, Any]
    outs: tuple[str, ...]
    cached: frozenset[str]
    """The outs that DVC keeps in its cache instead of git: a clean clone has to make them."""


def stages(cfg: Config, root: Path = ROOT) -> list[Stage]:
    """The stages of the run that `cfg` describes, in the order of `dvc.yaml`. Raises ConfigError for a bad template."""
    # As params.yaml says it, which is what DVC locks: without the defaults of what it leaves out.
    values = cfg.model_dump(mode="json", exclude_unset=True)

    def lookup(key: str) -> Any:
        value: Any = {**values, "item": {"run": cfg.run_name}}
        for step in key.split("."):
            if not isinstance(value, dict) or step not in value:
                raise ConfigError(f"{PIPELINE}: {key}: not a key of the configuration")
            value = value[step]
        return value

    def fill(text: str) -> str:
        return re.sub(r"\$\{([\w.]+)\}", lambda found: str(lookup(found[1])), text)

    def paths(definition: Mapping[str, Any], *kinds: str) -> tuple[str, ...]:
        items = [item for kind in kinds for item in definition.get(kind, [])]
        return tuple(fill(item if isinstance(item, str) else next(iter(item))) for item in items)

    return [
        Stage(
            name=f"{name}@{cfg.run_name}",
            cmd=fill(definition["cmd"]),
            deps=paths(definition, "deps"),
            params={key: lookup(key) for key in definition.get("params", [])},
            outs=paths(definition, "outs", "metrics", "plots"),
            cached=frozenset(fill(item) for item in definition.get("outs", []) if isinstance(item, str)),
        )
        for name, definition in _load(root / PIPELINE)["stages"].items()
    ]


class LockfileError(ValueError):
    """`dvc.yaml` or `dvc.lock` cannot be read; the message names the file, what is wrong and the remedy."""


def verify(root: Path = ROOT) -> list[str]:
    """One line per difference between the files and `dvc.lock`, for every run in it and the default one; [] if none.

    The default run has all stages; another one may be measured in part. Raises LockfileError for a damaged file.
    """
    if not (root / LOCK).is_file():
        return [f"{LOCK} is missing: nothing was measured yet; run `make repro`"]
    locked = _locked(root)
    problems = []
    default = validate(compose()).run_name
    for run in sorted({default} | {name.partition("@")[2] for name in locked}):
        mine = {name: entry for name, entry in locked.items() if name.partition("@")[2] == run}
        cfg = _config_of(run)
        expected = {} if cfg is None else {stage.name: stage for stage in stages(cfg, root)}
        if run == default:
            problems += [f"{name}: not in {LOCK}; it was never run" for name in expected if name not in mine]
        cached = frozenset().union(*(stage.cached for stage in expected.values()))
        for name, entry in mine.items():
            problems += [f"{name}: {problem}" for problem in _changed_files(entry, root, cached)]
            if name in expected:
                problems += [f"{name}: {problem}" for problem in _changed_definition(entry, expected[name])]
            elif expected:
                problems.append(f"{name}: in {LOCK} but not in {PIPELINE}")
    return problems


def drop_runs(keep: Iterable[str], root: Path = ROOT) -> None:
    """None, after `dvc.lock` has entries of the runs `keep` only; byte for byte unchanged if it had no others."""
    path = root / LOCK
    if not path.is_file():
        return
    yaml, keep = YAML(), set(keep)
    # As DVC writes it.
    yaml.default_flow_style = False
    content = yaml.load(path) or {}
    others = [name for name in content.get("stages", {}) if name.partition("@")[2] not in keep]
    if not others:
        return
    for name in others:
        del content["stages"][name]
    if content["stages"]:
        text = io.StringIO()
        yaml.dump(content, text)
        write_atomically(path, text.getvalue())
    else:
        path.unlink()


def keep_lock(copy: Path, root: Path = ROOT) -> None:
    """None, after `copy` holds what `dvc.lock` is before a run; nothing where there is none."""
    path = root / LOCK
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(copy, path.read_text(encoding="utf-8") if path.is_file() else "")


def mend_lock(copy: Path, root: Path = ROOT) -> bool:
    """Whether `dvc.lock` was put back from `copy`, which is gone afterwards.

    DVC writes the file in place: a run that is stopped meanwhile leaves it without its end. What it held of stages that
    had run is lost then, and they are made again from their cells.
    """
    if not copy.is_file():
        return False
    kept, path = copy.read_text(encoding="utf-8"), root / LOCK
    damaged = path.is_file() and not _is_whole(root, set((_load(copy) or {}).get("stages", {})))
    if damaged and kept:
        write_atomically(path, kept)
    elif damaged:
        path.unlink()
    copy.unlink()
    return damaged


def drop_broken_rwlock(root: Path = ROOT) -> None:
    """None, after DVC's list of who reads and writes is gone if it cannot be read: DVC writes that in place, too.

    For one who knows that no other DVC is at work.
    """
    path = root / ".dvc" / "tmp" / "rwlock"
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except ValueError:
        path.unlink()


def _is_whole(root: Path, names: set[str]) -> bool:
    """Whether DVC can read `dvc.lock`, and it still has entries of these stages."""
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    try:
        COMPILED_LOCKFILE_SCHEMA(_load(root / LOCK))
        return names <= _locked(root).keys()
    except (Invalid, LockfileError):
        return False


def locked_runs(root: Path = ROOT) -> set[str]:
    """The names of the runs that `dvc.lock` has entries of."""
    if not (root / LOCK).is_file():
        return set()
    return {name.partition("@")[2] for name in _locked(root)}


def _locked(root: Path) -> dict[str, Any]:
    """The entries of `dvc.lock` by stage."""
    content = _load(root / LOCK) or {}
    entries = content.get("stages", {}) if isinstance(content, dict) else None
    try:
        for entry in entries.values():
            files = [file for kind in ("deps", "outs") for file in entry.get(kind, [])]
            if "cmd" not in entry or not all({"path", "md5"} <= file.keys() for file in files):
                raise TypeError
    except (AttributeError, TypeError):
        raise _damaged(root / LOCK, "an entry has no command, or a file of it no path or hash") from None
    return entries


def _load(path: Path) -> Any:
    try:
        return YAML(typ="safe").load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise _damaged(path, " ".join(str(error).split())) from None


def _damaged(path: Path, problem: str) -> LockfileError:
    return LockfileError(f"{path.name}: {problem}; restore it: git checkout {path.name}")


def _config_of(run: str) -> Config | None:
    # Only a model's own run has a configuration that its name tells: the profile full of conf/model/<run>.yaml.
    try:
        return validate(compose([f"model={run}"]))
    except ConfigError:
        return None


def _changed_files(entry: Mapping[str, Any], root: Path, cached: frozenset[str]) -> list[str]:
    problems = []
    for kind, word in (("deps", "input"), ("outs", "result")):
        for file in entry.get(kind, []):
            path = root / file["path"]
            if not path.is_file():
                if file["path"] in cached:
                    continue
                problems.append(f"{word} {file['path']} is missing")
                continue
            with path.open("rb") as content:
                if hashlib.file_digest(content, "md5").hexdigest() != file["md5"]:
                    problems.append(f"{word} {file['path']} is not what {LOCK} says")
    return problems


def _changed_definition(entry: Mapping[str, Any], stage: Stage) -> list[str]:
    problems = []
    if entry["cmd"] != stage.cmd:
        problems.append(f"command is {stage.cmd!r}, {LOCK} says {entry['cmd']!r}")
    for kind, word, paths in (("deps", "input", stage.deps), ("outs", "result", stage.outs)):
        locked = {file["path"] for file in entry.get(kind, [])}
        problems += [f"{word} {path} is not in {LOCK}" for path in paths if path not in locked]
        problems += [f"{word} {path} is not in {PIPELINE}" for path in sorted(locked - set(paths))]
    locked_params = entry.get("params", {}).get(PARAMS, {})
    for key in sorted(stage.params.keys() | locked_params.keys()):
        now, then = stage.params.get(key), locked_params.get(key)
        if now != then:
            problems.append(f"parameter {key} is {now!r}, {LOCK} says {then!r}")
    return problems
