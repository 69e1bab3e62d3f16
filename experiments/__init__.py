"""One runner per result artifact."""
