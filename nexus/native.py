"""The native side: kernels and llama.cpp, compiled and loaded through cppyy on first use.

Importing this module costs nothing; the first call of `kernels()` starts the C++ interpreter (1 to 2 s) and the first
call of `llama()` loads llama.cpp into it. The wheel of llama-cpp-python carries several copies of each library: only
`libllama.so` may be loaded, and nothing here imports `llama_cpp`, so that one copy of each library is in the process.
"""
from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
HEADERS = ("cpu_features.hpp", "f16.hpp", "rope_shift.hpp", "kv_state.hpp", "tool_block.hpp")
LLAMA_HEADERS = ("llama_session.hpp", "resident_block.hpp")


class NativeError(RuntimeError):
    """The native side cannot be loaded; the message says what to do."""


def describe(error: Exception) -> str:
    """The message of a C++ exception without the signature that cppyy puts before it."""
    return str(error).split("=>")[-1].strip().removeprefix("runtime_error:").removeprefix("invalid_argument:").strip()


@functools.cache
def _interpreter():
    import cppyy

    cppyy.add_include_path(str(KERNELS))
    return cppyy


@functools.cache
def kernels():
    """The C++ namespace `nexus` with every kernel header compiled (no llama.cpp needed)."""
    cppyy = _interpreter()
    for header in HEADERS:
        cppyy.include(header)
    return cppyy.gbl.nexus


def llama_library() -> Path:
    """Path of the one `libllama` that may be loaded. Raises NativeError if llama-cpp-python is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise NativeError("llama-cpp-python is not installed; run `make install`")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    path = Path(spec.origin).parent / "lib" / f"libllama.{suffix}"
    if not path.exists():
        raise NativeError(f"{path} is missing; llama-cpp-python was built without shared libraries: run `make install`")
    return path


@functools.cache
def llama():
    """`cppyy.gbl` with llama.cpp's public C API loaded and the session glue in namespace `nexus`."""
    cppyy = _interpreter()
    if "llama_cpp" in sys.modules:
        raise NativeError("llama_cpp was imported before nexus; import nexus first (two copies of llama.cpp would clash)")
    kernels()
    library = llama_library()
    cppyy.add_include_path(str(library.parent.parent.parent / "include"))
    cppyy.load_library(str(library))
    cppyy.include("llama.h")
    for header in LLAMA_HEADERS:
        cppyy.include(header)
    return cppyy.gbl
