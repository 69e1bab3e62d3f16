"""Routers by configuration, with the real MiniLM over a few tools."""
from __future__ import annotations

import numpy as np
import pytest

from nexus.carriers import WeightsError
from nexus.config import ConfigError, compose, validate
from nexus.lexical import Lexical
from nexus.registry import Tool
from nexus.route import GATED, SYSTEMS, RouteError
from nexus.routing_setup import BASE, NO_NAME, RoutingSetup, embedder_spec
from nexus.slb import available_isas
from nexus.tool_document import description_text, document_text

TOOLS = [Tool("s", name, text, {}) for name, text in (
    ("create_issue", "Open a new issue in a repository, with a title and a body."),
    ("list_branches", "List the branches of a repository."), ("get_weather", "Current weather and forecast of a city."),
    ("send_email", "Send an e-mail to somebody."), ("play_music", "Start it."),
    ("convert_currency", "Convert an amount of money from one currency to another."))]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Encoders of the default configuration; without a cross-encoder, whose adapter is not there."""
    adapter = tmp_path_factory.mktemp("adapter") / "absent.safetensors"
    return RoutingSetup(validate(compose([f"routing.cross_encoder={adapter}", "routing.tuned_embedder=minilm"])))


class Backwards:
    """A cross-encoder that prefers what comes last."""

    def score(self, query, documents):
        return np.arange(len(documents), dtype=np.float32)


@pytest.mark.integration
@pytest.mark.parametrize("system", [*(system for system in SYSTEMS if system not in GATED), NO_NAME])
def test_every_system_without_a_gate_finds_a_plain_query(setup, system):
    router = setup.router(system, TOOLS)
    route = router.route("What will the weather in Lisbon be like tomorrow?")
    assert route.tool.name == "get_weather" and not route.gate_fired and router.gate is None
    assert (route.scan_us is None) == (router.dense is None) == (system == "bm25")
    assert isinstance(router.retriever, Lexical) == (system == "bm25")


@pytest.mark.integration
def test_a_system_without_names_reads_descriptions_alone(setup):
    with_names, without = setup.router("slb", TOOLS), setup.router(NO_NAME, TOOLS)
    query = "play some music"
    assert with_names.route(query).tool.name == "play_music"
    assert without.route(query).best_cosine < 0.4 < 0.5 < with_names.route(query).best_cosine
    for router, text in ((with_names, document_text), (without, description_text)):
        encoder = router.dense.encoder
        best = encoder.embed_documents([text(tool) for tool in TOOLS]) @ encoder.embed_query(query)
        assert router.route(query).tool == TOOLS[int(np.argmax(best))]
        assert router.route(query).best_cosine == pytest.approx(float(best.max()), abs=0.01)


@pytest.mark.integration
def test_routers_are_kept(setup):
    assert setup.router("slb", TOOLS) is setup.router("slb", list(TOOLS))
    assert setup.router("slb", TOOLS) is not setup.router("slb", TOOLS[:3])
    assert setup.router("slb", TOOLS, abstain_below=0.5) is not setup.router("slb", TOOLS)


@pytest.mark.integration
def test_a_router_abstains_below_the_cosine_it_is_given(setup):
    router = setup.router("hybrid", TOOLS, abstain_below=0.3)
    assert router.route("Good morning! Slept well?").tool is None
    assert router.route("Send an e-mail to Ann").tool.name == "send_email"


@pytest.mark.integration
def test_a_gate_needs_a_threshold_and_an_adapter(setup):
    with pytest.raises(ValueError, match="system 'slb\\+gate' needs a threshold; run the experiment calibration"):
        setup.router("slb+gate", TOOLS)
    with pytest.raises(WeightsError, match="adapter .*absent.safetensors: No such file"):
        setup.router("slb+gate", TOOLS, 0.1)


@pytest.mark.integration
def test_a_gate_asks_about_as_many_candidates_as_configured(monkeypatch):
    monkeypatch.setattr(RoutingSetup, "cross_encoder", Backwards())
    setup = RoutingSetup(validate(compose(["routing.n_candidates=3"])))
    query = "What will the weather in Lisbon be like tomorrow?"
    always, never = setup.router("hybrid+gate", TOOLS, 1.0), setup.router("hybrid+gate", TOOLS, -1.0)
    plain = setup.router("hybrid", TOOLS).route(query)
    assert [c.tool for c in never.route(query).candidates] == [c.tool for c in plain.candidates]
    fired = always.route(query)
    assert fired.gate_fired and [c.tool for c in fired.candidates[:3]] == [c.tool for c in plain.candidates[2::-1]]
    assert [c.tool for c in fired.candidates[3:]] == [c.tool for c in plain.candidates[3:]]
    assert fired.retrieved == plain.retrieved


@pytest.mark.integration
def test_no_tools_and_unknown_systems_are_refused(setup):
    with pytest.raises(RouteError, match="system 'sbl' is unknown; use one of slb, "):
        setup.router("sbl", TOOLS)
    with pytest.raises(RouteError, match="the registry has no tools"):
        setup.router("bm25", [])


@pytest.mark.integration
def test_it_says_what_it_depends_on(setup):
    setup.router("slb", TOOLS)
    assert setup.hashes["embedder"] == setup.cfg.embedder.sha256 and "cross_encoder" not in setup.hashes
    assert setup.isa == available_isas()[-1]


@pytest.mark.integration
def test_everything_is_opened_at_once_where_hashes_are_wanted(monkeypatch):
    monkeypatch.setattr(RoutingSetup, "cross_encoder", Backwards())
    setup = RoutingSetup(validate(compose(["routing.tuned_embedder=minilm"])))
    setup.open_all()
    assert setup.hashes == dict.fromkeys(("embedder", "tuned_embedder"), setup.cfg.embedder.sha256)


def test_the_cross_encoder_is_made_of_an_embedder_whose_weights_are_published():
    base = embedder_spec(BASE)
    assert base.name == BASE == "minilm" and base.source is not None


def test_an_embedder_that_has_no_file_is_told_with_those_that_have_one():
    with pytest.raises(ConfigError, match="no file conf/embedder/mini.yaml; there are minilm, "):
        embedder_spec("mini")
