"""The agent: the program on a node that starts a job's ranks, watches them and serves requests.

The agent's source is sent with each request (agent_client/calls.py) and runs under the node's own python3.
These modules therefore use only the standard library, run on Python 3.8, and import only each other.
"""
