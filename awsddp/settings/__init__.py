"""The settings of a user: keys, values and sources."""
