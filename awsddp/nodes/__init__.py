"""The nodes over SSH: connect, prepare, send files, fetch results.

Only this package imports paramiko. It has no code for AWS or for jobs: it takes endpoints and commands, and
it returns the result or the error of every node, not only the first failure.
"""
