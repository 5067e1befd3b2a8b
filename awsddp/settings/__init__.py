"""The user's settings: keys, values and sources."""
