"""CITATION.cff: what cites the software, and that it names the release and the paper that is tested."""
from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
# What version 1.2.0 of the format requires at the top and of a reference.
REQUIRED = {"cff-version", "message", "title", "authors"}
OF_A_REFERENCE = {"type", "title", "authors"}


@pytest.fixture(scope="module")
def citation() -> dict:
    # The loader refuses a key that stands there twice.
    return YAML(typ="safe").load(ROOT / "CITATION.cff")


def test_required_keys_are_there_and_say_something(citation):
    assert REQUIRED <= set(citation) and citation["cff-version"] == "1.2.0"
    assert all(citation[key] for key in REQUIRED) and citation["title"] == "Nexus" and citation["type"] == "software"
    assert all(set(author) & {"name", "family-names", "alias"} for author in citation["authors"])


def test_release_and_licence_are_the_packages(citation):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_paper_that_is_tested_is_a_reference(citation):
    [paper] = citation["references"]
    assert OF_A_REFERENCE <= set(paper) and paper["title"].startswith("Nexus: Depth-Adaptive KV-Cache Splicing")
    assert "tests" in paper["scope"] and paper["authors"]


def test_no_line_is_longer_than_a_reader_wants():
    assert max(map(len, (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines())) <= 120
