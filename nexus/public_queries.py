"""Tools and queries that others published, for asking whether a router does as well on what it was not made for.

The Berkeley Function Calling Leaderboard (Patil et al.; Apache-2.0) comes inside the package `bfcl-eval`: functions of
many domains, each with a user's request. Its files are fetched by hash and never committed.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from nexus.carriers import PypiCarrier, WeightsError, fetch
from nexus.registry import Tool
from nexus.routing_workload import RoutingCase

PACKAGE, VERSION = "bfcl-eval", "2026.3.23"
# Per set: parts of the leaderboard, each with the SHA-256 and the bytes of its questions and of its answers.
FILES = {
    "bfcl": {
        "simple_python": (
            ("82dd63ba502eb2520c6b5d1d9a5c4b590e03ff261565175561f6228a367d1991", 283274),
            ("90cd5bc653690ee8e459b5b3f3fc9458606f7f3fcbf795bb51b7dc581f8c86dc", 63627),
        ),
        "multiple": (
            ("aef168155ebd74b7ac2401198b201343bc7d16d7a3d7e0d4e6d8ee82c6969b2a", 316583),
            ("244e00ce9395df948bcafc7bee64e8f9c87ef70887587d83cae45b13699f3047", 32254),
        ),
        "simple_java": (
            ("13d2303a125b08754f0e41995b9273b5005fa8ed8ebfaa24ef53b4d83c4b5c6e", 86619),
            ("78f25616084044fa05bbfcee68e03f6ececb222bdd5cb3b7783a675fb3366e35", 16407),
        ),
        "simple_javascript": (
            ("329e67fedf79a6243d93dbda4b388d12bd2d31f1f2163d92cb6ef676d1764f44", 47063),
            ("e2f9f2e51d88e0c8056ffbf1a3dd3d02eb032532d2b5d98c9cc9003385bdd56b", 7881),
        ),
    },
    "bfcl-live": {
        "live_simple": (
            ("1af2ac87dca47556db7b7e37e51e28b459a38b594e3c7b3c792b4903598ca0c4", 260140),
            ("fec9cfa9744a936f9126981e85a2023da1e63e273eafebc81923a1162fad70ce", 46972),
        ),
        "live_multiple": (
            ("fd8ccfad4d911420d0e3341dbe2fff77d1d341da934248b9bb2bda24ab3a10c8", 3891277),
            ("97e90d59c5bd76c55a2920ce93e5566e9046307d3f558578f085f9d3a56c3084", 199668),
        ),
    },
}


@dataclass(frozen=True)
class PublicQueries:
    tools: list[Tool]
    """Every function of all sets. A name comes once, with its first text: the answers give no more than the name."""
    cases: dict[str, list[RoutingCase]]
    """Per set."""


def public_queries(folder: Path) -> PublicQueries:
    """All of FILES over one registry, fetched into `folder` if need be.

    Raises WeightsError if the package cannot be fetched or its bytes are not the expected ones.
    """
    tools: dict[str, Tool] = {}
    cases: dict[str, list[RoutingCase]] = {name: [] for name in FILES}
    for name, parts in FILES.items():
        for part, (questions, answers) in parts.items():
            rights = {line["id"]: next(iter(line["ground_truth"][0]))
                      for line in _lines(f"possible_answer/BFCL_v4_{part}.json", answers, folder)}
            for line in _lines(f"BFCL_v4_{part}.json", questions, folder):
                for function in line["function"]:
                    tools.setdefault(function["name"], Tool(None, function["name"], function["description"],
                                                            function["parameters"]))
                query = " ".join(turn["content"] for turn in line["question"][0] if turn["role"] == "user")
                if query.strip():
                    cases[name].append(RoutingCase(line["id"], query, (None, rights[line["id"]])))
    return PublicQueries(list(tools.values()), cases)


def _lines(member: str, known: tuple[str, int], folder: Path) -> list[dict]:
    sha256, size = known
    path = folder / f"{PACKAGE}-{VERSION}" / member.replace("/", "-")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        carrier = PypiCarrier(kind="pypi", packages=[PACKAGE], version=VERSION, member=f"bfcl_eval/data/{member}")
        fetch(carrier, member, size, [path])
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        path.unlink()
        raise WeightsError(f"{member} of {PACKAGE} {VERSION} has the SHA-256 {found}, expected {sha256}; run again")
    # Not str.splitlines: it would also split at U+2028, which JSON allows inside a string.
    return [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]
