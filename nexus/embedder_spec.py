"""What a file of conf/embedder says: which embedder, by content, and where its bytes or its source may come from."""
from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from nexus.carriers import Carrier, Section
from nexus.weights import ModelSpec, Sha256

# What a GGUF can be made of (nexus/minilm.py).
SOURCE_FILES = ("config.json", "model.safetensors", "vocab.txt")


class SourceFile(Section):
    sha256: Sha256
    size_bytes: Annotated[int, Field(gt=0)]


class LocalFolder(Section):
    kind: Literal["local"]
    path: str
    """A folder on this machine with the source files, used in place."""


class HubFolder(Section):
    kind: Literal["hub"]
    repo: str
    """Owner and name on the model hub."""
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    """Commit of the repository."""


class PypiFolder(Section):
    kind: Literal["pypi"]
    package: str
    version: str
    folder: str
    """Pattern of the folder in the wheel that has the files."""


SourceCarrier = Annotated[LocalFolder | HubFolder | PypiFolder, Field(discriminator="kind")]


class SourceSpec(Section):
    """Files of a published model that the GGUF is made of."""

    files: dict[str, SourceFile]
    """What identifies each file, by its name: config.json, model.safetensors and vocab.txt."""
    carriers: Annotated[list[SourceCarrier], Field(min_length=1)]
    """Where the files may come from, tried in this order."""

    @model_validator(mode="after")
    def _complete(self) -> SourceSpec:
        if sorted(self.files) != sorted(SOURCE_FILES):
            raise ValueError(f"files are {', '.join(sorted(self.files))}; give {', '.join(SOURCE_FILES)}")
        return self

    @property
    def sha256(self) -> str:
        """What identifies the weights: the SHA-256 of model.safetensors."""
        return self.files["model.safetensors"].sha256


class EmbedderSpec(Section):
    """One file of conf/embedder."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    path: str | None
    """A user's own GGUF; then nothing is fetched or converted."""
    sha256: Sha256 | None
    """What identifies the GGUF; null takes the user's file as it is and records its hash."""
    size_bytes: Annotated[int, Field(gt=0)] | None
    """Length of the GGUF; null exactly where sha256 is."""
    licence: str
    """SPDX expression."""
    dim: Annotated[int, Field(gt=0)]
    """Elements of a vector."""
    max_tokens: Annotated[int, Field(ge=5)]
    """Longer texts are cut; [CLS] and [SEP] count."""
    pooling: Literal["mean", "cls", "last"]
    """How the tokens' states become one vector; the file must say the same."""
    query_prefix: str
    document_prefix: str
    """Put before each text, for models trained with them; else empty."""
    carriers: list[Carrier]
    """Where the GGUF may come from, tried in this order; may be empty where `source` is given."""
    source: SourceSpec | None
    """What the GGUF is made of if no carrier brings it."""
    adapter: str | None
    """Low-rank changes that are merged into the source, relative to the repository or absolute; null for none."""

    @model_validator(mode="after")
    def _obtainable(self) -> EmbedderSpec:
        self.as_model()
        if self.sha256 is None and self.path is None:
            raise ValueError("sha256 is null, so nothing says what to fetch; give it, or path")
        if self.adapter is not None and self.source is None:
            raise ValueError("an adapter is merged into source, which is null; give the source")
        if self.path is None and not self.carriers and self.source is None:
            raise ValueError("give path, carriers or source: nothing says where the embedder comes from")
        return self

    def as_model(self) -> ModelSpec:
        """The GGUF as weights to be verified."""
        return ModelSpec(name=self.name, path=self.path, sha256=self.sha256, size_bytes=self.size_bytes,
                         licence=self.licence, n_ctx_train=None, rope=None, carriers=self.carriers)
