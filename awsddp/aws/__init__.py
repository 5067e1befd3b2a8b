"""The only room that knows boto3: it reads facts, carries out a plan, and ends what carries our tags."""
