"""xgrammar in a process of its own: it would bring a training stack into ours.

Needs xgrammar, apache-tvm-ffi and numpy.

Started with the path of a folder: `pieces.npy` and `ends.npy` there hold the vocabulary, and each mask is written to
`mask.npy`. A line of standard input is a JSON command, a line of standard output its answer; times are in µs.

Masks are filled into numpy arrays, for which xgrammar needs neither PyTorch nor transformers, though it imports both:
where they are not installed they are replaced by modules of that name without content.
"""
import importlib.util
import json
import sys
import time
import types
from pathlib import Path

import numpy as np
import tvm_ffi  # noqa: F401  (looks for the real PyTorch)


class Absent(types.ModuleType):
    """Answers any name with an empty class, which is enough for annotations and base classes."""

    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


for package in ("torch", "transformers"):
    if importlib.util.find_spec(package) is None:
        sys.modules[package] = Absent(package)

import xgrammar  # noqa: E402


def main(folder: Path) -> None:
    joined, ends = np.load(folder / "pieces.npy").tobytes(), np.load(folder / "ends.npy").tolist()
    pieces = [joined[begin:end] for begin, end in zip([0, *ends], ends)]
    settings = json.loads((folder / "settings.json").read_text())
    vocabulary = xgrammar.TokenizerInfo(pieces, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(pieces),
                                        stop_token_ids=[settings["eos_token"]])
    # No cache: what is compiled again is to take its time again.
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    mask = np.load(folder / "mask.npy", mmap_mode="r+")
    matcher = None
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter_ns()
        answer = {"problem": None}
        try:
            if "schema" in command:
                matcher = None
                matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(command["schema"], any_whitespace=False))
            elif "token" in command:
                answer["accepted"] = bool(matcher.accept_token(command["token"]))
            elif not matcher.fill_next_token_bitmask(mask):
                mask[:] = -1
        except Exception as error:
            answer["problem"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        answer["us"] = (time.perf_counter_ns() - start) / 1e3
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
