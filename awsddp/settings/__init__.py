"""What a user may set: keys, their values and where they come from."""
