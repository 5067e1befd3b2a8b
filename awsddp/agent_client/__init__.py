"""The client for the nodes' agents, which sends requests, and validates and merges responses."""
