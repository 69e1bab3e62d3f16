"""The `nexus` command. Each subcommand loads only what it needs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nexus.pipeline import debugging, one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 for success, 1 for an error, told in one line, 130 when stopped with Ctrl-C."""
    args = _parser().parse_args(arguments)
    try:
        return args.call(args) or 0
    except KeyboardInterrupt:
        print("nexus: stopped; the same command goes on where it stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if debugging():
            raise
        print("\n".join(f"nexus: {line}" for line in one_line(error).splitlines()), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nexus", description="Measure when a compiled KV block can be moved.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(call=call)
        return added

    repro = command("repro", _repro, "run the whole pipeline, or say that it was run here already")
    _add_choices(repro)
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

    command("doctor", _doctor, "check this machine and installation, and say how to mend what is wrong")

    params = command("params", _params, "write params.yaml, the composition of conf/'s defaults")
    params.add_argument("--check", action="store_true", help="write nothing; fail if it is not up to date")

    stage = command("stage", _stage, "run one experiment with the configuration in a params file (what DVC calls)")
    stage.add_argument("name", help="a module in experiments/")
    stage.add_argument("--params", type=Path, default=Path("params.yaml"))
    stage.add_argument("--run", help="refuse unless the configuration is this run's")
    return parser


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME|PATH", help="a file in conf/model, or the path of a GGUF file")
    parser.add_argument("--profile", metavar="NAME", help="a file in conf/profile")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return value


def _repro(args: argparse.Namespace) -> None:
    from nexus.reproduce import reproduce

    reproduce(args.model, args.profile, args.force)


def _verify(args: argparse.Namespace) -> int:
    from nexus.lockfile import verify

    problems = verify()
    print("\n".join(problems) if problems else "Results match dvc.lock.")
    return 1 if problems else 0


def _compile(args: argparse.Namespace) -> int:
    from nexus import compile_blocks
    from nexus.config import compose, validate
    from nexus.reproduce import overrides_for

    return compile_blocks.run(args, validate(compose(overrides_for(args.model, args.profile))))


def _route(args: argparse.Namespace) -> int:
    from nexus import route_command
    from nexus.config import compose, validate

    return route_command.run(args, validate(compose()))


def _call(args: argparse.Namespace) -> int:
    from nexus import call_command
    from nexus.config import compose, validate
    from nexus.reproduce import overrides_for

    return call_command.run(args, validate(compose()), validate(compose(overrides_for(args.model, None))).model)


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
    from nexus.pipeline import stage

    stage(args.name, args.params, args.run)
