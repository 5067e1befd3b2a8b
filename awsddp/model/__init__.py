"""Data types for clusters, nodes and jobs."""
