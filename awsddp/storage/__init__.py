"""Storage of data and results: local folders and S3 buckets."""
