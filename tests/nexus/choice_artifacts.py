"""Toy artifacts of choosing tools, spliced and by routing, for the tests of advice."""
from __future__ import annotations

from nexus import stats
from nexus.measured_options import Measured

CPU = "toy CPU"
QUERIES = 60
MODEL = {"name": "toy", "n_ctx_train": 8192}


def measured(experiment: str, rows: list[dict], samples: list[dict], **config) -> Measured:
    """An artifact of the toy machine, in the form in which `nexus.artifact` reads it."""
    return Measured({"experiment": experiment, "tuple": {"model": "toy", "model_sha256": "0" * 64},
                     "config": {"model": MODEL, **config}, "provenance": {"cpu": CPU, "threads": 2}, "rows": rows},
                    samples)


def times(value: float | None, n: int = QUERIES) -> dict | None:
    """A time with an interval of a tenth to both sides, ms."""
    return None if value is None else {"value": value, "ci_low": 0.9 * value, "ci_high": 1.1 * value, "n": n,
                                       "method": "percentile-bootstrap", "level": 0.95}


def share(value: float, n: int = QUERIES) -> dict:
    return stats.wilson(round(value * n), n).row()


def answers(value: float, n: int, wrong_first: bool = False) -> list[bool]:
    """So large a share of right answers, those that are wrong at the end or at the beginning."""
    right = [i < round(value * n) for i in range(n)]
    return right[::-1] if wrong_first else right


def spliced_choice(accuracies: dict, ttft_ms: dict | None = None, free: dict | None = None, n: int = QUERIES,
                   wrong_first: tuple = (), behind: str = "system") -> Measured:
    """Accuracy under the automaton by (arm, tools, depth); by the same key times, and (accuracy, no call) when free."""
    ttft_ms, rows, samples = ttft_ms or {}, [], []
    read = {("automaton", key): (value, None) for key, value in accuracies.items()}
    read |= {("free", key): told for key, told in (free or {}).items()}
    for (reading, (arm, n_tools, depth)), (value, silent) in read.items():
        keys = {"arm": arm, "n_tools": n_tools, "depth": depth, "reading": reading,
                "compiled_behind": None if arm in ("full", "group", "noise_floor") else behind}
        time = ttft_ms.get((arm, n_tools, depth), 100.0)
        rows.append({**keys, "accuracy": share(value, n), "no_call_rate": None if silent is None else share(silent, n),
                     "ttft_ms": times(time, n)})
        samples += [{**keys, "part": "choice", "case": f"case-{i}", "correct": right, "no_call": False}
                    for i, right in enumerate(answers(value, n, arm in wrong_first))]
        samples.append({key: keys[key] for key in ("arm", "n_tools", "depth", "compiled_behind")}
                       | {"part": "time", "ttft_ms": time})
    return measured("spliced_choice", rows, samples)


def routing(accuracies: dict, choice_ms: dict | None = None, default: str = "toy", n: int = 100,
            wrong_first: tuple = ()) -> Measured:
    """Accuracy by (system, tools), None for an overflow; times by system."""
    choice_ms, rows, samples = choice_ms or {}, [], []
    for (system, n_tools), value in accuracies.items():
        keys = {"n_tools": n_tools, "system": system}
        fits = value is not None
        rows.append({**keys, "status": "ok" if fits else "overflow", "accuracy": share(value, n) if fits else None,
                     "choice_ms": times(choice_ms.get(system, 10.0), n) if fits else None})
        samples += [{**keys, "case": f"eval-{i}", "right": right}
                    for i, right in enumerate(answers(value or 0.0, n, system in wrong_first))]
    return measured("routing_accuracy_n250", rows, samples, routing={"system": default})
