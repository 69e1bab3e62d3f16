"""Scattered recompute on SmolLM2, right and wrong: the same tokens, and how many cells they leave."""
from __future__ import annotations

import numpy as np
import pytest

from experiments import compiled, rope_boundary_gate
from experiments.repair_bench import CONTEXT, WORK
from experiments.rope_boundary_gate import BEHIND, FAITHFUL, WRONG, Gate, scattered_name
from nexus import artifact
from nexus.cells import Cell
from nexus.fidelity import divergence
from nexus.repair import arm_of, runs_of
from nexus.runtime import Runtime

pytestmark = pytest.mark.integration
EXPERIMENT = rope_boundary_gate
QUICK = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "runtime.n_ctx=1024",
         "rope_boundary_gate.n_past=[64]", "rope_boundary_gate.n_cases=1"]


@pytest.fixture(scope="module")
def gate(folder, cfg):
    gate = Gate(cfg)
    gate.bench.enter(64)
    yield gate
    gate.bench.runtime.close()


@pytest.fixture(scope="module")
def samples(gate):
    return gate.measure(Cell({"n_past": 64, "case": gate.bench.cases[0].id}, 1.0, "one"))


def chosen_of(gate):
    """The first case's tokens that are recomputed."""
    return arm_of(scattered_name(25)).select(gate.bench.place(gate.bench.cases[0].id, BEHIND))


def occupied(runtime):
    return [seq for seq in range(runtime.options.n_seq_max) if runtime.pos_max(seq) >= 0]


def test_faithful_arms_have_one_cell_per_position_and_two_controls_have_more(gate, samples):
    n = len(gate.bench.blocks[gate.bench.cases[0].id])
    count = len(chosen_of(gate))
    found = {s["arm"].removeprefix("head-8+random-25 "): s["cells_per_position"] for s in samples}
    assert set(found) == {"noise_floor", "none", "suffix-25", "head-25%", *FAITHFUL, *WRONG}
    more = {"duplicates", "misplaced"}
    assert all(ratio == (1 + count / n if arm in more else 1) for arm, ratio in found.items())
    assert {s["arm"].removeprefix("head-8+random-25 ") for s in samples if not s["faithful"]} == set(WRONG)


def test_every_way_recomputes_the_same_tokens_and_the_head_with_them(gate, samples):
    n, chosen = len(gate.bench.blocks[gate.bench.cases[0].id]), chosen_of(gate)
    share = int(np.ceil(n * 0.25))
    assert chosen[:8].tolist() == list(range(8)) and share <= len(chosen) <= share + 8
    expected = {"noise_floor": n, "none": 0, "suffix-25": share, "head-25%": share}
    for s in samples:
        assert s["recomputed"] == expected.get(s["arm"], len(chosen))


def test_the_wrong_order_is_another_computation_than_either_faithful_way(samples):
    query = {s["arm"].removeprefix("head-8+random-25 "): s["dkl_nats"] for s in samples if s["probe"] == "query"}
    assert len({query[way] for way in ("sequential", "one-batch", "descending")}) == 3


def test_a_measurement_leaves_the_context_alone(gate, samples):
    assert occupied(gate.bench.runtime) == [CONTEXT]
    assert gate.bench.runtime.pos_max(CONTEXT) == gate.bench.position - 1


def test_wrong_caches_are_further_from_a_prefill_than_the_noise_floor_and_other_than_faithful_ones(samples):
    query = {s["arm"].removeprefix("head-8+random-25 "): s["dkl_nats"] for s in samples if s["probe"] == "query"}
    assert query["noise_floor"] < 0.01
    assert all(query[arm] > query["noise_floor"] for arm in WRONG)
    assert not {query[arm] for arm in WRONG} & {query[arm] for arm in FAITHFUL}


def test_sequential_and_one_batch_recompute_the_same_tokens(gate, monkeypatch):
    bench, case_id = gate.bench, gate.bench.cases[0].id
    chosen = chosen_of(gate)
    assert len(runs_of(chosen)) > 2, "scattered"
    decoded: dict[str, list[tuple[int, int]]] = {}
    decode, scattered = Runtime.decode, Runtime.decode_scattered
    block = range(bench.position, bench.position + len(bench.blocks[case_id]))

    def one(runtime, tokens, pos, seq, **more):
        decoded[arm] += [(pos + i, int(token)) for i, token in enumerate(tokens) if pos + i in block]
        return decode(runtime, tokens, pos, seq, **more)

    def many(runtime, tokens, positions, seqs):
        decoded[arm] += [(int(position), int(token)) for position, token in zip(positions, tokens)]
        return scattered(runtime, tokens, positions, seqs)

    monkeypatch.setattr(Runtime, "decode", one)
    monkeypatch.setattr(Runtime, "decode_scattered", many)
    monkeypatch.setattr(bench, "block_end", lambda block: np.zeros(1))
    logits = {}
    for arm, fill in FAITHFUL.items():
        decoded[arm] = []
        logits[arm] = gate.scattered(case_id, fill)[0].logits["query"]
    expected = [(bench.position + int(i), int(bench.blocks[case_id][i])) for i in chosen]
    assert sorted(decoded["sequential"]) == sorted(decoded["one-batch"]) == expected
    found = divergence(logits["sequential"], logits["one-batch"])
    assert not found.bit_identical, "other batches, hence other bits"
    assert found.kl_nats < 0.5


def test_a_failing_fill_leaves_the_context_alone(gate):
    bench = gate.bench

    def fails(place, chosen):
        place.splicer.runtime.seq_cp(place.seq, rope_boundary_gate.FRESH)
        place.splicer.load(place.resident, place.position)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gate.scattered(bench.cases[0].id, fails)
    assert occupied(bench.runtime) == [CONTEXT] and bench.runtime.pos_max(WORK) == -1


def test_a_real_run_has_all_rows_and_resumes_to_the_same_bytes(folder, cfg, monkeypatch):
    path = rope_boundary_gate.run(cfg, folder / "first")
    read = artifact.read(path)
    arms = ["noise_floor", "none", "suffix-25", "head-25%",
            *(f"head-8+random-25 {arm}" for arm in FAITHFUL | WRONG)]
    assert [(row["arm"], row["probe"]) for row in read["rows"]] == [
        (arm, probe) for arm in arms for probe in ("query", "block_end")]
    assert all(row["n_past"] == 64 and row["dkl_nats"]["n"] == 1 for row in read["rows"])
    assert len(artifact.read_samples(path)) == len(arms) * 2
    assert (folder / "first" / "metrics" / "rope_boundary_gate.json").is_file()

    monkeypatch.setattr(Gate, "measure", None)    # A cell that is measured again needs it.
    monkeypatch.setattr(compiled, "compile_blocks", None)    # So does a block that is compiled again.
    again = rope_boundary_gate.run(cfg, folder / "second")
    assert again.read_bytes() == path.read_bytes()
    samples = "rope_boundary_gate.samples.jsonl"
    assert again.with_name(samples).read_bytes() == path.with_name(samples).read_bytes()
