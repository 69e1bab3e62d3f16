"""The files that an experiment's results depend on, found by reading the source: imports, kernels, files beside it.

`dvc.yaml` lists the same files by hand; a test keeps the two equal.
"""
import ast
import re
from functools import cache
from pathlib import Path

from nexus.provenance import source_digest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("nexus", "experiments")
# These hand over a configuration, fetch bytes that are checked by hash, or turn samples into rows and files. What is
# sampled does not depend on them: a change in one runs a stage again, but does not throw measured cells away.
NOT_SAMPLING = frozenset(
    f"nexus/{name}"
    for name in (
        "__init__.py", "artifact.py", "artifact.schema.json", "carriers.py", "cells.py", "config.py",
        "embedder_spec.py", "locks.py", "pipeline.py", "progress.py", "provenance.py", "registry_spec.py", "sources.py",
        "stats.py", "sweep.py", "tables.py", "weights.py",
    )
) | {"experiments/rows.py"}


@cache
def sources(module: str) -> tuple[str, ...]:
    """Sorted paths, relative to the repository, of everything first-party that `module` needs, itself included.

    Followed are imports anywhere in a file, string constants that name a kernel header or a file beside the module,
    and the headers' own includes. Raises ModuleNotFoundError if `module` is not in the repository.
    """
    if _module_file(module) is None:
        raise ModuleNotFoundError(f"no module {module} below {', '.join(PACKAGES)}", name=module)
    found: set[Path] = set()
    waiting = [path for path in _with_packages(module) if path is not None]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _needs(path)
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in found))


def code_sha256(module: str) -> str:
    """SHA-256 (64 hex digits) of all source that `module` needs."""
    return source_digest(ROOT / path for path in sources(module))


def sampling_sha256(module: str) -> str:
    """SHA-256 (64 hex digits) of the source that determines the samples of `module`: for the keys of its cells."""
    return source_digest(ROOT / path for path in sources(module) if path not in NOT_SAMPLING)


def _needs(path: Path) -> list[Path]:
    if path.suffix == ".py":
        return _python_needs(path)
    if path.suffix in (".h", ".hpp"):
        included = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
        return [header for name in included if (header := path.parent / name).is_file()]
    return []


def _python_needs(path: Path) -> list[Path]:
    needed: list[Path | None] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Import():
                needed += [file for alias in node.names for file in _with_packages(alias.name)]
            case ast.ImportFrom(module=str(module), level=0):
                # `from package import module` and `from module import name` look alike.
                needed += _with_packages(module)
                needed += [_module_file(f"{module}.{alias.name}") for alias in node.names]
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w-]+(\.[\w-]+)+", text):
                needed += [file for folder in (ROOT / "kernels", path.parent) if (file := folder / text).is_file()]
    return [file for file in needed if file is not None]


def _with_packages(module: str) -> list[Path | None]:
    parts = module.split(".")
    return [_module_file(".".join(parts[:length])) for length in range(1, len(parts) + 1)]


def _module_file(module: str) -> Path | None:
    if module.split(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
