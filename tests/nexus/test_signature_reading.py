"""A signature's text read back."""
from __future__ import annotations

import pytest

from nexus.parameters import NULL, Array, Literal, Object, Parameter, Plain
from nexus.signature_reading import read_signature

STRING, INTEGER = Plain("string"), Plain("integer")


def members(*parameters: Parameter, rest=None) -> Object:
    return Object(parameters, rest)


@pytest.mark.parametrize("text, found", [
    ("f()", members()),
    ("hub/list-issues() // a, b: c)", members()),
    (r'"two \" words"(a)', members(Parameter("a", True, ()))),
    ("f(a: string, b?: integer(1..9) = 3, ...)",
     members(Parameter("a", True, (STRING,)), Parameter("b", False, (INTEGER,)))),
    ("f(a: string /* b: integer, (c */, d?) // e(f: g)",
     members(Parameter("a", True, (STRING,)), Parameter("d", False, ()))),
    (r'f("$and"?: "a\n/* x */"|-1.5e+3|true|null|..., "f(": string(date-time)|null = "x)")',
     members(Parameter("$and", False, (Literal("a\n/* x */"), Literal(-1500.0), Literal(True), NULL)),
             Parameter("f(", True, (STRING, NULL)))),
    ("f(a: string[][], b: (string|integer)[], c: array, d: any)",
     members(Parameter("a", True, (Array((Array((STRING,)),)),)), Parameter("b", True, (Array((STRING, INTEGER)),)),
             Parameter("c", True, (Array(()),)), Parameter("d", True, ()))),
    ("f(t: [string, any, ...integer[]], u: [1, {k: 2}])",
     members(Parameter("t", True, (Array((INTEGER,), ((STRING,), ())),)),
             Parameter("u", True, (Array((), ((Literal(1),), (members(Parameter("k", True, (Literal(2),))),))),)))),
    ("f(o?: {a: string /* x */, ...}|object, [key: string]: {[key: string]})",
     members(Parameter("o", False, (members(Parameter("a", True, (STRING,))), Object(()))),
             rest=(Object((), ()),))),
])
def test_reading(text, found):
    assert read_signature(text) == found


@pytest.mark.parametrize("text, finding", [
    ("", "'no token'"), ("f", "'no token'"), ("f(", "'no token'"), ("f(a", "'no token'"), ("f(a: )", "wanted"),
    ("f(a: {b: string)", r"found '\)'"), ("f(a b)", "found 'b'"), ("f(a: [string)", "found"), ("{}", "found")])
def test_not_a_signature(text, finding):
    with pytest.raises(ValueError, match=f"signature: .*{finding}"):
        read_signature(text)
