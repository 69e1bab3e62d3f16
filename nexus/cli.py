"""The `nexus` command. Each subcommand loads only what it needs."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

# Commands that keep what they have done.
RESUMED = ("repro", "compile", "stage")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 for success, 1 for an error, told in one line, 130 when stopped with Ctrl-C."""
    args = argparse.Namespace(command=None)
    try:
        args = _parser().parse_args(arguments)
        # Only now, since it takes a second, and Ctrl-C may come at once.
        from nexus.pipeline import debugging, one_line

        try:
            status = args.call(args) or 0
            if sys.stdout is not None:
                sys.stdout.flush()
            return status
        except Exception as error:
            if debugging():
                raise
            for line in one_line(error).splitlines():
                print(f"nexus: {_printable(line)}", file=sys.stderr)
            _drop_output()
            return 1
    except KeyboardInterrupt:
        goes_on = "; the same command goes on where it stopped" if args.command in RESUMED else ""
        print(f"nexus: stopped{goes_on}", file=sys.stderr)
        return 130


def _printable(line: str) -> str:
    """The line as it may stand in a terminal: names and answers are other people's and may hold control characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def _drop_output() -> None:
    """Drop what standard output does not take, such as a pipe whose reader has left: at exit it would be tried again,
    with a traceback."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nexus", description="Measure when a compiled KV block can be moved.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(call=call, command=name)
        return added

    repro = command("repro", _repro, "run the whole pipeline, or say that it was run here already")
    _add_choices(repro)
    repro.add_argument("--registry", type=Path, metavar="FILE",
                       help="JSON file of your own tools, such as an MCP tools/list result; needs --queries")
    repro.add_argument("--queries", type=Path, metavar="FILE",
                       help='your own queries, {"query", "tool"} per line; "tool": null where none fits')
    repro.add_argument("--force", action="store_true", help="measure again what was measured here before")

    command("verify", _verify, "say whether results match dvc.lock, without running anything")

    compile_ = command("compile", _compile, "compile the tools of a registry file to .atb blocks")
    compile_.add_argument("registry", type=Path, help="JSON file of tools")
    compile_.add_argument("--out", type=Path, required=True, help="folder for the blocks")
    compile_.add_argument("--behind", default="system", metavar="NAME",
                          help="what to compile behind: system (default), preamble-<tokens>, ensemble-<texts>x<tokens>")
    _add_choices(compile_)

    route = command("route", _route, "find the tools of a registry that a query most likely means")
    route.add_argument("query", help="what shall be done, in your words")
    route.add_argument("--registry", type=Path, metavar="FILE",
                       help="JSON file of tools; without it, the tools of conf/registry's servers, collected once")
    route.add_argument("--top", type=_positive, default=5, metavar="N", help="how many to show (5)")
    route.add_argument("--system", metavar="NAME",
                       help="one of nexus.route.SYSTEMS, such as slb, bm25, hybrid or linear-tuned+gate")
    route.add_argument("--json", action="store_true", help="print JSON instead of a table")

    call = command("call", _call, "turn a query into the call of one tool, and run it if wanted")
    call.add_argument("query", help="what shall be done, in your words")
    call.add_argument("--history", type=Path, metavar="FILE",
                      help='the conversation so far: JSON list, or one object per line, of {"role", "content", "name"?}')
    call.add_argument("--registry", type=Path, metavar="FILE",
                      help="JSON file of tools; without it, the tools of conf/registry's servers, collected once")
    call.add_argument("--model", metavar="NAME|PATH", help="a file in conf/model, or the path of a GGUF file")
    call.add_argument("--tool", metavar="SERVER/NAME", help="call this tool instead of looking for one")
    call.add_argument("--execute", action="store_true", help="run the call on the MCP server that owns the tool")
    call.add_argument("--yes", action="store_true", help="do not ask before a tool that is not annotated read-only")

    advise = command("advise", _advise, "say from measured artifacts how to offer tools: as a cached prefix, spliced, "
                                        "or by routing")
    _add_choices(advise)
    advise.add_argument("--registry", type=Path, metavar="FILE", help="JSON file of the tools")
    advise.add_argument("--tools", type=_positive, metavar="T",
                        help="how many tools the agent has (as many as the registry)")
    advise.add_argument("--depth", type=_count, required=True, metavar="N", help="tokens of the conversation so far")
    advise.add_argument("--reading", choices=("automaton", "free"), default="automaton",
                        help="how a tool is named in context: under the automaton of names (default), or freely")
    advise.add_argument("--all", action="store_true", help="show every option that was measured")
    advise.add_argument("--json", action="store_true", help="print JSON instead of tables")

    report = command("report", _report, "write report.html of all committed runs, or of one run, from their artifacts")
    report.add_argument("run", nargs="?", metavar="RUN", help="a folder below results/ (default: all committed runs)")

    command("doctor", _doctor, "check this machine and installation, and say how to mend what is wrong")

    params = command("params", _params, "write params.yaml, the composition of conf/'s defaults")
    params.add_argument("--check", action="store_true", help="write nothing; fail if it is not up to date")

    stage = command("stage", _stage, "run one experiment with the configuration in a params file (what DVC calls)")
    stage.add_argument("name", help="a module in experiments/")
    stage.add_argument("--params", type=Path, default=Path("params.yaml"))
    stage.add_argument("--run", help="refuse unless the configuration is this run's")
    stage.add_argument("--skipped", type=Path, metavar="FILE",
                       help="where the model or the texts cannot do it, write the reason there and succeed")
    return parser


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME|PATH", help="a file in conf/model, or the path of a GGUF file")
    parser.add_argument("--profile", metavar="NAME", help="a file in conf/profile")


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _repro(args: argparse.Namespace) -> None:
    from nexus.reproduce import reproduce

    reproduce(_model_name(args.model), args.profile, args.force, args.registry, args.queries)


def _verify(args: argparse.Namespace) -> int:
    from nexus.lockfile import verify

    problems = verify()
    print("\n".join(problems) if problems else "Results match dvc.lock.")
    return 1 if problems else 0


def _compile(args: argparse.Namespace) -> int:
    from nexus import compile_blocks
    from nexus.config import compose, validate
    from nexus.reproduce import overrides_for

    return compile_blocks.run(args, validate(compose(overrides_for(_model_name(args.model), args.profile))))


def _route(args: argparse.Namespace) -> int:
    from nexus import route_command
    from nexus.config import compose, validate

    return route_command.run(args, validate(compose()))


def _call(args: argparse.Namespace) -> int:
    from nexus import call_command
    from nexus.config import compose, validate
    from nexus.reproduce import overrides_for

    model = validate(compose(overrides_for(_model_name(args.model), None))).model
    return call_command.run(args, validate(compose()), model)


def _model_name(name: str | None) -> str | None:
    """The name or path that --model gives. Raises ConfigError for what is neither: Hydra would read it as a part of its
    grammar, and nothing at all as the default."""
    from nexus.config import ConfigError

    if name is not None and not (os.sep in name or MODEL_NAME.fullmatch(name)):
        raise ConfigError(f"--model {name!r} is no name; give the path of a GGUF file or a name from conf/model")
    return name


def _advise(args: argparse.Namespace) -> int:
    from nexus import advise_command
    from nexus.config import compose, validate
    from nexus.reproduce import overrides_for

    return advise_command.run(args, validate(compose(overrides_for(_model_name(args.model), args.profile))))


def _report(args: argparse.Namespace) -> None:
    from nexus import report
    from nexus.config import ROOT, compose, validate

    results = ROOT / validate(compose()).results_folder
    if args.run is None:
        print(report.write(report.committed(results), results / report.NAME, "all committed runs"))
    else:
        run = report.load(results / args.run)
        print(report.write([run], run.folder / report.NAME, run.name))


def _doctor(args: argparse.Namespace) -> int:
    from nexus import doctor

    return doctor.report(args)


def _params(args: argparse.Namespace) -> int:
    from nexus.canonical import write_atomically
    from nexus.config import ROOT, params_text

    path, text = ROOT / "params.yaml", params_text()
    if args.check:
        current = path.is_file() and path.read_text(encoding="utf-8") == text
        print("params.yaml is the composition of conf/" if current else "params.yaml is out of date: run `make params`")
        return 0 if current else 1
    write_atomically(path, text)
    return 0


def _stage(args: argparse.Namespace) -> None:
    from nexus import stage_times
    from nexus.pipeline import stage

    try:
        with stage_times.timed(args.run, args.name):
            stage(args.name, args.params, args.run)
    except Exception as error:
        from nexus.canonical import write_atomically
        from nexus.own_tuple import reason_of

        if args.skipped is None or (reason := reason_of(error)) is None:
            raise
        write_atomically(args.skipped, reason)
