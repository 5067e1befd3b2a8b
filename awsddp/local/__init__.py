"""The local cloud: a server program that speaks EC2, and a real host for each instance."""
