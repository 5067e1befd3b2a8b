"""Tables of compatible instance types, GPUs, drivers, torch releases and images; pure functions read them.

Each row is dated and has its source; availability is read from AWS.
"""
