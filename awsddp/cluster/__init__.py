"""The verbs of a cluster, one file each."""
