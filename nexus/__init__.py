"""Mechanisms of KV splicing and retrieval-decoupled tool routing."""
