"""A user's own case: a GGUF file, a registry of tools and queries for them, as a run that measures what these can do.

`nexus.reproduce` runs its stages. Here its configuration is made: the files become the texts of the experiments, sizes
shrink to what there is, and what the model or the texts cannot do is skipped with a reason.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nexus import artifact
from nexus.canonical import sha256_of, write_atomically
from nexus.config import ROOM_TOKENS, ROOT, ConfigError, compose, validate
from nexus.listing import write_listing
from nexus.model_probe import ModelFacts
from nexus.registry import Tool, load_registry
from nexus.routing_workload import FORM, RoutingCase, load_cases
from nexus.run_folder import SKIPPED
from nexus.workload import WorkloadError

PREFIX = "own"
INPUTS = "inputs"
# Longest part of a run's name that a file's name makes.
SLUG_LENGTH = 24
# Every third query with a tool is for the calibration of thresholds and is asked nowhere else.
CALIBRATION_EVERY = 3
# A block lies beside its repaired copy and that copy's parts.
COPIES = 3
# These decode step by step and cut their sequence back.
CUTTING = ("sidecar_accuracy", "constrain_cost", "l0_radix")
# What a model reads and answers there says nothing unless it was taught to answer.
ANSWERING = ("sidecar_accuracy", "spliced_choice")
# These place blocks. `layouts` does, too, and is the table of what is refused.
SPLICING = ("dkl_sweep", "splice_cost", "rope_boundary_gate", "repair_frontier", "calibrated_repair",
            "deep_splice_ttft", "gating_nogo", "spliced_choice")
LISTS_OF_DEPTHS = ("n_past", "offsets", "depths")


@dataclass(frozen=True)
class OwnTuple:
    """What the user gave; at least one of the three is theirs."""

    model: str | None
    """A name of conf/model or the path of a GGUF file; None takes the default model."""
    registry: Path | None
    """Absolute path of a JSON file of tools; None takes conf/registry's servers."""
    queries: Path | None
    """Absolute path of a JSON-lines file of queries, each with the tool that answers it; None takes the project's."""

    @property
    def name(self) -> str:
        """Names the run: the files' names, and 8 digits of the hash of their paths: two files may share a name."""
        own_model = self.model is not None and is_path(self.model)
        files = (placed(self.model) if own_model else None, self.registry, self.queries)
        paths = [file and str(file) for file in files]
        parts = [Path(path).stem for path in paths if path]
        if not own_model:
            parts.insert(0, self.model or compose()["model"]["name"])
        digits = sha256_of([self.model if not own_model else None, *paths])[:8]
        return "-".join([PREFIX, *(slug for part in parts if (slug := _slug(part))), digits])


def is_path(model: str) -> bool:
    """Whether a model is given as a file and not as a name of conf/model."""
    return os.sep in model or model.endswith(".gguf")


def placed(path: str | Path) -> Path:
    """The absolute path; a link keeps its own name, since what it leads to may be named by a hash."""
    return Path(os.path.abspath(Path(path).expanduser()))


def quoted(text: str) -> str:
    """The text as a value in Hydra's grammar, where a backslash counts only before a quote."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\'", text) + "'"


def overrides(own: OwnTuple, profile: str | None) -> list[str]:
    """Hydra overrides for the registry, the queries and the name of the run. Raises ConfigError for missing files."""
    if own.registry is not None and own.queries is None:
        raise ConfigError("registry: your tools need queries that they answer; give them too: QUERIES=queries.jsonl, "
                          f"or --queries FILE, {FORM}")
    chosen = []
    for group, path in (("registry", own.registry), ("workload", own.queries)):
        if path is not None:
            if not path.is_file():
                raise ConfigError(f"{'registry' if group == 'registry' else 'queries'}: {path} is not a file; give "
                                  f"{'a JSON file of tools' if group == 'registry' else FORM}")
            chosen += [f"{group}=file", f"{group}.path={quoted(str(path))}"]
    return [*chosen, f"run_name={own.name}" + (f".{profile}" if profile else "")]


def write_inputs(own: OwnTuple, values: dict[str, Any], folder: Path) -> list[str]:
    """What was left out, a line each, after the texts of the experiments are in `folder` and `values` names them.

    `values` is a composed configuration and is changed in place. Raises RegistryError and WorkloadError, which name
    entry or line, for files that cannot be used.
    """
    if own.queries is None:
        return []
    if own.registry is None:
        # Their tools are known only after the servers were asked; the form is checked now.
        load_cases(own.queries, [], known_only=True)
        return []
    registry = load_registry(own.registry)
    cases = load_cases(own.queries, registry.tools)
    answered = [case for case in cases if case.tool is not None]
    if len(answered) < 2:
        raise WorkloadError(f"{own.queries}: {len(answered)} queries name a tool; give at least 2, one of which is "
                            "kept for the calibration of thresholds")
    folder.mkdir(parents=True, exist_ok=True)
    kept = [case for i, case in enumerate(answered) if (i + 1) % CALIBRATION_EVERY == 0] or answered[-1:]
    none = [case for case in cases if case.tool is None]
    if len(none) < 2:
        # The threshold below which no tool is said to fit needs some queries of that kind.
        project = load_cases(ROOT / values["workload"]["routing"]["training"], [], known_only=True)
        none = [case for case in project if case.tool is None]
    calibration = kept + none[::2]
    paths = {
        "evaluation": _write_cases(folder / "evaluation.jsonl", [case for case in answered if case not in kept]),
        "adversarial": _write_cases(folder / "calibration.jsonl", kept),
        "development": _write_cases(folder / "development.jsonl", kept + none[1::2]),
        "training": _write_cases(folder / "training.jsonl", calibration),
    }
    values["workload"]["routing"] = paths
    values["workload"]["path"] = paths["evaluation"]
    _write_splicing(values, registry.tools, answered, folder)
    return [f"entry {problem.index} ({problem.name}) of {own.registry.name} is no tool: {problem.reason}"
            for problem in registry.problems]


def fit(values: dict[str, Any], own: OwnTuple, facts: ModelFacts) -> tuple[dict[str, str], list[str]]:
    """Reasons by skipped experiment, and every size that was changed, after `values` fits the model and the texts.

    `values` is a composed configuration and is changed in place.
    """
    skipped: dict[str, str] = {}
    changed: list[str] = []

    def resize(section: str, key: str, size: Any) -> None:
        before = values[section][key]
        if before != size:
            changed.append(f"{section}.{key}: {_short(before)} → {_short(size)}")
            values[section][key] = size

    # Of a user's case no other model is a part.
    resize("layouts", "also", [])
    cfg = validate(values)
    splicing = [name for name in artifact.experiments() if name in values and values["workload"]["queries"]
                in cfg.texts(name)]
    if facts.problem is not None:
        # Which model it is decides nothing there.
        alone = {"slb_latency", "calibration", "routing_generalisation", "block_allocator"}
        return {name: facts.problem for name in artifact.experiments() if name not in alone}, changed
    if facts.refusal is not None:
        skipped |= dict.fromkeys(SPLICING, facts.refusal)
    if not facts.keeps_tokens:
        reason = f"{facts.refusal}; what was decoded cannot be taken back token by token"
        skipped |= dict.fromkeys(CUTTING, reason)
        resize("routing_accuracy_n250", "baselines", [])
    if not facts.has_template:
        reason = "the file has no chat template: a model that was not taught to answer is not asked"
        skipped |= dict.fromkeys(ANSWERING, reason)
        resize("routing_accuracy_n250", "baselines", [])
    if own.queries is not None and own.registry is not None:
        skipped.setdefault("sidecar_accuracy", "its cases are for the tools of conf/registry's servers, and need a "
                                               "conversation each; your queries have none")
    elif own.queries is not None:
        changed.append("routing_accuracy_n250 asks your queries; thresholds and arguments are the project's")

    if 0 < facts.n_ctx_train < values["runtime"]["n_ctx"]:
        resize("runtime", "n_ctx", facts.n_ctx_train)
        resize("runtime", "n_batch", min(values["runtime"]["n_batch"], facts.n_ctx_train // 2))
        values["dkl_sweep"]["floor_n_batch"] = min(values["dkl_sweep"]["floor_n_batch"],
                                                   values["runtime"]["n_batch"] // 2)
    n_ctx = values["runtime"]["n_ctx"]
    depths = {(name, key): depth_list for name in artifact.experiments() if isinstance(values.get(name), dict)
              for key, depth_list in values[name].items() if key in LISTS_OF_DEPTHS and isinstance(depth_list, list)}
    shallow = min(n_ctx - ROOM_TOKENS, facts.conversation_tokens)
    for (name, key), listed in depths.items():
        fitting = [depth for depth in listed if depth <= shallow]
        if fitting:
            resize(name, key, fitting)
        else:
            skipped.setdefault(name, f"its smallest depth is {listed[0]} tokens, and context and conversation have "
                                     f"room for {shallow}")
            # A configuration needs some depth, also of what is skipped.
            values[name][key] = [max(1, shallow)]
    deepest = max((depth for (name, key) in depths for depth in values[name][key]), default=0)
    room = (n_ctx - deepest - facts.system_tokens - facts.query_tokens) // COPIES
    n_cases = _keep_fitting(values, facts, room) if own.registry is not None else None
    if n_cases == 0:
        least = min(facts.block_tokens.values(), default=0)
        reason = (f"the smallest schema has {least} tokens; beside {deepest} tokens of context {room} fit; "
                  "raise runtime.n_ctx")
        skipped |= {name: reason for name in splicing}
    elif n_cases is not None:
        for name in splicing:
            for key in ("n_cases", "n_calibration"):
                if key in values[name]:
                    resize(name, key, max(min(values[name][key], n_cases), 2 if key == "n_calibration" else 1))
        if n_cases < 2:
            skipped.setdefault("calibrated_repair", "it needs at least 2 queries whose tools fit the context")
    if own.registry is not None:
        n_tools = len(load_registry(own.registry).tools)
        for name in artifact.experiments():
            if isinstance(values.get(name), dict) and isinstance(values[name].get("n_tools"), list):
                fitting = [n for n in values[name]["n_tools"] if n <= n_tools] or [n_tools]
                resize(name, "n_tools", sorted({*fitting, n_tools} if name == "routing_accuracy_n250" else {*fitting}))
    return skipped, changed


def reason_of(error: BaseException) -> str | None:
    """What an experiment says where this model or these texts cannot do it; None where it failed otherwise."""
    from nexus.agent import AgentError
    from nexus.blocks import BlockError
    from nexus.constrain import ConstrainError
    from nexus.in_context import InContextError
    from nexus.name_automaton import AutomatonError
    from nexus.prefix_cache import PrefixCacheError
    from nexus.prompt import PromptError
    from nexus.repair import RepairError
    from nexus.route import RouteError
    from nexus.runtime import RuntimeFailure
    from nexus.sidecar import SidecarError
    from nexus.splice import SpliceRefused
    from nexus.tables import MissingArtifact

    if isinstance(error, MissingArtifact):
        # What is missing was skipped: the command that would make it is no remedy.
        return str(error).partition("; make it with")[0].removeprefix(f"{ROOT}{os.sep}")
    refusals = (AgentError, AutomatonError, BlockError, ConfigError, ConstrainError, InContextError, PrefixCacheError,
                PromptError, RepairError, RouteError, RuntimeFailure, SidecarError, SpliceRefused, WorkloadError)
    return str(error) if isinstance(error, refusals) else None


def memory_problem(size_bytes: int) -> str | None:
    """Why weights of this size cannot be loaded here, None if they can."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes <= 0.9 * total:
        return None
    return f"the weights are {size_bytes / 1e9:.1f} GB and this machine has {total / 1e9:.1f} GB of memory"


def write_params(values: Mapping[str, Any], path: Path) -> None:
    """None, after `path` holds the configuration in the form of params.yaml."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(dict(values))))


def write_skipped(skipped: Mapping[str, str], out: Path) -> None:
    """None, after `<out>/skipped.json` holds the reasons, by experiment; no such file without any."""
    path = out / SKIPPED
    if skipped:
        write_atomically(path, json.dumps(dict(sorted(skipped.items())), ensure_ascii=False, indent=1) + "\n")
    else:
        path.unlink(missing_ok=True)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._")[:SLUG_LENGTH].rstrip("-._")


def _short(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, list) else f"[{', '.join(map(str, value))}]"


def _write_cases(path: Path, cases: Sequence[RoutingCase]) -> str:
    """The path relative to the repository, after the cases are there in the form of nexus/routing_workload.py."""
    def identity(tool: tuple[str | None, str]) -> dict[str, str | None]:
        return {"server": tool[0], "tool": tool[1]}

    lines = []
    for case in cases:
        entry = {"id": case.id, "query": case.query, **identity(case.tool or (None, None)), "args": case.args,
                 "wording": case.wording, "also": [identity(tool) for tool in case.also],
                 "confusable": case.confusable and identity(case.confusable)}
        # "tool": null says that none fits; of the others it says nothing.
        told = {key: value for key, value in entry.items() if key == "tool" or value not in (None, [])}
        lines.append(json.dumps(told, ensure_ascii=False))
    write_atomically(path, "\n".join(lines) + "\n")
    return os.path.relpath(path, ROOT)


def _write_splicing(values: dict[str, Any], tools: Sequence[Tool], cases: Sequence[RoutingCase], folder: Path) -> None:
    """Let the experiments that splice take the user's tools: each one's first query, then the others."""
    bearers = Counter(tool.name for tool in tools)
    # A block is identified by the tool's name alone.
    named = [case for case in cases if bearers[case.tool[1]] == 1]
    if not named:
        return
    first = {case.tool: case for case in reversed(named)}
    ordered = [case for case in named if case is first[case.tool]] + [
        case for case in named if case is not first[case.tool]]
    write_listing(folder / "tools.json", [tool for tool in tools if tool.identity in first])
    lines = [json.dumps({"id": case.id, "tool": case.tool[1], "query": case.query}, ensure_ascii=False)
             for case in ordered]
    write_atomically(folder / "queries.jsonl", "\n".join(lines) + "\n")
    for key, name in (("tools", "tools.json"), ("queries", "queries.jsonl")):
        values["workload"][key] = os.path.relpath(folder / name, ROOT)


def _keep_fitting(values: dict[str, Any], facts: ModelFacts, room: int) -> int:
    """How many cases are left, after `values` names a file without those whose blocks have more than `room` tokens."""
    path = ROOT / values["workload"]["queries"]
    # Not by lines of str.splitlines, which JSON may hold within a string.
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    kept = [line for line in lines if facts.block_tokens.get(json.loads(line)["tool"], 0) <= room]
    if kept and len(kept) < len(lines):
        fitting = path.with_name("fitting_queries.jsonl")
        write_atomically(fitting, "\n".join(kept) + "\n")
        values["workload"]["queries"] = os.path.relpath(fitting, ROOT)
    return len(kept)
