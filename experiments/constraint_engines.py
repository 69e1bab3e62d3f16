"""What `constrain_cost` times: ours and its peers behind one interface, each with its own grammar of a schema."""
from __future__ import annotations

import functools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher

from nexus import native
from nexus.constrain import Grammars, best_allowed
from nexus.native import describe

OURS, OUR_MASK, ARGMAX = "nexus", "nexus-full-mask", "argmax"
LLGUIDANCE, LLAMA_CPP, CHECKED, XGRAMMAR = "llguidance", "llama-cpp-python", "llama.cpp-checked", "xgrammar"


class EngineError(RuntimeError):
    """An engine cannot take a schema, or is not there; the message is its own."""


class Text(Protocol):
    """One text under an engine's grammar."""

    def choose(self, logits: np.ndarray, favourite: int) -> tuple[int, float]:
        """The token that the engine takes and how long that took, µs; `favourite` has the largest logit of all."""

    def accept(self, token: int) -> tuple[bool, float]:
        """Whether the grammar could go on with the token, and how long that took, µs."""


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter_ns()
    found = call()
    return found, (time.perf_counter_ns() - start) / 1e3


class OurText:
    """As `fill` decodes: the favourite first, the mask where it is refused."""

    def __init__(self, grammars: Grammars, schema: dict, max_tokens: int):
        self.walk = grammars.compile(schema).start(max_tokens)

    def choose(self, logits: np.ndarray, favourite: int) -> tuple[int, float]:
        return timed(lambda: self.walk.take(favourite, logits))

    def accept(self, token: int) -> tuple[bool, float]:
        # Choosing was accepting.
        return True, 0.0


class MaskText:
    """A matcher of llguidance whose mask is made at every step."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher):
        if matcher.is_error():
            raise EngineError(" ".join(matcher.get_error().split())[:200])
        self.matcher = matcher
        self.mask = np.empty((grammars.tokenizer.vocab_size + 31) // 32, np.uint32)

    def choose(self, logits: np.ndarray, favourite: int) -> tuple[int, float]:
        def masked() -> int:
            self.matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
            return best_allowed(logits, self.mask)

        return timed(masked)

    def accept(self, token: int) -> tuple[bool, float]:
        taken, us = timed(lambda: self.matcher.try_consume_tokens([token]))
        return taken == 1, us


def our_mask_text(grammars: Grammars, schema: dict) -> MaskText:
    return MaskText(grammars, grammars.matcher(grammars.compile(schema).lark))


def llguidance_text(grammars: Grammars, schema: dict) -> MaskText:
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    except ValueError as error:
        raise EngineError(str(error)[:200]) from None
    return MaskText(grammars, LLMatcher(grammars.tokenizer, grammar, log_level=0))


@functools.cache
def _engine():
    gbl = native.llama()
    import cppyy

    cppyy.include("engine_grammar.hpp")
    return gbl.nexus


def gbnf(schema: dict) -> str:
    """llama.cpp's grammar of a schema by llama-cpp-python's converter. Raises EngineError."""
    # cppyy has to load the library first.
    native.llama()
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return json_schema_to_gbnf(json.dumps(schema))
    except Exception as error:
        raise EngineError(f"{type(error).__name__}: {str(error)[:200]}") from None


class EngineText:
    """llama.cpp's grammar over the whole vocabulary, or (`checked`) over the favourite first."""

    def __init__(self, grammars: Grammars, schema: dict, checked: bool):
        self.checked = checked
        try:
            self.grammar = _engine().EngineGrammar(grammars.model.native.vocab(), gbnf(schema))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(describe(error)) from None

    def choose(self, logits: np.ndarray, favourite: int) -> tuple[int, float]:
        address, n_vocab = logits.ctypes.data, len(logits)
        if self.checked:
            _, us = timed(lambda: self.grammar.apply_to_likeliest(address, n_vocab, favourite))
        else:
            _, us = timed(lambda: self.grammar.apply_to_all(address, n_vocab))
        return int(self.grammar.best()), us

    def accept(self, token: int) -> tuple[bool, float]:
        accepted, us = timed(lambda: self.grammar.accept(token))
        return bool(accepted), us


class XGrammar:
    """The process that runs xgrammar; its times are its own, taken around its calls."""

    def __init__(self, python: str, grammars: Grammars):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        pieces = grammars.pieces
        np.save(folder / "pieces.npy", np.frombuffer(b"".join(pieces), np.uint8))
        np.save(folder / "ends.npy", np.cumsum([len(piece) for piece in pieces]))
        np.save(folder / "mask.npy", np.zeros((1, (len(pieces) + 31) // 32), np.int32))
        (folder / "settings.json").write_text(json.dumps({"eos_token": grammars.tokenizer.eos_token}))
        self.mask = np.load(folder / "mask.npy", mmap_mode="r").view(np.uint32)[0]
        script = Path(__file__).with_name("xgrammar_peer.py")
        self._process = subprocess.Popen([python, script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to a command. Raises EngineError where xgrammar fails at it, or is not running."""
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise EngineError(f"xgrammar's process ended with status {self._process.wait()}; is xgrammar installed for "
                              "the Python that constrain_cost.xgrammar_python names?")
        answer = json.loads(line)
        if answer["problem"]:
            raise EngineError(answer["problem"])
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


class XGrammarText:
    """A text in xgrammar's process; the search under the mask is ours, its time included."""

    def __init__(self, engine: XGrammar, schema: dict):
        self.engine = engine
        engine.ask(schema=json.dumps(schema))

    def choose(self, logits: np.ndarray, favourite: int) -> tuple[int, float]:
        filled = self.engine.ask()["us"]
        token, us = timed(lambda: best_allowed(logits, self.engine.mask))
        return token, filled + us

    def accept(self, token: int) -> tuple[bool, float]:
        answer = self.engine.ask(token=token)
        return answer["accepted"], answer["us"]
