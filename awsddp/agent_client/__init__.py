"""The client of the agent on the nodes: requests, and what their answers mean."""
