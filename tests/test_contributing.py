"""CONTRIBUTING.md: short recipes, and nothing in them that is not there."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from nexus import config, figures, repair, sources

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = {section.partition("\n")[0]: section.partition("\n")[2].strip("\n") for section in TEXT.split("\n## ")[1:]}
RECIPES = ("A model", "A repair arm", "A server", "An experiment")
# What the code is searched for, by the file that a recipe names before it.
NAMES = {"FAMILIES": repair, "EXPERIMENTS": config, "NEEDS": config, "UNREAD": config, "_PART": config,
         "Family": config, "FAMILY_STYLES": figures, "NOT_SAMPLING": sources}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_less_than_ten_lines(recipe: str):
    steps = SECTIONS[recipe].split("\n\n")[0]
    assert 3 <= len(steps.splitlines()) < 10


def test_files_that_are_named_are_there():
    named = set(re.findall(r"[\w./*-]+\.(?:py|yaml|json|jsonl|txt)\b", TEXT.replace("NAME", "*")))
    assert len(named) > 10
    gone = [name for name in named if not list(ROOT.glob(name)) and name != "results/comparison_sources.md"]
    assert gone == []


def test_names_in_the_code_that_are_named_are_there():
    told = [name for name in NAMES if f"`{name}`" in TEXT]
    assert told == list(NAMES) and all(hasattr(NAMES[name], name) for name in told)


def test_modules_and_targets_that_are_called_are_there():
    called = set(re.findall(r"-m ((?:experiments|nexus)\.\w+)", TEXT)) - {"experiments.NAME"}
    assert len(called) >= 3 and all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in called)
    targets = set(re.findall(r"\bmake (\w+)", TEXT))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and targets <= set(re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split())


def test_lines_are_short():
    assert max(map(len, TEXT.splitlines())) <= 120
