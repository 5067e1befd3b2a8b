"""The verbs that act on a cluster, one file each."""
