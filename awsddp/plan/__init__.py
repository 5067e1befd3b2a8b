"""Plans as plain data: of a launch, of changes to a cluster, of the environment and its packages."""
