"""What tests of a real, tiny experiment share: the module names its EXPERIMENT, and overrides in QUICK."""
from __future__ import annotations

import pytest

from experiments import compiled
from nexus import cells, config, pipeline


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A temporary folder in which cells and blocks of the module's EXPERIMENT are kept."""
    folder = tmp_path_factory.mktemp(request.module.EXPERIMENT.NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "CellStore", lambda: cells.CellStore(folder / "cells"))
        patch.setattr(compiled, "BLOCK_FOLDER", folder / "blocks")
        yield folder


@pytest.fixture(scope="module")
def cfg(request):
    """The configuration of the module's QUICK overrides."""
    return config.validate(config.compose(request.module.QUICK))
