"""Saving to S3, and copying from it, on a node."""
