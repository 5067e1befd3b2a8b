"""Notifications: a process on each node sends events of a job to the user's URL."""
