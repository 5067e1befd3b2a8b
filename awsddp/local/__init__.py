"""The local cloud: an emulator of EC2 and S3, with a real host for each instance."""
