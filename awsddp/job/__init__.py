"""The verbs of a job, one file each, and what they share."""
