"""What a model can do, found by loading it, in a process of its own: a file that llama.cpp cannot take may end it.

    python -m nexus.model_probe params.yaml       # prints the facts as one JSON object
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nexus.config import ROOT, Config, load_params


@dataclass
class ModelFacts:
    """What decides which experiments a model can take part in."""

    problem: str | None = None
    """Why it cannot be loaded, or no text can be made for it; nothing below is known then."""
    n_ctx_train: int = 0
    """Tokens of context in training."""
    has_template: bool = True
    """Whether the file says how it is spoken to."""
    keeps_tokens: bool = True
    """Whether its memory has keys per token, so that a part of a sequence can be removed or shared."""
    refusal: str | None = None
    """Why no block can be spliced, None if one can."""
    system_tokens: int = 0
    query_tokens: int = 0
    """Of the longest query."""
    block_tokens: dict[str, int] = field(default_factory=dict)
    """By the tool's name."""
    conversation_tokens: int = 0
    """Of the shorter of the two conversations."""


def probe(params: Path) -> ModelFacts:
    """The facts about the model that `params` names, with the texts that it names. Raises OSError."""
    command = [sys.executable, "-m", "nexus.model_probe", str(params)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    try:
        return ModelFacts(**json.loads(ended.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        said = next(iter(reversed(ended.stderr.strip().splitlines())), "it said nothing")
        how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"status {ended.returncode}"
        return ModelFacts(problem=f"loading the model ended its process with {how}: {said}")


def facts_of(cfg: Config) -> ModelFacts:
    """The same, in this process."""
    from nexus.model_tuple import context_options, open_model
    from nexus.prompt import PromptError, block_tokens, query_tokens, system_tokens
    from nexus.runtime import Runtime, RuntimeFailure
    from nexus.splice import Splicer, SpliceRefused
    from nexus.workload import load_conversation, load_workload

    texts = cfg.workload
    workload = load_workload(*(ROOT / path for path in (texts.tools, texts.queries, texts.conversation)))
    conversations = [workload.conversation, load_conversation(ROOT / texts.off_topic)]
    try:
        model = open_model(cfg.model)
    except RuntimeFailure as error:
        return ModelFacts(problem=str(error))
    facts = ModelFacts(n_ctx_train=model.n_ctx_train, has_template=bool(model.meta("tokenizer.chat_template")),
                       keeps_tokens=not (model.is_recurrent or model.is_hybrid))
    try:
        facts.system_tokens = len(system_tokens(model, texts.system_prompt))
        facts.query_tokens = max(len(query_tokens(model, case.query)) for case in workload.cases)
        facts.block_tokens = {tool.name: len(block_tokens(model, tool)) for tool in workload.tools}
        facts.conversation_tokens = min(
            len(model.tokenize("".join(model.chat_message(turn["role"], turn["content"]) for turn in turns)))
            for turns in conversations)
        with Runtime(model, context_options(cfg.runtime, n_ctx=min(cfg.runtime.n_ctx, 1024))) as runtime:
            Splicer(runtime)
    except SpliceRefused as error:
        facts.refusal = str(error)
    except (PromptError, RuntimeFailure) as error:
        facts.problem = str(error)
    return facts


if __name__ == "__main__":
    print(json.dumps(asdict(facts_of(load_params(Path(sys.argv[1]))))))
