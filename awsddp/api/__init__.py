"""What notebooks, scripts and the command line share: the verbs as methods of Cluster and Job."""
