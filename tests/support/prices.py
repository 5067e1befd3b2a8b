"""What a node of g5.xlarge costs an hour: the machine, its address, its disk."""

MACHINE, ADDRESS, DISK = 1.006, 0.005, 200 * 0.08 / 730
