"""What an experiment's results depend on is found by reading its source."""

from pathlib import Path

import pytest

from nexus import provenance, sources


@pytest.fixture
def tree(tmp_path: Path, monkeypatch) -> Path:
    files = {
        "nexus/__init__.py": "",
        "nexus/a.py": "from nexus import b\nimport nexus.c\nHEADERS = ('one.hpp', 'absent.hpp')\n",
        "nexus/b.py": "def late():\n    from nexus.d import thing\n    return thing\n",
        "nexus/c.py": "import json\nSCHEMA = 'form.schema.json'\n",
        "nexus/d.py": "thing = 1\n",
        "nexus/form.schema.json": "{}",
        "nexus/unused.py": "",
        "kernels/one.hpp": '#pragma once\n#include <cstdint>\n  # include "two.hpp"\n',
        "kernels/two.hpp": '// #include "three.hpp"\n',
        "kernels/three.hpp": "",
        "experiments/__init__.py": "",
        "experiments/e.py": "from nexus.a import HEADERS\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "PROJECT_ROOT", tmp_path)
    sources.sources.cache_clear()
    yield tmp_path
    sources.sources.cache_clear()


def test_closure(tree: Path):
    assert sources.sources("experiments.e") == (
        "experiments/__init__.py", "experiments/e.py", "kernels/one.hpp", "kernels/two.hpp", "nexus/__init__.py",
        "nexus/a.py", "nexus/b.py", "nexus/c.py", "nexus/d.py", "nexus/form.schema.json",
    )


@pytest.mark.parametrize("name, matters", [("kernels/two.hpp", True), ("nexus/d.py", True), ("nexus/unused.py", False)])
def test_digest_follows_what_is_used(tree: Path, name: str, matters: bool):
    before = sources.code_sha256("experiments.e")
    (tree / name).write_text("changed = True\n")
    sources.sources.cache_clear()
    assert (sources.code_sha256("experiments.e") != before) == matters


def test_reporting_code_keeps_measured_cells(tree: Path):
    (tree / "nexus" / "a.py").write_text("from nexus import stats, b\n")
    (tree / "nexus" / "stats.py").write_text("")
    code, sampling = sources.code_sha256("experiments.e"), sources.sampling_sha256("experiments.e")
    (tree / "nexus" / "stats.py").write_text("x = 1\n")
    assert sources.code_sha256("experiments.e") != code
    assert sources.sampling_sha256("experiments.e") == sampling
    (tree / "nexus" / "b.py").write_text("x = 1\n")
    sources.sources.cache_clear()
    assert sources.sampling_sha256("experiments.e") != sampling


def test_unknown_module():
    with pytest.raises(ModuleNotFoundError, match="experiments.nothing"):
        sources.sources("experiments.nothing")


def test_what_is_said_not_to_sample_exists():
    root = Path(provenance.__file__).resolve().parents[1]
    assert [name for name in sources.NOT_SAMPLING if not (root / name).is_file()] == []
