"""The S3 URI that jobs save to."""

TO = "s3://results/runs"
