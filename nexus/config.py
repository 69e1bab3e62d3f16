"""The configuration of a run: composed by Hydra from `conf/`, or read from `params.yaml`, and checked here.

DVC accepts a wrong type and an unknown key in `params.yaml`, and Hydra accepts any type: this is the only gate.
"""
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from yaml import YAMLError

from nexus.canonical import sha256_of
from nexus.embedder_spec import EmbedderSpec
from nexus.registry_spec import RegistrySpec
from nexus.weights import ModelSpec

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
# Room that a schema block, the query and the probe need behind the deepest offset.
ROOM_TOKENS = 512
# How the same bytes got here, and how the harness runs, do not change what is measured: no part of a config's hash.
NOT_HASHED = ("results_folder", "run_name", "profile_name", "expected_minutes", "force",
              "share_machine")
MODEL_NOT_HASHED = ("path", "carriers", "licence")
# Each has a section of this name. What another section decides for it is in NEEDS.
EXPERIMENTS = ("dkl_sweep", "splice_cost", "repair", "rope_boundary_gate", "repair_frontier", "calibrated_repair",
               "deep_splice_ttft", "gating_nogo", "layouts", "registry", "embedder", "routing", "slb_latency",
               "routing_accuracy_n250", "routing_generalisation", "arguments", "sidecar_accuracy", "constrain_cost",
               "l0_radix", "block_allocator", "spliced_choice")
ROUTING = ("registry", "embedder", "routing")
NEEDS = {"calibrated_repair": ("repair",), "deep_splice_ttft": ("repair",), "calibration": ROUTING,
         "routing_accuracy_n250": ROUTING, "routing_generalisation": ROUTING,
         "sidecar_accuracy": (*ROUTING, "arguments"), "constrain_cost": ("registry", "arguments"),
         "spliced_choice": ("registry", "repair")}
# Of the workload, these are read by the experiments below, which read none of its other texts.
ROUTING_TEXTS = ("path", "routing")
ROUTED = ("calibration", "routing_accuracy_n250", "routing_generalisation", "sidecar_accuracy", "constrain_cost")
# Of the workload, what the choice from spliced tools reads beside the evaluation queries.
CHOICE_TEXTS = ("conversation", "preambles")
# What most experiments read and these do not.
UNREAD = {"slb_latency": ("workload", "runtime"), "calibration": ("runtime",), "routing_generalisation": ("runtime",),
          "block_allocator": ("workload", "runtime")}


class ConfigError(ValueError):
    """The configuration cannot be used; one line per problem: key, value and what is allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _unique(items: Sequence[Any]) -> Sequence[Any]:
    if len(set(items)) != len(items):
        raise ValueError("every item may appear once")
    return items


def _ascending(items: Sequence[int]) -> Sequence[int]:
    if list(items) != sorted(set(items)):
        raise ValueError("the items must ascend, each once")
    return items


Count = Annotated[int, Field(ge=1)]
# More than any model was trained with, and what still fits a machine's memory as an error instead of its end.
Cells = Annotated[int, Field(ge=1, le=2**20)]
# The most that llama.cpp takes.
Threads = Annotated[int, Field(ge=1, le=512)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)]
Text = Annotated[str, StringConstraints(min_length=1)]
Ascending = AfterValidator(_ascending)
Unique = AfterValidator(_unique)
NotEmpty = Field(min_length=1)
Depths = Annotated[list[Count], NotEmpty, Ascending]
# nexus/route.py says what these names mean.
SystemName = Literal["slb", "slb-tuned", "bm25", "hybrid", "hybrid-tuned", "linear", "linear-tuned", "slb+gate",
                     "slb-tuned+gate", "hybrid+gate", "hybrid-tuned+gate", "linear-tuned+gate"]
Family = Literal["head", "suffix", "head+suffix", "random", "blend", "oracle", "head+blend"]
# nexus/repair.py says what these names mean; they are not parsed here, so that no stage depends on the repair code
# for its configuration alone.
_SHARE = r"(100(\.0+)?|\d{1,2}(\.\d+)?)"
_PART = rf"(head-\d+|head-{_SHARE}%|(suffix|random|blend|oracle)-{_SHARE})"
ArmName = Annotated[str, StringConstraints(pattern=rf"^(none|full|{_PART}(\+{_PART})*)$")]
# nexus/ensemble.py says what these names mean.
# And experiments/choice_bench.py these.
ChoiceArm = Annotated[str, StringConstraints(
    pattern=rf"^(bare|bare-no-reanchor|suffix-R\(n\)|calibrated|{_PART}(\+{_PART})*)$")]
Behind = Annotated[str, StringConstraints(pattern=r"^(system|preamble-[1-9]\d*|ensemble-[1-9]\d*x[1-9]\d*)$")]


class Runtime(_Section):
    n_ctx: Cells
    """Cells of the KV cache, in tokens."""
    n_batch: Count
    """Tokens per decode call; both sides of a comparison are split alike."""
    n_seq_max: Count
    """Sequences that share the cache."""
    n_threads: Threads
    """Threads that llama.cpp decodes with."""
    flash_attention: bool
    """Whether flash attention is used; without it V is stored transposed."""


class RoutingQueries(_Section):
    """JSON-lines files of queries with the tool that answers each; no query is in two of them."""

    evaluation: Text
    """What accuracy is measured on; nothing is tuned on these."""
    adversarial: Text
    """Confusable pairs, which calibrate the gate and, with `development`, choose the default."""
    development: Text
    """What choices between systems are made on, and the gate's fire rate and abstention are measured on."""
    training: Text
    """What cross-encoder and tuned embedder learn from, and the threshold of abstention is chosen on."""


class Workload(_Section):
    tools: Text
    """JSON file of tool schemas, relative to the repository or absolute."""
    queries: Text
    """JSON-lines file of user queries, each naming its tool."""
    conversation: Text
    """JSON file of turns that fill the context up to an offset."""
    system_prompt: Text
    """The text at the start of every context."""
    off_topic: Text
    """JSON file of turns on other subjects than the tools'."""
    preambles: Text
    """JSON list of neutral texts that blocks may be compiled behind; none of them is in a conversation."""
    held_out_tools: Text
    """Tools that no calibration sees, in the form of `tools`."""
    held_out_queries: Text
    """Queries for them, in the form of `queries`."""
    path: Text | None
    """Your own routing queries, {"query", "server"?, "tool", "args"?} per line; null takes the project's."""
    routing: RoutingQueries
    """Queries for routing, whose tools are in the registry."""


class Statistics(_Section):
    level: Annotated[float, Field(gt=0.5, lt=1)]
    """Confidence level of every interval; one-sided bounds need more than ½."""


class DklSweep(_Section):
    offsets: Annotated[list[Annotated[int, Field(ge=0)]], NotEmpty, Ascending]
    """How far, in tokens, a block is moved away from its anchor."""
    n_cases: Count
    """Tool-and-query pairs per offset."""
    arms: Annotated[list[Literal["bare", "bare-no-reanchor", "noise_floor"]], NotEmpty, Unique]
    """What is compared with full prefill."""
    floor_n_batch: Count
    """Tokens per decode call of the noise floor: another split than runtime.n_batch."""


class SpliceCost(_Section):
    n_tokens: Annotated[list[Count], NotEmpty, Ascending]
    """Lengths of the spliced block, in tokens."""
    n_ctx: Annotated[list[Cells], NotEmpty, Ascending]
    """Sizes of the KV cache, in tokens."""
    v_layouts: Annotated[list[Literal["row", "transposed"]], NotEmpty, Unique]
    """How the cache stores V."""
    cells: Annotated[list[Literal["contiguous", "fragmented"]], NotEmpty, Unique]
    """How the free cells lie."""
    repetitions: Count
    """Interleaved repetitions of every timed step but the two below."""
    shift_pairs: Count
    """Interleaved pairs of a decode with and without a pending position shift."""
    prefill_repetitions: Count
    """Prefills of the block from text."""
    n_threads: Threads
    """Threads that llama.cpp decodes with while it is timed."""


class Repair(_Section):
    """The published schedule under its own names, and the calibrated policy."""

    max_splice_pos: Count
    """P: the depth, in tokens, up to which a block is repaired by recompute_pct only."""
    recompute_pct: Annotated[float, Field(ge=0, le=100)]
    """R_base: share of a block recomputed up to depth P, in percent."""
    recompute_full_mult: Annotated[float, Field(gt=1)]
    """K: the schedule recomputes everything from depth K·P on."""
    enable_deep_splice: bool
    """Whether blocks are spliced behind P at all; otherwise they are prefilled there."""
    compiled_behind: Behind
    """What the calibrated policy and the timed arms compile blocks behind."""
    epsilon_nats: Annotated[float, Field(gt=0)]
    """The divergence that the calibrated policy keeps to, read behind the query."""


class RopeBoundaryGate(_Section):
    n_past: Depths
    """Depths of the context, in tokens."""
    recompute_pct: Annotated[float, Field(gt=0, lt=100)]
    """Share of the block that is recomputed, scattered, in percent."""
    n_cases: Count
    """Tool-and-query pairs per depth."""


class RepairFrontier(_Section):
    n_past: Depths
    """Depths of the context, in tokens."""
    families: Annotated[list[Family], NotEmpty, Unique]
    """Arms that are measured at every share."""
    shares_pct: Annotated[list[Annotated[float, Field(gt=0, lt=100)]], NotEmpty, Unique]
    """Shares of a block recomputed, in percent; 0 and 100 are measured always."""
    compiled_behind: Annotated[list[Behind], NotEmpty, Unique]
    """What blocks are compiled behind; every family is measured behind the first."""
    arms: Annotated[list[ArmName], Unique]
    """Further arms, by their names in nexus/repair.py, measured behind each."""
    lead_families: Annotated[list[Family], Unique]
    """The families that are measured behind the others, too."""
    lead_shares_pct: Annotated[list[Annotated[float, Field(gt=0, lt=100)]], Unique]
    """And their shares."""
    n_cases: Count
    """Tool-and-query pairs per depth."""


class CalibratedRepair(_Section):
    n_past: Depths
    """Depths of the context, in tokens."""
    ladder: Annotated[list[ArmName], NotEmpty, Unique]
    """Arms to choose from, cheapest first; a prefill comes behind the last."""
    n_calibration: Annotated[int, Field(ge=2)]
    """Tool-and-query pairs per depth of the calibration set; one alone has no upper bound."""
    n_test: Count
    """Held-out tool-and-query pairs per depth, behind the off-topic conversation."""


class DeepSpliceTtft(_Section):
    n_past: Depths
    """Depths of the context, in tokens."""
    curves: Annotated[list[Annotated[float, Field(gt=1)]], NotEmpty, Unique]
    """K of the schedules that are timed."""
    arms: Annotated[list[ArmName], NotEmpty, Unique]
    """Other arms, timed beside the schedules."""
    trials_warm: Count
    """Interleaved trials with the context resident."""
    trials_cold: Count
    """Interleaved trials that begin with an empty cache."""


class GatingNogo(_Section):
    n_past: Depths
    """Depths of the context, in tokens."""
    contexts: Annotated[list[Literal["on", "off"]], NotEmpty, Unique]
    """Conversations on and off the tools' topic."""
    n_cases: Count
    """Tools per depth and context."""


class Layouts(_Section):
    also: Annotated[list[Name], Unique]
    """Other models of conf/model that the table covers."""
    n_past: Annotated[list[Annotated[int, Field(ge=0)]], NotEmpty, Ascending]
    """Depths of the context, in tokens; 0 is the identity control."""
    arms: Annotated[list[ArmName], NotEmpty, Unique]
    """What is compared with full prefill."""
    n_cases: Count
    """Tool-and-query pairs per depth."""


class Routing(_Section):
    """How a query finds its tool."""

    system: SystemName
    """The default: what `nexus route` uses, and what is compared with the others."""
    lexical_weight: Annotated[float, Field(ge=0, le=10)]
    """Weight of BM25, relative to its largest for the query, beside the cosine in the systems called linear."""
    n_candidates: Annotated[int, Field(ge=2, le=50)]
    """First candidates that the cross-encoder decides among where the gate fires."""
    gate_quantile: Annotated[float, Field(gt=0, lt=1)]
    """τ is this quantile of the margins on adversarial queries; the paper takes 0.2."""
    tuned_embedder: Name
    """The file in conf/embedder that the systems called tuned embed with."""
    cross_encoder: Text
    """Adapter that makes a cross-encoder of MiniLM, relative to the repository or absolute."""
    n_threads: Threads
    """Threads of the encoders."""


class RoutingAccuracy(_Section):
    n_tools: Annotated[list[Count], NotEmpty, Ascending]
    """Sizes of the registry that every query is asked at; larger ones than the registry count as all of it."""
    all_tools: bool
    """Whether the whole registry is a size, too."""
    systems: Annotated[list[Literal[SystemName, "slb-no-name"]], NotEmpty, Unique]
    """Systems without a language model."""
    baselines: Annotated[list[Literal["concat_all", "rag_mcp"]], Unique]
    """Systems in which the language model reads schemas and names a tool."""
    rag_k: Annotated[int, Field(ge=3)]
    """Schemas that rag_mcp reads; with fewer its recall@3 would not be one."""
    n_queries: Count
    """Evaluation queries, in file order."""
    n_ctx: Cells
    """Cells of the baselines' context, in tokens; more than that is an overflow."""


class RoutingGeneralisation(_Section):
    systems: Annotated[list[SystemName], NotEmpty, Unique]
    """What is compared with plain rank fusion."""
    n_queries: Count
    """Queries per public set, drawn with the seed."""
    n_selection: Count
    """Other queries per public set, drawn behind them: what the default system was chosen with."""


class SlbLatency(_Section):
    n_vectors: Annotated[list[Count], NotEmpty, Ascending]
    """Rows of the table."""
    dims: Annotated[list[Count], NotEmpty, Unique]
    """Elements of a row."""
    k: Count
    """How many of the best rows are returned."""
    repetitions: Count
    """Interleaved rounds per size."""
    peers: Annotated[list[Literal["numkong", "faiss", "usearch", "numpy"]], Unique]
    """Other implementations that are timed beside ours."""


class Arguments(_Section):
    """How the arguments of a chosen tool are filled."""

    signature_tokens: Annotated[int, Field(ge=8)]
    """Budget of a tool's compressed signature."""
    described_tokens: Annotated[int, Field(ge=1)]
    """What descriptions, defaults and bounds may bring it up to; names, types and enums may go beyond."""
    window_tokens: Annotated[int, Field(ge=0)]
    """Budget of the conversation that the sidecar reads."""
    recent_turns: Count
    """Latest turns that stand there verbatim."""
    surrogate_chars: Annotated[int, Field(ge=16)]
    """Longest text that stands for a tool's result."""
    max_tokens: Annotated[int, Field(ge=16)]
    """Most tokens of an arguments object."""
    max_string_chars: Count
    """Longest string, where the schema demands none longer."""
    max_items: Count
    """Longest array, and most keys of a free-form map, where the schema demands no more."""


class SidecarAccuracy(_Section):
    cases: Text
    """JSON-lines file of queries with the arguments that they specify."""
    coreference: Text
    """The same with a conversation before the query, in which some of the arguments stand."""
    n_cases: Count
    """Cases of the first file, in file order."""
    n_coreference: Count
    """Cases of the second file, in file order."""
    n_timed: Count
    """Cases that are timed with the signature and with the full schema in turn."""
    repetitions: Count
    """Timed pairs per case."""
    n_ctx: Cells
    """Cells of the context, in tokens."""


class ConstrainCost(_Section):
    n_cases: Count
    """Development queries whose arguments are decoded, each with its tool's schema."""
    repetitions: Count
    """How often each is decoded."""
    peers: Annotated[list[Literal["llguidance", "llama-cpp-python", "xgrammar"]], Unique]
    """Other implementations that are timed beside ours."""
    xgrammar_python: Text | None
    """Python that has xgrammar, relative to the repository or absolute, since it would bring a training stack into this
    environment; where it is not there, or null, the row says "not installed"."""


class L0Radix(_Section):
    n_slots: Annotated[int, Field(ge=1, le=255)]
    """Sequences that keep prefixes."""
    max_tokens: Count
    """Cells that the kept prefixes may take together."""
    n_seeds: Annotated[int, Field(ge=2)]
    """Traces of the simulated agents."""
    n_sessions: Count
    """Conversations that run interleaved in a trace."""
    n_turns: Count
    """Turns of each conversation."""
    n_requests: Count
    """Requests of the trace that the model really answers."""
    copy_repetitions: Count
    """Timed copies per prefix length."""


class BlockAllocator(_Section):
    n_threads: Annotated[list[Threads], NotEmpty, Ascending]
    """Threads that contend for the allocator."""
    n_operations: Count
    """Allocations and frees of a thread per repetition."""
    repetitions: Annotated[int, Field(ge=2)]
    """Interleaved repetitions."""


class SplicedChoice(_Section):
    n_queries: Count
    """Queries of the evaluation set; each is asked at every point."""
    n_tools: Annotated[list[Count], NotEmpty, Ascending]
    """How many tools stand in the context, at the depth `at_depth`."""
    depths: Annotated[list[Annotated[int, Field(ge=0)]], NotEmpty, Ascending]
    """Tokens of conversation before the tools, with `at_n_tools` tools."""
    at_n_tools: Annotated[int, Field(ge=2)]
    """Where everything is measured: this many tools …"""
    at_depth: Annotated[int, Field(ge=0)]
    """… behind this many tokens."""
    arms: Annotated[list[ChoiceArm], NotEmpty, Unique]
    """How spliced tools are repaired, at that point; prefills are measured always."""
    compiled_behind: Annotated[list[Behind | Literal["start"]], NotEmpty, Unique]
    """What the tools of these arms are compiled behind; "start" is nothing at all."""
    averaged_arms: Annotated[list[ChoiceArm], Unique]
    """Arms with tools that are compiled behind `repair.compiled_behind`, at that point."""
    axis_arms: Annotated[list[ChoiceArm], Unique]
    """Arms at the other points, compiled behind the system prompt (calibrated: `repair.compiled_behind`)."""
    n_timed: Annotated[int, Field(ge=2)]
    """Interleaved trials of every arm's time to the first token, at each point."""
    max_tokens: Count
    """Most tokens of a free answer in which a call is looked for."""


class Config(_Section):
    """All of it. An experiment gets this object and reads the sections that it needs."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Start of every random stream."""
    run_name: Name
    """The folder below results_folder."""
    results_folder: Text
    """Where results go, relative to the repository."""
    profile_name: Name
    """Which conf/profile this is."""
    expected_minutes: Annotated[float, Field(gt=0)]
    """Duration of the whole pipeline on 2 cores with the default model; only shown, before a first run."""
    force: bool
    """Whether to measure again what is already there."""
    share_machine: bool
    """Whether several experiments may measure on this machine at once although some of them take times."""
    model: ModelSpec
    """The weights: conf/model."""
    workload: Workload
    """The text: conf/workload."""
    runtime: Runtime
    """How llama.cpp is set up."""
    statistics: Statistics
    """How intervals are computed."""
    dkl_sweep: DklSweep
    """Figure 1: divergence of a spliced block against its offset."""
    splice_cost: SpliceCost
    """What a splice costs, against a memory copy and the engine's own shift."""
    repair: Repair
    """How a block is repaired after it was placed."""
    rope_boundary_gate: RopeBoundaryGate
    """Scattered recompute, done right and done wrong."""
    repair_frontier: RepairFrontier
    """Divergence and speed of every arm against the share recomputed."""
    calibrated_repair: CalibratedRepair
    """The calibrated policy, tested on what it was not calibrated on."""
    deep_splice_ttft: DeepSpliceTtft
    """Table III: time to first token, cold and warm."""
    gating_nogo: GatingNogo
    """Table II: what predicts the drift of keys."""
    layouts: Layouts
    """What can be spliced, what is refused, and with which fidelity."""
    registry: RegistrySpec
    """Which tools there are: conf/registry."""
    embedder: EmbedderSpec
    """What turns texts into vectors: conf/embedder."""
    routing: Routing
    """How a query finds its tool."""
    routing_accuracy_n250: RoutingAccuracy
    """Figure 5: accuracy against the number of tools."""
    routing_generalisation: RoutingGeneralisation
    """The same on public sets of other domains."""
    slb_latency: SlbLatency
    """What an INT8 scan costs, beside other implementations."""
    arguments: Arguments
    """How the arguments of a chosen tool are filled."""
    sidecar_accuracy: SidecarAccuracy
    """Arguments from a compressed signature, their accuracy and latency."""
    constrain_cost: ConstrainCost
    """What constrained decoding costs per token, beside other implementations."""
    l0_radix: L0Radix
    """What a cache of prefixes saves."""
    block_allocator: BlockAllocator
    """What the allocator of resident blocks costs, padded and not."""
    spliced_choice: SplicedChoice
    """Whether a model can choose from spliced tools."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        runtime, deepest, costs = self.runtime, self.dkl_sweep.offsets[-1], self.splice_cost
        if self.profile_name != "full" and self.run_name == self.model.name:
            raise ValueError(
                f"run_name: {self.run_name!r} belongs to the profile full; "
                f"with profile {self.profile_name} use another, such as {self.run_name}.{self.profile_name}"
            )
        if runtime.n_batch > runtime.n_ctx:
            raise ValueError(f"runtime.n_batch: {runtime.n_batch} is more than runtime.n_ctx ({runtime.n_ctx})")
        if self.dkl_sweep.floor_n_batch >= runtime.n_batch:
            raise ValueError(
                f"dkl_sweep.floor_n_batch: {self.dkl_sweep.floor_n_batch} splits nothing otherwise than "
                f"runtime.n_batch ({runtime.n_batch}); use a smaller number"
            )
        if deepest + ROOM_TOKENS > runtime.n_ctx:
            raise ValueError(
                f"dkl_sweep.offsets: {deepest} and {ROOM_TOKENS} tokens of room do not fit runtime.n_ctx "
                f"({runtime.n_ctx}); lower the offset or raise runtime.n_ctx"
            )
        for name in ("rope_boundary_gate", "repair_frontier", "calibrated_repair", "deep_splice_ttft", "gating_nogo",
                     "layouts"):
            if getattr(self, name).n_past[-1] + ROOM_TOKENS > runtime.n_ctx:
                raise ValueError(
                    f"{name}.n_past: {getattr(self, name).n_past[-1]} and {ROOM_TOKENS} tokens of room do not fit "
                    f"runtime.n_ctx ({runtime.n_ctx}); lower the depth or raise runtime.n_ctx"
                )
        named = {"repair_frontier.arms": self.repair_frontier.arms, "deep_splice_ttft.arms": self.deep_splice_ttft.arms,
                 "calibrated_repair.ladder": self.calibrated_repair.ladder, "layouts.arms": self.layouts.arms}
        for name, arms in named.items():
            if oracles := [arm for arm in arms if "oracle" in arm]:
                raise ValueError(f"{name}: {oracles[0]!r} needs the answer and is no method; it belongs in "
                                 "repair_frontier.families as a control")
        if doubles := {"none", "full"} & set(self.repair_frontier.arms):
            raise ValueError(f"repair_frontier.arms: {min(doubles)!r} is measured always; leave it out")
        if 2 * costs.n_tokens[-1] > costs.n_ctx[0]:
            raise ValueError(
                f"splice_cost.n_tokens: two blocks of {costs.n_tokens[-1]} tokens do not fit the smallest "
                f"splice_cost.n_ctx ({costs.n_ctx[0]})"
            )
        return self

    def resolved(self, experiment: str) -> dict[str, Any]:
        """What the experiment's results depend on, as plain data: for its artifact, its hash and its cells.

        Left out are the sections of other experiments, how the weights got here and how the harness runs.
        """
        others = set(EXPERIMENTS) - {experiment, *NEEDS.get(experiment, ())}
        data = self.model_dump(mode="json", exclude=others | set(NOT_HASHED) | set(UNREAD.get(experiment, ())))
        data["model"] = {key: value for key, value in data["model"].items() if key not in MODEL_NOT_HASHED}
        if "workload" in data:
            routed = experiment in ROUTED
            data["workload"] = {key: value for key, value in data["workload"].items()
                                if key == "system_prompt" or (key in ROUTING_TEXTS) == routed}
            if experiment == "spliced_choice":
                data["workload"] = self.workload.model_dump(mode="json", include=set(CHOICE_TEXTS) | {"system_prompt"})
        return data

    def texts(self, experiment: str) -> list[str]:
        """The files of the workload that the experiment reads, relative to the repository or absolute."""
        if "workload" in UNREAD.get(experiment, ()):
            return []
        if experiment == "sidecar_accuracy":
            return [self.sidecar_accuracy.cases, self.sidecar_accuracy.coreference]
        if experiment == "spliced_choice":
            return [self.workload.routing.evaluation, *(getattr(self.workload, name) for name in CHOICE_TEXTS)]
        if experiment in ROUTED:
            return list(self.workload.routing.model_dump().values())
        return list(self.workload.model_dump(exclude={"system_prompt", *ROUTING_TEXTS}).values())

    def key_of(self, value: str) -> str:
        """The first key that has this value, as an override would spell it. Raises KeyError where there is none."""
        def search(data: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
            for key, item in data.items():
                if isinstance(item, Mapping):
                    yield from search(item, f"{prefix}{key}.")
                elif item == value:
                    yield f"{prefix}{key}"

        for key in search(self.model_dump(mode="json")):
            return key
        raise KeyError(value)

    def sha256(self, experiment: str) -> str:
        """SHA-256 (64 hex digits) of `resolved(experiment)`: the artifact's `config_sha256`."""
        return sha256_of(self.resolved(experiment), "config")


def compose(overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The composition of `conf/` with Hydra overrides, interpolations resolved, as plain data. Raises ConfigError."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return _plain(hydra_compose("config", list(overrides)))
    except Exception as error:
        raise as_config_error(error) from error


def params_text(overrides: Iterable[str] = ()) -> str:
    """The content of `params.yaml` for these overrides, byte for byte as `dvc exp run` writes it."""
    return OmegaConf.to_yaml(OmegaConf.create(compose(overrides)))


def from_hydra(composed: DictConfig) -> Config:
    """The checked Config of what `@hydra.main` hands to a task. Raises ConfigError."""
    return validate(_plain(composed))


def load_params(path: Path | str) -> Config:
    """The checked Config of a `params.yaml`. Raises ConfigError, FileNotFoundError."""
    try:
        # OmegaConf's loader and not plain PyYAML, which reads 1e6 as text.
        return validate(_plain(OmegaConf.load(path)))
    except FileNotFoundError:
        raise
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None
    except Exception as error:
        raise ConfigError(f"{path}: {as_config_error(error)}") from error


def validate(data: Mapping[str, Any]) -> Config:
    """The Config with these values. Raises ConfigError, with one line per problem."""
    try:
        return Config.model_validate(data, strict=True)
    except ValidationError as error:
        lines = [_problem(problem) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def as_config_error(error: Exception) -> ConfigError:
    """The same problem as ConfigError: a composition error of Hydra or OmegaConf on one line, with a suggestion."""
    if isinstance(error, ConfigError):
        return error
    chain = f"{error}\n{error.__cause__ or ''}"
    if found := re.search(r"Could not override '([^']+)'", chain):
        key = found[1]
        return ConfigError(f"{key}: unknown key{_did_you_mean(key, _known_keys(Config))}")
    if found := re.search(r"Could not find '([^']+)/([^']+)'", chain):
        group, name = found.groups()
        choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        return ConfigError(f"{group}: no choice {name!r}{_did_you_mean(name, choices)}; there are {', '.join(choices)}")
    if isinstance(error, OmegaConfBaseException) and getattr(error, "full_key", None):
        return ConfigError(f"{error.full_key}: {_first_line(error)}")
    if (override := getattr(error, "override", None)) is not None:
        # The parser names its own error class, or repeats the override, before it says what is wrong.
        lines = [line.removeprefix("LexerNoViableAltException: ") for line in str(error).splitlines()]
        reason = next((line for line in lines if re.search(r"\w", line) and line != override
                       and not line.startswith(("Error parsing", "See "))), "")
        reason = f": {reason}" if reason else ""
        return ConfigError(f"override {override!r} cannot be read{reason}; write key=value, with quotes around a value "
                           "that holds other characters than a name")
    if isinstance(error, OSError) and error.strerror:
        return ConfigError(error.strerror)
    if isinstance(error, YAMLError):
        return ConfigError(" ".join(str(error).split()))
    return ConfigError(_first_line(error))


def _plain(composed: Any) -> dict[str, Any]:
    if not isinstance(composed, DictConfig):
        raise ConfigError(f"a configuration is a mapping, not a {type(composed).__name__}")
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise as_config_error(error) from error


def _problem(problem: Mapping[str, Any]) -> str:
    # The validator after all fields names its key itself, since it looks at several.
    key = ".".join(str(step) for step in problem["loc"])
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key{_did_you_mean(key, _known_keys(Config))}"
    if problem["type"] == "missing":
        group = key.split(".")[0]
        place = f"the chosen file of conf/{group}" if (CONF / group).is_dir() else "conf/config.yaml"
        return f"{key}: missing; it is in {place}, and `make params` writes params.yaml anew"
    if not key:
        return reason
    return f"{key}: {problem['input']!r} is not allowed; {reason[0].lower()}{reason[1:]}"


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
