"""Published queries from a stand-in folder: tools once by name, queries with their answer, bytes that are checked."""
from __future__ import annotations

import hashlib
import json

import pytest

from nexus import public_queries as module
from nexus.carriers import WeightsError
from nexus.public_queries import public_queries
from nexus.registry import Tool


def function(name, description="What it does."):
    return {"name": name, "description": description, "parameters": {"type": "dict", "properties": {}}}


def question(id_, functions, *turns):
    turns = [{"role": role, "content": content} for role, content in turns]
    return {"id": id_, "question": [turns], "function": functions}


def answer(id_, name):
    return {"id": id_, "ground_truth": [{name: {"x": [1]}}]}


QUESTIONS = {
    "simple": [question("simple_0", [function("area", "Area of a circle.")], ("user", "How large is it?")),
               question("simple_1", [function("math.sum")], ("system", "You are kind."), ("user", "Add 1"),
                        ("user", "and 2.")),
               question("simple_2", [function("math.sum")], ("user", " "))],
    "live": [question("live_0", [function("noise"), function("area", "Another text.")], ("user", "Größe ermitteln"))],
}
ANSWERS = {"simple": [answer("simple_2", "math.sum"), answer("simple_1", "math.sum"), answer("simple_0", "area")],
           "live": [answer("live_0", "area")]}


def text(lines):
    # Blank lines occur in the published files.
    return ("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n").encode()


MEMBERS = {member: text(lines) for part in QUESTIONS
           for member, lines in ((f"BFCL_v4_{part}.json", QUESTIONS[part]),
                                 (f"possible_answer/BFCL_v4_{part}.json", ANSWERS[part]))}


def known(member):
    return hashlib.sha256(MEMBERS[member]).hexdigest(), len(MEMBERS[member])


@pytest.fixture
def fetched(monkeypatch):
    """What is asked of the package, which has MEMBERS; a list of (member, bytes)."""
    asked = []

    def fetch(carrier, name, size, targets):
        assert (carrier.packages, carrier.version) == ([module.PACKAGE], module.VERSION)
        assert carrier.member == f"bfcl_eval/data/{name}"
        asked.append((name, size))
        target, = targets
        target.write_bytes(MEMBERS[name])
        return target

    parts = {part: (known(f"BFCL_v4_{part}.json"), known(f"possible_answer/BFCL_v4_{part}.json")) for part in QUESTIONS}
    monkeypatch.setattr(module, "FILES", {"bfcl": {"simple": parts["simple"]}, "bfcl-live": {"live": parts["live"]}})
    monkeypatch.setattr(module, "fetch", fetch)
    return asked


def test_a_name_comes_once_with_its_first_text(fetched, tmp_path):
    tools = public_queries(tmp_path).tools
    assert [(tool.name, tool.description) for tool in tools] == [
        ("area", "Area of a circle."), ("math.sum", "What it does."), ("noise", "What it does.")]
    assert tools[0] == Tool(None, "area", "Area of a circle.", {"type": "dict", "properties": {}})


def test_queries_are_what_users_say_with_the_tool_of_the_answer(fetched, tmp_path):
    public = public_queries(tmp_path)
    assert {name: [(case.id, case.query, case.tool) for case in cases] for name, cases in public.cases.items()} == {
        "bfcl": [("simple_0", "How large is it?", (None, "area")), ("simple_1", "Add 1 and 2.", (None, "math.sum"))],
        "bfcl-live": [("live_0", "Größe ermitteln", (None, "area"))]}
    # Where two functions have one name, either counts: the registry has it once.
    assert public.cases["bfcl-live"][0].accepts(public.tools[0])


def test_files_are_fetched_once(fetched, tmp_path):
    first = public_queries(tmp_path)
    assert sorted(fetched) == sorted((member, len(content)) for member, content in MEMBERS.items())
    assert public_queries(tmp_path) == first and len(fetched) == len(MEMBERS)


@pytest.mark.parametrize("member", MEMBERS)
def test_other_bytes_are_refused_and_fetched_again(fetched, tmp_path, member):
    good = public_queries(tmp_path)
    path = tmp_path / f"{module.PACKAGE}-{module.VERSION}" / member.replace("/", "-")
    path.write_bytes(MEMBERS[member].replace(b"area", b"Area"))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(WeightsError, match=f"{member} of bfcl-eval .*{found}, expected {known(member)[0]}; run again"):
        public_queries(tmp_path)
    assert not path.exists()
    assert public_queries(tmp_path) == good
    assert fetched[len(MEMBERS):] == [(member, len(MEMBERS[member]))]


def test_a_package_that_cannot_be_had_is_told(fetched, tmp_path, monkeypatch):
    def fetch(*_):
        raise WeightsError("pip could not fetch bfcl-eval")

    monkeypatch.setattr(module, "fetch", fetch)
    with pytest.raises(WeightsError, match="pip could not fetch bfcl-eval"):
        public_queries(tmp_path)


def test_the_published_files_are_named_by_hash_and_size():
    for parts in module.FILES.values():
        for questions, answers in parts.values():
            for sha256, size in (questions, answers):
                assert len(sha256) == 64 and int(sha256, 16) and size > 0
    hashes = [sha256 for parts in module.FILES.values() for part in parts.values() for sha256, _ in part]
    assert len(set(hashes)) == len(hashes)
