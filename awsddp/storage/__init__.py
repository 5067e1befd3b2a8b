"""Where data comes from and results go: folders here, buckets of S3."""
