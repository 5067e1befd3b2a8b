"""Data types of clusters, nodes and jobs."""
