"""What can be spliced and what is refused, found by trying it: memory, RoPE, KV types, flash attention, window.

Models are the run's own and those of `layouts.also`, each with V in rows (flash attention on) and transposed (off):

default          arms of repair and the noise floor against a full prefill. At depth 0 the block stands where it was
                 compiled, and `none` decodes with the reference's split: its logits should have the reference's bits
kv_type_k=q8_0   and the other SETTINGS: one context option is changed. What is spliced nevertheless is measured for
                 one case at its anchor

Toys (experiments/toy_models.py) stand for architectures whose real models are too large to bring along. They have no
text: random tokens are spliced at their anchor. `remote` is a model behind a text interface.
"""
from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton

from experiments import rows
from experiments.repair_bench import RepairBench
from experiments.toy_models import TOYS
from nexus.blocks import block_split, compile_blocks
from nexus.cells import Cell
from nexus.config import ROOT, Config, compose, validate
from nexus.fidelity import Divergence, divergence
from nexus.model_tuple import context_options, open_model, tuple_of
from nexus.pipeline import cell_inputs, experiment_main, measure_cells, write_results
from nexus.prompt import block_tokens, query_tokens, system_tokens
from nexus.repair import RepairError, arm_of
from nexus.runtime import ContextOptions, Model, Runtime, RuntimeFailure
from nexus.splice import Splicer, SpliceRefused, choose_isa, memory_refusal
from nexus.weights import ModelSpec
from nexus.workload import load_workload, select

NAME = "layouts"
BEHIND = "system"
FLASH_ATTENTION = {"row": True, "transposed": False}
DEFAULT, FLOOR, REMOTE = "default", "noise_floor", "remote"
SETTINGS = {
    "kv_type_k=q8_0": {"kv_type_k": "q8_0"}, "kv_type_v=q8_0": {"kv_type_v": "q8_0"},
    "kv_unified=false": {"kv_unified": False}, "swa_full=false": {"swa_full": False},
    "rope_freq_scale=0.5": {"rope_freq_scale": 0.5},
}
# llama.cpp makes no context with quantised V and without flash attention, whoever asks.
ROW_ONLY = ("kv_type_v=q8_0",)
TOY_LAYOUTS = {"toy-gemma2": tuple(FLASH_ATTENTION), "toy-mamba": ("row",), "toy-qwen2vl": ("row",)}
# Tokens left of a toy's block, of the block (several windows of toy-gemma2), and behind it.
TOY_TOKENS = (11, 75, 7)
FIRST_BYTE_TOKEN = 3
SEQ = 0


def specs_of(cfg: Config) -> list[ModelSpec]:
    """The run's own model and the others, each once. Raises ConfigError for a name that conf/model does not have."""
    specs = [cfg.model]
    # Started by hand, Hydra is at work already and would refuse to compose anything else.
    outer = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        for name in cfg.layouts.also:
            spec = validate(compose([f"model={name}"])).model
            if all(spec.name != other.name and spec.sha256 != other.sha256 for other in specs):
                specs.append(spec)
    finally:
        Singleton.set_state(outer)
    return specs


def refusal(model: Model, options: ContextOptions) -> str | None:
    """Why no block can be spliced in such a context, None when it can: from trying to make both."""
    try:
        with Runtime(model, options) as runtime:
            Splicer(runtime)
    except SpliceRefused as error:
        return str(error)
    except RuntimeFailure as error:
        return str(error).removesuffix(f" ({options})")
    return None


def at_anchor(runtime: Runtime, left: np.ndarray, block: np.ndarray, query: np.ndarray) -> Divergence:
    """Of the logits behind `query`, the block spliced where it was compiled, from a prefill. Empties the runtime."""
    runtime.clear()
    splicer, anchor, logits = Splicer(runtime), len(left), []
    compiled, = compile_blocks(runtime, left, [block])
    resident = splicer.hold(compiled)
    for splice in (False, True):
        runtime.clear()
        runtime.decode(left, 0, SEQ)
        if splice:
            splicer.place(resident, anchor, SEQ)
        else:
            runtime.decode(block, anchor, SEQ, split=block_split(len(block)))
        logits.append(runtime.decode(query, anchor + len(block), SEQ, logits=True))
    runtime.clear()
    return divergence(*logits)


def spliced(found: Divergence, **keys) -> dict:
    """A sample of something that was spliced."""
    return {**keys, "status": "spliced", "message": None, "dkl_nats": found.kl_nats, "top1": found.top1,
            "bit_identical": found.bit_identical}


def refused(message: str, **keys) -> dict:
    """A sample of something that was refused."""
    return {**keys, "status": "refused", "message": message, "dkl_nats": None, "top1": None, "bit_identical": None}


class Layouts:
    """Measures one cell at a time; models are opened when a cell needs them, and one bench is kept."""

    def __init__(self, cfg: Config, specs: Sequence[ModelSpec]):
        self.cfg, self.specs = cfg, {spec.name: spec for spec in specs}
        self.workload = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                      ROOT / cfg.workload.conversation)
        self.cases = select(self.workload.cases, cfg.layouts.n_cases)
        self.arms = {name: arm_of(name) for name in cfg.layouts.arms}
        self._models: dict[str, Model] = {}
        self._bench: tuple[str, str, RepairBench | str] | None = None

    def cells(self, inputs: dict) -> Iterator[Cell]:
        """All cells, those of one bench together; the `swa_full` one is empty for a model without a window."""
        for name, spec in self.specs.items():
            for v_layout in FLASH_ATTENTION:
                keys = {"model": name, "v_layout": v_layout}
                common = {**inputs, "also_sha256": spec.sha256, **keys}
                for n_past in self.cfg.layouts.n_past:
                    for case in self.cases:
                        yield Cell({**common, "setting": DEFAULT, "n_past": n_past, "case": case.id},
                                   weight=2000 + n_past, label=f"{name}, {v_layout}, depth {n_past}, {case.tool}")
                for setting in SETTINGS:
                    if v_layout == "row" or setting not in ROW_ONLY:
                        yield Cell({**common, "setting": setting}, weight=500, label=f"{name}, {v_layout}, {setting}")
        for name, layouts in TOY_LAYOUTS.items():
            for v_layout in layouts:
                yield Cell({**inputs, "model": name, "v_layout": v_layout, "setting": DEFAULT}, weight=50,
                           label=f"{name}, {v_layout}")

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one cell."""
        name, v_layout, setting = (cell.inputs[key] for key in ("model", "v_layout", "setting"))
        if name in TOYS:
            return self.toy(name, v_layout)
        if setting == DEFAULT:
            return self.default(name, v_layout, cell.inputs["n_past"], cell.inputs["case"])
        return self.changed(name, v_layout, setting)

    def default(self, name: str, v_layout: str, n_past: int, case_id: str) -> list[dict]:
        """Every arm and the noise floor, for one case."""
        keys = {"model": name, "v_layout": v_layout, "setting": DEFAULT, "n_past": n_past, "case": case_id}
        bench = self.bench(name, v_layout)
        if isinstance(bench, str):
            return [refused(bench, **keys, arm=arm) for arm in (*self.arms, FLOOR)]
        bench.enter(n_past)
        reference, values = bench.reference(case_id)
        samples = []
        for arm in (*self.arms, FLOOR):
            try:
                measured = (bench.prefilled(case_id) if arm == FLOOR
                            else bench.repaired(case_id, BEHIND, self.arms[arm], values))
            except RepairError as error:
                samples.append(refused(str(error), **keys, arm=arm))
                continue
            samples.append(spliced(divergence(reference.logits["query"], measured.logits["query"]), **keys, arm=arm))
        return samples

    def changed(self, name: str, v_layout: str, setting: str) -> list[dict]:
        """The first case under one changed context option."""
        model, case = self.model(name), self.cases[0]
        if setting == "swa_full=false" and model.n_swa == 0:
            return []
        keys = {"model": name, "v_layout": v_layout, "setting": setting, "n_past": 0, "arm": "none", "case": case.id}
        options = self.options(v_layout, **SETTINGS[setting])
        message = refusal(model, options)
        if message:
            return [refused(message, **keys)]
        tool = next(tool for tool in self.workload.tools if tool.name == case.tool)
        # Compiled in memory: the folder of block files has no place for contexts of other options.
        with Runtime(model, options) as runtime:
            found = at_anchor(runtime, system_tokens(model, self.cfg.workload.system_prompt),
                              block_tokens(model, tool), query_tokens(model, case.query))
        return [spliced(found, **keys)]

    def toy(self, name: str, v_layout: str) -> list[dict]:
        """As many blocks of random tokens as there are cases."""
        keys = {"model": name, "v_layout": v_layout, "setting": DEFAULT, "n_past": 0, "arm": "none"}
        with tempfile.TemporaryDirectory() as folder:
            model = Model(TOYS[name](Path(folder) / f"{name}.gguf"))
            try:
                message = refusal(model, self.options(v_layout))
                if message:
                    return [refused(message, **keys, case=None)]
                rng, samples = np.random.default_rng(self.cfg.seed), []
                with Runtime(model, self.options(v_layout)) as runtime:
                    for i in range(self.cfg.layouts.n_cases):
                        tokens = [rng.integers(FIRST_BYTE_TOKEN, model.n_vocab, n).astype(np.int32) for n in TOY_TOKENS]
                        samples.append(spliced(at_anchor(runtime, *tokens), **keys, case=f"random-{i}"))
                return samples
            finally:
                model.close()

    def options(self, v_layout: str, **overrides) -> ContextOptions:
        return context_options(self.cfg.runtime, flash_attention=FLASH_ATTENTION[v_layout], **overrides)

    def model(self, name: str) -> Model:
        if name not in self._models:
            self._models[name] = open_model(self.specs[name])
        return self._models[name]

    def bench(self, name: str, v_layout: str) -> RepairBench | str:
        """The bench of this model and layout, or why there is none. Closes the one before."""
        if self._bench is None or self._bench[:2] != (name, v_layout):
            self.close()
            model = self.model(name)
            bench = refusal(model, self.options(v_layout)) or RepairBench(
                self.cfg, model, self.workload, self.cfg.layouts.n_cases, [BEHIND],
                flash_attention=FLASH_ATTENTION[v_layout])
            self._bench = name, v_layout, bench
        return self._bench[2]

    def close(self) -> None:
        """Free the bench's context."""
        if self._bench is not None and isinstance(self._bench[2], RepairBench):
            self._bench[2].runtime.close()
        self._bench = None


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/layouts.json`; cells measured earlier are not measured again."""
    layouts = Layouts(cfg, specs_of(cfg))
    model = layouts.model(cfg.model.name)
    cells = list(layouts.cells(cell_inputs(NAME, cfg, model.sha256)))
    try:
        samples = measure_cells(cfg, cells, layouts.measure, "layouts")
    finally:
        layouts.close()
    samples.append(refused(memory_refusal(None), model=REMOTE, v_layout="row", setting=DEFAULT, n_past=0, arm="none",
                           case=None))
    table = rows.layouts(samples, cfg.seed, cfg.statistics.level)
    return write_results(
        NAME, cfg, out, tuple_=tuple_of(model, cfg.model), rows=table, samples=samples, isa=choose_isa()[0],
        metrics={f"{row['model']}.{row['v_layout']}.{row['arm']}.{row['n_past']}": row["dkl_nats"].value
                 for row in table if row["setting"] == DEFAULT and row["status"] == "spliced"})


if __name__ == "__main__":
    experiment_main(NAME, run)
