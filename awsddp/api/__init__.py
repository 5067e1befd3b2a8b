"""The Python API: the verbs as methods of Cluster and Job."""
