"""The verbs that act on a job, one file each, and what they share."""
