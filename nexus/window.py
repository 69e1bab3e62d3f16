"""The pruned sliding window: of a conversation, what a later "there" or "that one" may mean, within a budget of tokens.

Recent turns stand verbatim, but for tool results that are bulky: a surrogate stands for each, with the names, numbers,
addresses and paths that it held. Older turns are shortened the same way, and the oldest are dropped first.
"""
from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ROLES = ("user", "assistant", "tool")
# Keys of a JSON result whose values tell things apart, or words of such keys.
IDENTITIES = frozenset(
    "id iid key name number title slug login owner user author email path file filename branch ref sha commit tag "
    "project repo repository space page state status date time timezone version uid".split())
# Of addresses, interfaces list dozens; one is what a reader would follow.
ADDRESSES = frozenset(("url", "html_url", "web_url", "uri", "link"))
# Longest value of a JSON result that a surrogate repeats.
VALUE_CHARS = 80
# What may be referred to in a running text: addresses, paths and owner/name, mail, issue keys, #numbers, hashes,
# versions and dates, words in quotes. Mail and paths begin where a word does: tried at each of its letters, a long word
# such as base64 would take the square of its length.
REFERENCES = re.compile(
    r"https?://[^\s\"'<>()\]]+|(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+|(?<![\w.~-])(?:[\w.~-]*/)+[\w.-]+|"
    r"\b[A-Z][A-Z0-9]+-\d+\b|#\d+|\b[0-9a-f]{7,40}\b|\b\d[\d.:-]*\b|\"[^\"\n]{1,60}\"|`[^`\n]{1,60}`")
CUT = "…"


class WindowError(ValueError):
    """A history or an option cannot be used; the message names the item, the field and the remedy."""


def prune(history: Sequence[Mapping[str, Any]], budget_tokens: int, recent_turns: int, surrogate_chars: int,
          count_tokens: Callable[[Mapping[str, Any]], int]) -> list[dict[str, Any]]:
    """The messages that are kept, oldest first, which together take at most `budget_tokens` tokens.

    history           {"role": "user" | "assistant" | "tool", "content", "name"?}, oldest first; a turn is a user's
                      message and everything up to the next one
    budget_tokens     is kept in any case
    recent_turns      latest turns that stand verbatim where the budget allows it
    surrogate_chars   longest text that stands for a tool's result, or for a message of an older turn
    count_tokens      tokens of one message as the prompt will print it

    The newest user message is kept before all others, cut where it must be; only a budget that fits no part of it
    loses it. From there the messages are taken from the newest back until one does not fit even shortened. The same
    input gives the same window. Raises WindowError.
    """
    for field, value, least in (("budget_tokens", budget_tokens, 0), ("recent_turns", recent_turns, 0),
                                ("surrogate_chars", surrogate_chars, 1)):
        if value < least:
            raise WindowError(f"{field} is {value}; give {least} or more")
    messages = checked(history)
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    newest = starts[-1] if starts else None
    # Everything from here on is recent.
    recent = starts[-recent_turns] if 0 < recent_turns <= len(starts) else 0 if recent_turns else len(messages)
    kept: dict[int, dict[str, Any]] = {}
    left = budget_tokens
    if newest is not None:
        message = _cut_to(messages[newest], left, count_tokens)
        if message is None:
            return []
        kept[newest], left = message, left - count_tokens(message)
    for i in range(len(messages) - 1, -1, -1):
        if i == newest:
            continue
        short = {**messages[i], "content": surrogate(messages[i], surrogate_chars)}
        whole = i >= recent and messages[i]["role"] != "tool"
        for message in ([messages[i], short] if whole else [short]):
            if (cost := count_tokens(message)) <= left:
                kept[i], left = message, left - cost
                break
        else:
            break
    return [kept[i] for i in sorted(kept)]


def checked(history: Sequence[Mapping[str, Any]], where: Callable[[int], str] = lambda i: f"history item {i}",
            ) -> list[dict[str, Any]]:
    """Copies of the messages with their role, content and name only. Raises WindowError; `where` names an item."""
    messages = []
    for i, item in enumerate(history):
        if not isinstance(item, Mapping):
            raise WindowError(f"{where(i)}: not an object; give {{\"role\", \"content\"}}")
        if item.get("role") not in ROLES:
            raise WindowError(f"{where(i)}: role is {item.get('role')!r}; give one of {', '.join(ROLES)}")
        for field in ("content", "name"):
            if not isinstance(item.get(field, "" if field == "name" else None), str):
                raise WindowError(f"{where(i)}: {field} is {type(item.get(field)).__name__}; give a text")
        messages.append({key: item[key] for key in ("role", "name", "content") if key in item})
    return messages


def surrogate(message: Mapping[str, Any], chars: int) -> str:
    """The content where it has at most `chars` characters, else as many that say what it was and what it named.

    A JSON result gives its identifying values, the outermost first; any other text its beginning and its references.
    """
    content = message["content"]
    if len(content) <= chars:
        return content
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    size = f"[{len(content)} characters]"
    if isinstance(value, (dict, list)):
        return _joined(size, _identities(value), chars)
    text = " ".join(content.split())
    if len(text) <= chars:
        return text
    # Half for how it begins, half for what the rest names.
    begin = text[:chars // 2 - len(CUT)]
    found = dict.fromkeys(match.group().rstrip(".,:;-") for match in REFERENCES.finditer(text, len(begin)))
    return _joined(f"{begin}{CUT} {size}", (each for each in found if each and each not in begin), chars)


def _joined(head: str, parts: Iterator[str], chars: int) -> str:
    """`head` and as many of the parts as fit, those that do not left out."""
    text, separator = head, " "
    for part in parts:
        if len(text) + len(separator) + len(part) <= chars:
            text, separator = text + separator + part, ", "
    return text[:chars]


def _identities(value: Any) -> Iterator[str]:
    """`path: value` of short leaves, those with an identifying key first, each kind from the outside in."""
    leaves: list[tuple[str, str]] = []
    waiting: deque[tuple[str, Any]] = deque([("", value)])
    while waiting:
        path, each = waiting.popleft()
        match each:
            case dict():
                waiting.extend((f"{path}.{key}" if path else key, item) for key, item in each.items())
            case list():
                waiting.extend((f"{path}[{index}]", item) for index, item in enumerate(each))
            case None | True | False:
                pass
            case _ if 0 < len(str(each)) <= VALUE_CHARS:
                leaves.append((path, " ".join(str(each).split())))
    telling = [_tells(path) for path, _ in leaves]
    for wanted in (True, False):
        yield from (f"{path}: {text}" for (path, text), tells in zip(leaves, telling) if tells == wanted)


def _tells(path: str) -> bool:
    key = path.rsplit(".", 1)[-1]
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    return key in ADDRESSES or not IDENTITIES.isdisjoint(words)


def _cut_to(message: dict[str, Any], budget: int, count_tokens: Callable[[Mapping[str, Any]], int]
            ) -> dict[str, Any] | None:
    """The message, its end cut off so that it takes at most `budget` tokens; None where not one character fits."""
    if count_tokens(message) <= budget:
        return message
    content = message["content"]
    fits, too_long = 0, len(content)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        shorter = {**message, "content": content[:middle] + CUT}
        fits, too_long = (middle, too_long) if count_tokens(shorter) <= budget else (fits, middle)
    # Tokens of a longer text are not always more: what was found is asked once again.
    shorter = {**message, "content": content[:fits] + CUT}
    return shorter if fits and count_tokens(shorter) <= budget else None
