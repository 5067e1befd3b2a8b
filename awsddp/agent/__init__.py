"""The program that runs on a node: one supervisor for each job there, and the questions asked about it.

It travels as source with each request (agent_client/calls.py) and runs under the node's own python3, so that
these modules use the standard library alone, run on Python 3.8, and import only each other.
"""
