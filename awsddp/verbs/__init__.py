"""The story, one verb a file, top to bottom. This is the Python API of awsddp."""
