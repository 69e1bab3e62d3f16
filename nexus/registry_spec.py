"""What a file of conf/registry says: which MCP servers to list, or which file holds the tools."""
from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Text = Annotated[str, StringConstraints(min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ServerSpec(_Section):
    """One MCP server. In command, env and url: {venv} its environment, {repository} an empty git repository,
    {env:NAME} a variable of the collecting process, so that no token needs to stand in a file."""

    name: Name
    """Identifies the server's tools, together with their names."""
    requirements: Text | None = None
    """Hash-locked requirements, relative to the repository or absolute; null runs a program that is there already."""
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Program and arguments of a server that speaks over standard input and output."""
    env: dict[str, str] = {}
    """Further environment variables of the command."""
    url: Annotated[str, StringConstraints(pattern=r"^https?://\S+$")] | None = None
    """Address of a running server that speaks streamable HTTP."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 180.0
    """From start to complete listing, installation not counted; a first start reads thousands of files."""

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"server {self.name}: give command or url, exactly one of them")
        if self.url is not None and (self.requirements is not None or self.env):
            raise ValueError(f"server {self.name}: requirements and env belong to a command; remove them beside url")
        return self


class RegistrySpec(_Section):
    """One file of conf/registry."""

    name: Name
    """Names the listing."""
    path: Text | None = None
    """A user's own listing, relative to the repository or absolute; then no server is asked."""
    servers: list[ServerSpec] = []
    """Servers to collect from; the first one's tools come first in every subset."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) != bool(self.servers):
            raise ValueError("give path or servers: a file is the whole registry, and without one a server must list")
        names = [server.name for server in self.servers]
        if doubles := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"servers: {doubles[0]!r} appears twice; tools are identified by server and name")
        return self
