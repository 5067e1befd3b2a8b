"""Which instance types, GPUs, drivers, torch releases and images fit each other. Tables and pure functions.

A row is a dated fact with its source; what exists now is asked from AWS.
"""
