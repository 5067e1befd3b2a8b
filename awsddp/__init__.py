"""awsddp: from a laptop to a DistributedDataParallel model trained on N EC2 GPU nodes in one command."""

__version__ = "0.1.0"
