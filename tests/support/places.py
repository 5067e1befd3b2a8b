"""A place in S3 that jobs save to."""

TO = "s3://results/runs"
