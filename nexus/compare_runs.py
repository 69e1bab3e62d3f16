"""How the intervals of one run compare with those of another, artifact by artifact. Loads no model."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus import artifact, tables
from nexus.canonical import write_atomically
from nexus.tables import MISSING

COMPARED = "compared.md"


@dataclass(frozen=True)
class Comparison:
    """One artifact of two runs."""

    experiment: str
    n_rows: int
    """Rows that both have, by their key columns."""
    n_overlapping: int
    """Those of them in which every interval that both have overlaps."""
    n_intervals: int
    """Intervals that both have."""
    n_intervals_overlapping: int
    typical: float | None
    """Median ratio of an interval's width to the other run's, where that has one; None without any."""
    widest: float | None
    """The largest of these ratios."""
    widest_of: str | None
    """Which metric of which row that is."""

    @property
    def share(self) -> float | None:
        """Share of the common rows whose intervals overlap, 0 to 1."""
        return self.n_overlapping / self.n_rows if self.n_rows else None


def compare(mine: Path, other: Path) -> list[Comparison]:
    """Every artifact that the folders `mine` and `other` both have. Raises ArtifactError for a damaged one."""
    return list(_compared(mine, other))


def markdown(comparisons: list[Comparison], mine: str, other: str) -> str:
    """The comparison as a document with one table."""
    columns = ["artifact", "common rows", "overlapping rows", "intervals", "overlapping intervals", "width, median",
               "at most", "where"]
    return tables.document(
        f"# {mine} beside {other}",
        "Rows with equal keys; a row overlaps where each of its intervals overlaps the other run's. Width: how "
        f"many times as wide as in {other} an interval is, at the median and at most.",
        tables.markdown(columns, [
            [row.experiment, row.n_rows, _percent(row.n_overlapping, row.n_rows), row.n_intervals,
             _percent(row.n_intervals_overlapping, row.n_intervals), _times(row.typical), _times(row.widest),
             row.widest_of or MISSING] for row in comparisons]))


def text(comparisons: list[Comparison], other: str) -> str:
    """The same for a terminal, short; '' where nothing is common."""
    if not comparisons:
        return ""
    lines = [f"Beside the committed results of {other}: common rows, those whose intervals overlap, and how "
             "many times as wide an interval is",
             f"  {'artifact':<24} {'rows':>6} {'overlap':>8} {'median':>8} {'at most':>8}"]
    for row in comparisons:
        lines.append(f"  {row.experiment:<24} {row.n_rows:>6} {_percent(row.n_overlapping, row.n_rows):>8} "
                     f"{_times(row.typical):>8} {_times(row.widest):>8}")
    return "\n".join(lines)


def write(mine: Path, other: Path) -> str:
    """The comparison for a terminal, after `<mine>/compared.md` holds the whole of it."""
    found = compare(mine, other)
    write_atomically(mine / COMPARED, markdown(found, mine.name, other.name))
    return text(found, other.name)


def _compared(mine: Path, other: Path) -> Iterator[Comparison]:
    for experiment in artifact.experiments():
        paths = [artifact.path_of(experiment, folder) for folder in (mine, other)]
        if not all(path.is_file() for path in paths):
            continue
        keys = artifact.key_columns(experiment)
        rows, others = ({tuple(row[key] for key in keys): row for row in artifact.read(path)["rows"]} for path in paths)
        common = [key for key in rows if key in others]
        n_overlapping = n_intervals = n_intervals_overlapping = 0
        widths: list[tuple[float, str]] = []
        for key in common:
            pairs = list(_intervals(rows[key], others[key]))
            overlapping = [low <= their_high and their_low <= high for _, (low, high), (their_low, their_high) in pairs]
            n_intervals += len(pairs)
            n_intervals_overlapping += sum(overlapping)
            n_overlapping += all(overlapping)
            widths += [((high - low) / (their_high - their_low), f"{name} of {', '.join(map(str, key))}")
                       for name, (low, high), (their_low, their_high) in pairs if their_high > their_low]
        widest, widest_of = max(widths, default=(None, None))
        typical = statistics.median(width for width, _ in widths) if widths else None
        yield Comparison(experiment, len(common), n_overlapping, n_intervals, n_intervals_overlapping, typical, widest,
                         widest_of)


def _intervals(row: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, tuple, tuple]]:
    """(name, interval, the other's interval) of every metric that has one on both sides."""
    for name, metric in row.items():
        pair = metric, other.get(name)
        if all(isinstance(side, Mapping) and side.get("ci_low") is not None for side in pair):
            yield name, *((side["ci_low"], side["ci_high"]) for side in pair)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else MISSING


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2g}×" if ratio < 100 else f"{ratio:.0f}×"
