"""Reads a compressed signature back into parameters: what a reader of its text alone can know."""
from __future__ import annotations

import json
import re

from nexus.parameters import Array, Literal, Object, Parameter, Plain, Type

# Something was left out.
MORE = "..."
ANY = "any"
ANY_NAME = "[key: string]"
TOOL_NAME = re.compile(r"[\w.\-/:@]+")
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
TOKEN = re.compile(r"""\s*(?:/\*.*?\*/\s*)?(?P<token>"(?:[^"\\]|\\.)*"|\.\.\.|\[key:\ string]
                       |(?:string|number|integer)\([^()]*\)|-?\d[\d.eE+-]*|[^\W\d]\w*|[][{}()|:?,=])""", re.VERBOSE)


def read_signature(text: str) -> Object:
    """The parameters that the text of a signature tells; descriptions, defaults, hints and `...` are passed over.

    Raises ValueError, with the place, for a text that is no signature.
    """
    return _Reading(text).arguments()


class _Reading:
    def __init__(self, text: str):
        self.text = text
        name = TOOL_NAME.match(text) or QUOTED.match(text)
        self._at = name.end() if name else 0
        self._next()

    def arguments(self) -> Object:
        self._take("(")
        return self._members(")")

    def _next(self) -> None:
        found = TOKEN.match(self.text, self._at)
        self.token, self._at = (found["token"], found.end()) if found else ("", self._at)

    def _take(self, expected: str | None = None) -> str:
        token = self.token
        if not token or expected is not None and token != expected:
            raise ValueError(f"signature: found {token or 'no token'!r} before character {self._at}, wanted "
                             f"{expected or 'a name or type'}; give the text that signature_of made, "
                             f"not {self.text[:80]!r}")
        self._next()
        return token

    def _passed(self, token: str) -> bool:
        if self.token != token:
            return False
        self._next()
        return True

    def _members(self, closing: str) -> Object:
        members, rest = [], None
        while self.token != closing:
            if self._passed(ANY_NAME):
                rest = self._kind() if self._passed(":") else ()
            elif not self._passed(MORE):
                token = self._take()
                name = json.loads(token) if token.startswith('"') else token
                required = not self._passed("?")
                kind = self._kind() if self._passed(":") else ()
                if self._passed("="):
                    self._take()
                members.append(Parameter(name, required, kind))
            if self.token != closing:
                self._take(",")
        if closing != ")":
            self._take(closing)
        return Object(tuple(members), rest)

    def _kind(self) -> Type:
        found = []
        while True:
            if not self._passed(MORE):
                found += self._alternative()
            if not self._passed("|"):
                return tuple(found)

    def _alternative(self) -> Type:
        if self._passed("("):
            found = self._kind()
            self._take(")")
        elif self._passed("{"):
            found = (self._members("}"),)
        elif self._passed("["):
            found = (self._tuple(),)
        else:
            found = self._word(self._take())
        while self._passed("["):
            self._take("]")
            found = (Array(found),)
        return found

    def _tuple(self) -> Array:
        first, item = [], ()
        while not self._passed("]"):
            if self._passed(MORE):
                item = self._alternative()[0].item
            else:
                first.append(self._kind())
            self._passed(",")
        return Array(item, tuple(first))

    @staticmethod
    def _word(token: str) -> Type:
        if token == ANY:
            return ()
        if token == "array":
            return (Array(()),)
        if token == "object":
            return (Object(()),)
        if token[0] in '"-0123456789' or token in ("true", "false"):
            return (Literal(json.loads(token)),)
        return (Plain(token.partition("(")[0]),)
