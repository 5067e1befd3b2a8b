"""The nodes over SSH: connect, prepare, send files, fetch results.

The only package that imports paramiko. It has no code for AWS or for jobs: it takes endpoints and commands,
and returns the result or the error of every node, not only the first failure.
"""
