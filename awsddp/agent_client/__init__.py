"""The client of the agent on nodes: send requests, validate and merge responses."""
