"""The nodes over SSH: connect, prepare, send files, fetch results.

The only room that knows paramiko. It knows nothing of AWS and nothing of jobs: it is given endpoints and
commands, and returns what came back, for every node, never the first failure alone.
"""
