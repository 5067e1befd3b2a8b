"""A cluster as it was asked for, as it was found, and as it is connected."""
