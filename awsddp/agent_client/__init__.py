"""The client of the agent on nodes: sends requests, and validates and merges responses."""
