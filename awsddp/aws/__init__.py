"""The only package that uses boto3: reads facts, carries out plans, terminates resources by awsddp's tags."""
