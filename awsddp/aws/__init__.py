"""The only package that uses boto3: it reads facts, carries out plans and terminates resources."""
