"""Rules of a grammar in llguidance's dialect of Lark, with the sizes that tell how soon a text can end."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_RULES = 50_000
# Bits of a rule's parameter that tell which members were written, and those that count members without a bit.
MEMBER_BITS = 56
COUNT_BITS = 6
# Control characters without a letter cannot be written: no argument needs them, and \u could spell half a pair.
JSON_OPTIONS = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
# Else a mask has only one of the tokens with which forced bytes can be written.
ALL_SPELLINGS = '%llguidance {"no_forcing": true}'


class SchemaGrammarError(ValueError):
    """No grammar can be made of a schema; the message says what it forbids or where it is too large."""


@dataclass(frozen=True)
class Rule:
    """What one rule writes, by its name, and the sizes by which a budget is kept."""

    name: str
    whole: int
    """Bytes, at most, that a completion writes for all of it."""
    closing: int
    """Bytes that the worst unfinished text of it lacks."""


class Rules:
    """A grammar under construction."""

    def __init__(self):
        self.rules: list[str] = []
        self.n_names = 0
        self.leaves: dict[str, Rule] = {}

    def text(self, start: Rule) -> str:
        """The grammar of what `start` writes."""
        return "\n".join([ALL_SPELLINGS, f"start: {start.name}", *self.rules]) + "\n"

    def name(self) -> str:
        if len(self.rules) > MOST_RULES:
            raise SchemaGrammarError(f"the schema needs more than {MOST_RULES} rules; make it smaller")
        self.n_names += 1
        return f"r{self.n_names}"

    def rule(self, body: str, whole: int, closing: int) -> Rule:
        name = self.name()
        self.rules.append(f"{name}: {body}")
        return Rule(name, whole, closing)

    def leaf(self, body: str, whole: int, closing: int) -> Rule:
        """A terminal, written once however often it is used."""
        if body not in self.leaves:
            name = self.name().upper()
            self.rules.append(f"{name}: {body}")
            self.leaves[body] = Rule(name, whole, closing)
        return self.leaves[body]

    def json_leaf(self, schema: dict[str, Any], whole: int, closing: int) -> Rule:
        """A value that llguidance converts itself, written once however often it is used."""
        body = json_rule(schema)
        if body not in self.leaves:
            self.leaves[body] = self.rule(body, whole, closing)
        return self.leaves[body]

    def literals(self, texts: Sequence[str]) -> Rule:
        """One of several texts."""
        sizes = [len(text.encode()) for text in texts]
        return self.leaf(" | ".join(map(quoted, texts)), max(sizes), max(sizes))

    def alternatives(self, rules: Sequence[Rule | None]) -> Rule | None:
        """What any of the rules writes, None where there is none."""
        found = list(dict.fromkeys(rule for rule in rules if rule is not None))
        if len(found) < 2:
            return found[0] if found else None
        return self.rule(" | ".join(rule.name for rule in found), max(rule.whole for rule in found),
                         max(rule.closing for rule in found))

    def members(self, members: Sequence[tuple[Rule, bool]], end: str, going_on: str, may_be_empty: bool,
                extra: Rule | None = None, extra_least: int = 0, extra_most: int = 0) -> str:
        """Body of a list of different members in any order, those marked True in each, and of further ones behind.

        Bit i of the rules' parameter says that member i was written. More members than bits come in groups, one group
        after the other. `end` and `going_on` are conditions for the end and for another member.
        """
        groups = [members[i:i + MEMBER_BITS] for i in range(0, len(members), MEMBER_BITS)]
        # What follows the last group: `rest` behind a member, `first` where there was none.
        rest = first = '""'
        if extra:
            more = self.name()
            self.rules.append(f'{more}::_: ""{condition(f"ge(_, {extra_least})" if extra_least else "")} | "," '
                              f'{extra.name} {more}::incr([0:{COUNT_BITS}]) %if lt(_, {extra_most})')
            rest, first = f"{more}::0x0", f"{extra.name} {more}::0x1"
            first = first if extra_least else f'"" | {first}'
        elif not may_be_empty:
            first = ""
        for group in reversed(groups):
            behind, before = self.name(), self.name()
            needed = [f"bit_set({i})" for i, (_, required) in enumerate(group) if required]
            steps = [f'{{comma}} {rule.name} {behind}::set_bit({i})' for i, (rule, _) in enumerate(group)]
            free = [condition(both([f"bit_clear({i})", going_on])) for i in range(len(group))]
            self.rules.append(f"{behind}::_: {rest}{condition(both([*needed, end]))}" + "".join(
                f" | {step.format(comma=chr(34) + ',' + chr(34))}{test}" for step, test in zip(steps, free)))
            started = [step.format(comma="").strip() for step in steps]
            if not needed and first:
                started.insert(0, first)
            self.rules.append(f"{before}::_: " + " | ".join(started))
            rest, first = f'{behind}::0x0', f"{before}::0x0"
        return f"({first})"


def compact(value: Any) -> str:
    """JSON text of a value without white space, as it is written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """The body of a rule that llguidance converts itself."""
    return "%json " + json.dumps({"x-guidance": JSON_OPTIONS, **schema})


def condition(test: str) -> str:
    return f" %if {test}" if test else ""


def both(tests: Sequence[str]) -> str:
    """The tests joined, "" for none. Conditions take two at a time."""
    tests = [test for test in tests if test]
    if len(tests) < 2:
        return tests[0] if tests else ""
    half = len(tests) // 2
    return f"and({both(tests[:half])}, {both(tests[half:])})"
