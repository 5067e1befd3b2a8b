"""Upload results to S3 and copy data from S3, on a node."""
