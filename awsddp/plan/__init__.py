"""Plans as plain data: for a launch, for changes to a cluster, for the environment and its packages."""
