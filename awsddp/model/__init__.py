"""What is known of clusters, nodes and jobs, as plain data."""
