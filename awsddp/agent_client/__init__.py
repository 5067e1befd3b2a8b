"""The client for the nodes' agents: send requests to the agents, and validate and merge their responses."""
