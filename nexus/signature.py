"""The compressed signature: a tool as one typed line, cut to a budget of tokens.

    create_issue(owner: string /* Repository owner */, title: string, labels?: string[], ...) // Open an issue

`?` marks what may be left out, literals are the legal values, `= x` is the default, `(…)` behind a type its format or
bounds, `...` says that more exists. Names and values stand as JSON would have them, so that a reader can copy them.
"""
from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexus.parameters import Array, Literal, Object, Parameter, Plain, Type, json_type, parameters_of, quoted
from nexus.registry import Tool, tool_text
from nexus.signature_reading import ANY, ANY_NAME, MORE, TOOL_NAME, read_signature
from nexus.tool_document import name_words

CountTokens = Callable[[str], int]
Cut = tuple[str, str | int]
# Bytes of a parameter's description, from the roomiest to what is left before descriptions go.
LIMITS = (80, 48, 32)
# A tool has one description, which says what all parameters are for.
TOOL_SHARE = 1.5
# Legal values that stay when a list of them is shortened.
FEW_VALUES = 4
# UTF-8 bytes per token where no tokeniser counts; Qwen's makes fewer tokens than that of nearly all signatures.
BYTES_PER_TOKEN = 3
IDENTIFIER = re.compile(r"[^\W\d]\w*")
# Ends of a sentence or of a part of one, where a description may be cut.
SENTENCE = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!etc)(?<!vs)[.!?]\s|[。！？]")
CLAUSE = re.compile(r"[;,]\s|\s[-–—(]|[、；，]")
EXAMPLE = re.compile(r"\be\.g\b|['\"`\d]", re.IGNORECASE)
# What must not end a text that was cut: the first items of a list, a condition without what follows from it.
DANGLING = re.compile(r"(?<=\w):\s[^'\"`\d]*$|,\s(if|when|where|unless|otherwise|and|or|which)\b[^,]*$", re.IGNORECASE)
OPTIONAL = re.compile(r"^\W*(optional(ly)?|required)\b\W*(?=\w)", re.IGNORECASE)
ARTICLE = re.compile(r"^(the|an?)\s+(?=\w)", re.IGNORECASE)
# Words that say nothing beside a name, and at which a cut text must not end.
HOLLOW = frozenset("a an the of to in for from on at by with and or if is are be this that its as which whether when "
                   "where will can only e.g".split())
TOOL_PATH = "()"


@dataclass(frozen=True)
class Signature:
    """One tool in one line."""

    text: str
    cut: tuple[str, ...]
    """What the schema says and the text does not, each as "path: what", in the schema's order; path "()" is the tool.

    A description counts as told if all its words are in the names and values beside it.
    """


def signature_of(tool: Tool, max_tokens: int | None = None, count_tokens: CountTokens | None = None, *,
                 described_tokens: int | None = None) -> Signature:
    """The tool's signature of at most `max_tokens` tokens, and what was cut to get there.

    Cut while over the budget, in this order: long descriptions; defaults and bounds; descriptions of what is optional,
    those first that add least to the names; the tool's description; descriptions of what is required; optional members
    of objects; formats; long lists of values; values and members of optional parameters; optional parameters from the
    last to the first. Then required objects lose their members, and lists of values their values. Names and types of
    required parameters stay, also above the budget. Never longer than `tool_text`: that is a budget too, and the only
    one for which types go as well.

    `described_tokens`: a tighter budget that takes descriptions, defaults and bounds alone, so that a tool with few
    parameters does not fill the room that one with many needs.

    Without `count_tokens`, a token is taken as BYTES_PER_TOKEN bytes of UTF-8. Raises ValueError for a budget below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("described_tokens", described_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; give at least 1, or None for no budget")
    count = count_tokens or rough_tokens
    n_schema = count(tool_text(tool))
    budget = n_schema if max_tokens is None else min(max_tokens, n_schema)
    draft = _Draft(tool)
    descriptive, others = draft.cuts()
    cuts = descriptive + others

    def fewest(n_most: int, most_tokens: int) -> int:
        """Cuts that meet a budget, or `n_most`: each makes the text shorter, or leaves it."""
        return bisect_left(range(n_most), True, key=lambda n_cuts: (
            count(draft.rendered(cuts[:n_cuts])[0]) <= most_tokens))

    n_cuts = fewest(len(cuts), budget)
    if described_tokens is not None:
        n_cuts = max(n_cuts, fewest(len(descriptive), described_tokens))
    text, cut = draft.rendered(cuts[:n_cuts])
    if n_cuts == len(cuts) and count(text) > n_schema:
        text, cut = draft.rendered([*cuts, (TOOL_PATH, "types")])
    return Signature(text, cut)


def signature_statistics(tools: Iterable[Tool], count_tokens: CountTokens, max_tokens: int | None = None, *,
                         described_tokens: int | None = None) -> list[dict[str, Any]]:
    """Per tool: server, name, tokens of its signature and of its full text (`tool_text`), and what was cut."""
    rows = []
    for tool in tools:
        signature = signature_of(tool, max_tokens, count_tokens, described_tokens=described_tokens)
        rows.append({"server": tool.server, "name": tool.name, "n_signature_tokens": count_tokens(signature.text),
                     "n_schema_tokens": count_tokens(tool_text(tool)), "cut": list(signature.cut)})
    return rows


def rough_tokens(text: str) -> int:
    """About how many tokens a text has, without a tokeniser: its UTF-8 bytes by BYTES_PER_TOKEN, rounded up."""
    return -(-len(text.encode("utf-8", "backslashreplace")) // BYTES_PER_TOKEN)


def shortened(description: str, limit: int, *, sentence: bool = False) -> tuple[str, bool]:
    """A description in at most `limit` bytes of UTF-8 on one line, and whether all of it is there.

    Cut at the last end of a sentence or else of a clause in the last two thirds, else between words. `sentence` takes
    the first sentence alone. What opens many descriptions, "Optional." and an article, goes first.
    """
    paragraph = re.split(r"\n\s*\n", description.strip())[0] if sentence else description
    text, whole = _one_line(paragraph), _one_line(description)
    if sentence and (end := SENTENCE.search(text)):
        text = text[:end.start()]
    room = len(text.encode()[:limit].decode(errors="ignore"))
    if room < len(text):
        ends = next((found for pattern in (SENTENCE, CLAUSE) if (found := [
            end.start() for end in pattern.finditer(text, 0, room + 1) if end.start() > room // 3])), None)
        space = text.rfind(" ", 0, room + 1)
        text = DANGLING.sub("", text[:ends[-1] if ends else space if space > 0 else room])
        opened = text.rfind("(")
        if opened > text.rfind(")") and opened > 0:
            text = text[:opened]
        words = text.rstrip(" .。,;:-–—(、，；").split(" ")
        # Between words, a phrase that was begun goes too, unless much goes with it.
        last = max((index for index, word in enumerate(words) if word.lower() in HOLLOW), default=0)
        if not ends and last and 3 * last >= 2 * len(words):
            words = words[:last]
        while len(words) > 1 and words[-1].lower() in HOLLOW:
            words.pop()
        text = " ".join(words)
    return text, text == whole


def _one_line(description: str) -> str:
    text = "".join(letter for letter in " ".join(description.split()) if letter.isprintable()).replace("*/", "* /")
    return ARTICLE.sub("", OPTIONAL.sub("", text)).strip().rstrip(" .。")


def spelled(name: str) -> str:
    """A parameter's name as the signature has it: itself where it is an identifier, else a JSON string."""
    return name if IDENTIFIER.fullmatch(name) else quoted(name)


class _Draft:
    """A tool's parameters, and what of them is left out. Places are paths such as `filter.labels.name`.

    A cut is (path, what), `what` one of "description", "default", "format", "values", "some values", "members",
    "parameter"; for the whole tool also "either", "types", and the limits of descriptions.
    """

    def __init__(self, tool: Tool):
        self.tool = tool
        self.arguments = parameters_of(tool.input_schema)
        self._limit, self._without, self._cut = LIMITS[0], frozenset(), []

    def cuts(self) -> tuple[list[Cut], list[Cut]]:
        """All cuts in the order in which they are made, see `signature_of`: of descriptions and such, and of more."""
        places = list(_places(self.arguments, "", False, False))[::-1]
        every = [path for path, *_ in places]
        optional = [path for path, _, may_go, _ in places if may_go]
        required = [path for path, _, may_go, _ in places if not may_go]
        loose = [path for path, parameter, _, nested in places if nested and not parameter.required]
        last = [path for path, parameter, _, nested in places if not nested and not parameter.required]
        says = {path: self._novelty(parameter) for path, parameter, *_ in places}

        def cut(what: str, paths: Iterable[str]) -> list[Cut]:
            return [(path, what) for path in paths]

        descriptive = [*cut(LIMITS[1], [TOOL_PATH]), *cut("default", every), *cut(LIMITS[2], [TOOL_PATH]),
                       *cut("description", [*sorted(optional, key=says.get), TOOL_PATH,
                                            *sorted(required, key=says.get)])]
        return descriptive, [
            *cut("parameter", loose), *cut("either", [TOOL_PATH]), *cut("format", every),
            *cut("some values", optional + required), *cut("values", optional), *cut("members", optional),
            *cut("parameter", last), *cut("members", required), *cut("values", required)]

    def _novelty(self, parameter: Parameter) -> tuple[bool, int]:
        """What a description adds to the names: whether it has an example or a value, and how many words."""
        short, _ = shortened(parameter.description, LIMITS[-1])
        return EXAMPLE.search(short) is not None, len(set(_words(short)) - HOLLOW - self._names(*_said(parameter)))

    def _names(self, *names: str) -> set[str]:
        return set(_words(self.tool.name, *names))

    def rendered(self, cuts: Sequence[Cut] = ()) -> tuple[str, tuple[str, ...]]:
        """The signature's text without what the cuts take, and what it does not tell."""
        self._without, self._cut = frozenset(cuts), []
        self._limit = next(limit for limit in LIMITS[::-1] if limit == LIMITS[0] or (TOOL_PATH, limit) in self._without)
        name = self.tool.name
        text = f"{name if TOOL_NAME.fullmatch(name) else quoted(name)}({self._members(self.arguments, '')})"
        note = "; ".join(filter(None, [self._described(TOOL_PATH, self.tool.description), self._either()]))
        self._cut += [f"{TOOL_PATH}: {keyword}" for keyword in self.arguments.untold]
        return f"{text} // {note}" if note else text, tuple(dict.fromkeys(self._cut))

    def _members(self, parent: Object, path: str) -> str:
        parts, dropped = [], False
        for parameter in parent.members:
            place = _member_path(path, parameter)
            if (place, "parameter") in self._without:
                dropped = True
                self._cut.append(f"{place}: parameter")
            else:
                parts.append(self._parameter(parameter, place))
        if parent.rest is not None:
            place = _rest_path(path)
            if (place, "parameter") in self._without:
                dropped = True
                self._cut.append(f"{place}: parameter")
            else:
                rest = self._type(parent.rest, place)
                parts.append(f"{ANY_NAME}: {rest}" if rest else ANY_NAME)
        return ", ".join(parts + [MORE] * dropped)

    def _parameter(self, parameter: Parameter, path: str) -> str:
        text = spelled(parameter.name) + "?" * (not parameter.required)
        if (TOOL_PATH, "types") in self._without:
            if parameter.kind:
                self._cut.append(f"{path}: type")
            return text
        if kind := self._type(parameter.kind, path):
            text += f": {kind}"
        if parameter.default is not None:
            text += self._unless_cut(path, "default", f" = {parameter.default}")
        if short := self._described(path, parameter.description, *_said(parameter)):
            text += f" /* {short} */"
        self._cut += [f"{path}: {keyword}" for keyword in parameter.untold]
        return text

    def _described(self, path: str, description: str, *names: str) -> str:
        """The short description, or "" where it was cut or only repeats the names."""
        if not set(_words(description)) - HOLLOW - self._names(*names):
            return ""
        is_tool = path == TOOL_PATH
        limit = int(TOOL_SHARE * self._limit) if is_tool else self._limit
        short, whole = shortened(description, limit, sentence=is_tool)
        if (path, "description") in self._without:
            short, whole = "", False
        if not whole:
            self._cut.append(f"{path}: description shortened" if short else f"{path}: description")
        return short

    def _either(self) -> str:
        either = self.arguments.either
        text = " or ".join("+".join(map(spelled, names)) for names in either)
        return self._unless_cut(TOOL_PATH, "either", f"needs {text}") if either else ""

    def _unless_cut(self, path: str, what: str, text: str) -> str:
        if (path, what) not in self._without:
            return text
        self._cut.append(f"{path}: {what}")
        return ""

    def _type(self, kind: Type, path: str) -> str:
        """The alternatives' text; "" for any value."""
        return "|".join(self._alternatives(kind, path))

    def _alternatives(self, kind: Type, path: str) -> list[str]:
        literals = [alternative for alternative in kind if isinstance(alternative, Literal)]
        shown = len(literals)
        if (path, "values") in self._without:
            shown = 0
        elif (path, "some values") in self._without:
            shown = min(shown, FEW_VALUES)
        texts, n_literals = [], 0
        for alternative in kind:
            if isinstance(alternative, Literal):
                n_literals += 1
                if n_literals <= shown:
                    texts.append(alternative.text)
                elif not shown:
                    texts.append(json_type(alternative.value))
            else:
                texts.append(self._alternative(alternative, path))
        if 0 < shown < len(literals):
            texts.append(MORE)
        if shown < len(literals):
            self._cut.append(f"{path}: {shown} of {len(literals)} values")
        return list(dict.fromkeys(texts))

    def _alternative(self, alternative: Plain | Array | Object, path: str) -> str:
        match alternative:
            case Plain(name, hint):
                # Bounds go with the defaults, a format stays longer: it decides how the value is written.
                cut_with = "format" if name == "string" else "default"
                if hint and (path, cut_with) in self._without:
                    self._cut.append(f"{path}: {'format' if name == 'string' else 'bounds'}")
                    hint = ""
                return f"{name}({hint})" if hint else name
            case Array(item, first):
                return self._array(item, first, path)
        hidden = (path, "members") in self._without and (alternative.members or alternative.rest)
        if alternative.folded or hidden:
            self._cut.append(f"{path}: members")
            return "object"
        if alternative.either:
            self._cut.append(f"{path}: either")
        members = self._members(alternative, path)
        return f"{{{members}}}" if alternative.members or alternative.rest else "object"

    def _array(self, item: Type, first: Sequence[Type], path: str) -> str:
        items = self._alternatives(item, path)
        each = f"({'|'.join(items)})" if len(items) > 1 else "".join(items)
        if not first:
            return f"{each}[]" if each else "array"
        parts = [self._type(kind, path) or ANY for kind in first]
        return f"[{', '.join(parts + [f'{MORE}{each}[]'] * bool(each))}]"


def _places(parent: Object, path: str, optional: bool, nested: bool) -> Iterator[tuple[str, Parameter, bool, bool]]:
    """All parameters in the schema's order: path, parameter, whether it may be left out, whether it is in another."""
    for parameter in parent.members:
        place, may_go = _member_path(path, parameter), optional or not parameter.required
        yield place, parameter, may_go, nested
        for inner in _objects(parameter.kind):
            yield from _places(inner, place, may_go, True)
    if parent.rest is not None:
        yield _rest_path(path), Parameter(ANY_NAME, False, parent.rest), True, nested
        for inner in _objects(parent.rest):
            yield from _places(inner, _rest_path(path), True, True)


def _objects(kind: Type) -> Iterator[Object]:
    """The objects among the alternatives, also those in arrays."""
    for alternative in kind:
        if isinstance(alternative, Object):
            yield alternative
        elif isinstance(alternative, Array):
            for inner in (alternative.item, *alternative.first):
                yield from _objects(inner)


def _said(parameter: Parameter) -> list[str]:
    """What the signature tells of a parameter anyway: its name and legal strings."""
    values = [kind.value for kind in parameter.kind if isinstance(kind, Literal) and isinstance(kind.value, str)]
    return [parameter.name, *values]


def _member_path(path: str, parameter: Parameter) -> str:
    return f"{path}.{spelled(parameter.name)}" if path else spelled(parameter.name)


def _rest_path(path: str) -> str:
    return f"{path}.*" if path else "*"


def _words(*texts: str) -> list[str]:
    """Words in lower case, without the s of a plural."""
    words = [word.lower() for text in texts for word in re.findall(r"[^\W_]+", name_words(text))]
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words]


def information_missing(tool: Tool, signature: Signature, arguments: Mapping[str, Any]) -> list[str]:
    """What a reader of the signature's text cannot know about the arguments given, each as "path: what"; [] is all.

    `what` is "name", "type" (one of the schema's types is not told), "values" (a legal value is not told) or "members"
    (the schema refers to itself, and was not read so deep). Names that the schema does not have are not looked for,
    nor is null where leaving the argument out says the same. Raises ValueError for a text that is no signature.
    """
    told = read_signature(signature.text)
    missing: list[str] = []
    _compare(parameters_of(tool.input_schema), told, arguments, "", missing)
    return list(dict.fromkeys(missing))


def _compare(given: Object, told: Object, arguments: Mapping[str, Any], path: str, missing: list[str]) -> None:
    expected = {parameter.name: parameter for parameter in given.members}
    read = {parameter.name: parameter for parameter in told.members}
    for name, value in arguments.items():
        parameter = expected.get(name)
        if parameter is None:
            if given.rest is not None:
                _compare_kinds(given.rest, (told.rest or ()), value, _rest_path(path), missing)
            continue
        place = _member_path(path, parameter)
        if name in read:
            _compare_kinds(parameter.kind, read[name].kind, value, place, missing)
        elif value is not None or not parameter.null_by_omission:
            missing.append(f"{place}: name")


def _compare_kinds(given: Type, told: Type, value: Any, path: str, missing: list[str]) -> None:
    if not _type_names(given) <= _type_names(told):
        missing.append(f"{path}: type")
    legal = {kind.text for kind in given if isinstance(kind, Literal)}
    if not legal <= {kind.text for kind in told if isinstance(kind, Literal)}:
        missing.append(f"{path}: values")
    if isinstance(value, Mapping):
        objects = [kind for kind in given if isinstance(kind, Object)]
        if value and any(kind.folded for kind in objects):
            missing.append(f"{path}: members")
        _compare(_joined(objects), _joined([kind for kind in told if isinstance(kind, Object)]), value, path, missing)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _compare_kinds(_items(given, index), _items(told, index), item, path, missing)


def _type_names(kind: Type) -> set[str]:
    names = {Array: "array", Object: "object"}
    return {names.get(type(alternative)) or (alternative.name if isinstance(alternative, Plain)
                                             else json_type(alternative.value)) for alternative in kind}


def _joined(objects: Sequence[Object]) -> Object:
    """One object with the members of all; a name of several has the types of all."""
    kinds: dict[str, list] = {}
    for member in (member for inner in objects for member in inner.members):
        kinds.setdefault(member.name, []).extend(member.kind)
    rests = [inner.rest for inner in objects if inner.rest is not None]
    return Object(tuple(Parameter(name, True, tuple(kind)) for name, kind in kinds.items()),
                  sum(rests, ()) if rests else None)


def _items(kind: Type, index: int) -> Type:
    arrays = [alternative for alternative in kind if isinstance(alternative, Array)]
    return sum((array.first[index] if index < len(array.first) else array.item for array in arrays), ())
