"""The agent: polls the collectors on a node, spools on disk, ships to the service, serves /metrics."""
