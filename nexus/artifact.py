"""Result artifacts (spec §5): validated JSON with one row per line, and the per-sample rows beside it.

The form is `artifact.schema.json`. An artifact holds no time and no place, so equal inputs give equal bytes.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from nexus.canonical import plain, sha256_of, write_atomically
from nexus.stats import Estimate

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(__file__).with_name("artifact.schema.json")
# Where an artifact does not have its experiment's name.
PATHS = {"sidecar_accuracy": "sidecar/accuracy"}


class ArtifactError(ValueError):
    """An artifact that does not have the form of `artifact.schema.json`; the message names the row and the key."""


def path_of(experiment: str, out: Path) -> Path:
    """Where the experiment's artifact is in a run's folder: `<out>/<experiment>.json`, but for those in PATHS."""
    return out / f"{PATHS.get(experiment, experiment)}.json"


def write(
    path: Path | str,
    *,
    experiment: str,
    tuple_: Mapping[str, Any],
    config: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    samples: Iterable[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The artifact as `read` returns it, after it and its samples are on disk.

    path         `<folder>/<stem>.json`; the samples go to `<stem>.samples.jsonl` in the same folder, before it
    experiment   the name of a block of `artifact.schema.json`, which says what a row holds and what identifies it
    rows         key columns, an optional `status`, and metrics: an `Estimate`, its `row()`, or None if not measured
    samples      the measurements that the rows summarise, one flat dict each, numbers in full precision

    Raises ArtifactError, and writes nothing, for a number that is not finite, for what the schema refuses and for two
    rows with the same key columns; OSError if the folder cannot be written.
    """
    path = Path(path)
    row_schema = _row_schema(experiment)
    try:
        table = [plain(_metrics_as_rows(row), _name(index, row, row_schema)) for index, row in enumerate(rows)]
        measured = [plain(sample, f"sample {index}") for index, sample in enumerate(samples)]
        artifact = {
            "schema_version": SCHEMA_VERSION,
            "experiment": experiment,
            "tuple": plain(tuple_, "tuple"),
            "config": plain(config, "config"),
            "config_sha256": config_sha256(config),
            "provenance": plain(provenance, "provenance"),
            "rows": [_ordered(row, row_schema["properties"]) for row in table],
            "samples": f"{path.stem}.samples.jsonl",
        }
    except ValueError as error:
        raise ArtifactError(f"{path.name}: {error}") from error
    _check(artifact, path.name)
    if not measured:
        raise ArtifactError(f"{path.name}: no samples; keep the per-sample rows that the rows were computed from")

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (_line(_ordered(sample, row_schema["keyColumns"])) for sample in measured)
    write_atomically(path.with_name(artifact["samples"]), "".join(f"{line}\n" for line in lines))
    write_atomically(path, _text(artifact))
    return artifact


def read(path: Path | str) -> dict[str, Any]:
    """The artifact at `path`, validated as on writing; its config must have the hash that it states.

    Raises ArtifactError for a broken or invalid file, FileNotFoundError if there is none.
    """
    path = Path(path)
    try:
        # `plain` refuses NaN, which json reads, and 1e999, which it reads as infinity.
        artifact = plain(json.loads(path.read_text(encoding="utf-8")), "artifact")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path.name}: not valid JSON ({error}); measure it again") from error
    if isinstance(artifact, dict) and artifact.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise ArtifactError(f"{path.name}: schema_version is {artifact['schema_version']!r}, and this version of the "
                            f"code reads {SCHEMA_VERSION}; measure it again")
    _check(artifact, path.name)
    return artifact


def read_samples(path: Path | str) -> list[dict[str, Any]]:
    """The per-sample rows of the artifact at `path`, in the order of measurement. Errors: as `read`."""
    samples = Path(path).with_name(read(path)["samples"])
    try:
        # Not splitlines(): it also splits at U+2028 and others that a JSON string may hold.
        lines = samples.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        return [plain(json.loads(line), f"sample {index}") for index, line in enumerate(lines)]
    except FileNotFoundError:
        raise ArtifactError(f"{samples} is missing, the samples of {Path(path).name}; measure it again") from None
    except ValueError as error:
        raise ArtifactError(f"{samples.name}: not valid JSON lines ({error}); measure it again") from error


def config_sha256(config: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex digits) of the resolved config's canonical JSON; the order of keys does not matter."""
    return sha256_of(config, "config")


def experiments() -> list[str]:
    """The names of the experiments that the schema knows, in its order."""
    return [block["$ref"].rpartition("/")[2] for block in _schema()["oneOf"]]


def key_columns(experiment: str) -> list[str]:
    """The columns that identify a row of the experiment. Raises ArtifactError for an unknown name."""
    return list(_row_schema(experiment)["keyColumns"])


@cache
def _schema() -> dict[str, Any]:
    schema = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return schema


@cache
def _validator(experiment: str) -> Draft202012Validator:
    # The block alone, not the schema's oneOf: a failed oneOf cannot say which key of which row was wrong.
    return Draft202012Validator({"$ref": f"#/$defs/{experiment}", "$defs": _schema()["$defs"]})


def _row_schema(experiment: Any) -> dict[str, Any]:
    known = experiments()
    if experiment not in known:
        close = difflib.get_close_matches(str(experiment), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}; add it to {SCHEMA_PATH.name}"
        raise ArtifactError(f"experiment {experiment!r} is unknown: {hint}")
    return _schema()["$defs"][experiment]["properties"]["rows"]["items"]


def _check(artifact: Any, name: str) -> None:
    if not isinstance(artifact, dict):
        raise ArtifactError(f"{name}: an artifact is an object, not a {type(artifact).__name__}")
    row_schema = _row_schema(artifact.get("experiment"))
    error = best_match(_validator(artifact["experiment"]).iter_errors(artifact))
    if error is not None:
        where = _place(list(error.absolute_path), artifact, row_schema)
        raise ArtifactError(f"{name}: {where}{error.message}")
    if artifact["config_sha256"] != config_sha256(artifact["config"]):
        raise ArtifactError(f"{name}: config_sha256 is not the hash of config; measure it again, do not edit it")
    seen: dict[tuple, int] = {}
    for index, row in enumerate(artifact["rows"]):
        label = _name(index, row, row_schema)
        first = seen.setdefault(tuple(row[column] for column in row_schema["keyColumns"]), index)
        if first != index:
            raise ArtifactError(f"{name}: {label} has the same keys as row {first}: write each cell once")
        for key, metric in row.items():
            if isinstance(metric, dict):
                try:
                    Estimate(**metric)
                except ValueError as error:
                    raise ArtifactError(f"{name}: {label}.{key}: {error}") from error


def _metrics_as_rows(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item.row() if isinstance(item, Estimate) else item for key, item in row.items()}


def _name(index: int, row: Any, row_schema: Mapping[str, Any]) -> str:
    if not isinstance(row, Mapping):
        return f"row {index}"
    return f"row {index} ({', '.join(f'{column}={row.get(column)}' for column in row_schema['keyColumns'])})"


def _place(steps: list[str | int], artifact: dict[str, Any], row_schema: Mapping[str, Any]) -> str:
    head = ""
    if len(steps) >= 2 and steps[0] == "rows":
        head = _name(steps[1], artifact["rows"][steps[1]], row_schema)
        steps = steps[2:]
    place = ".".join([head, *map(str, steps)] if head else map(str, steps))
    return f"{place}: " if place else ""


def _ordered(row: dict[str, Any], first: Iterable[str]) -> dict[str, Any]:
    known = [key for key in first if key in row]
    return {key: row[key] for key in [*known, *sorted(row.keys() - set(known))]}


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _text(artifact: dict[str, Any]) -> str:
    parts = []
    for key, value in artifact.items():
        if key == "rows":
            text = "[\n" + ",\n".join(f" {_line(row)}" for row in value) + "\n]"
        else:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, indent=1)
        parts.append(f"{_line(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
