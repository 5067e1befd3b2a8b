"""Tables of compatible instance types, GPUs, drivers, torch releases and images, and pure functions of them.

Each row is dated and has its source; availability is read from AWS.
"""
