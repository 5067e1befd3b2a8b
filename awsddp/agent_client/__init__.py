"""The client for the nodes' agents: sends requests, and validates and merges responses."""
