"""USD per hour of a g5.xlarge node: the instance, its address, its disk."""

MACHINE, ADDRESS, DISK = 1.006, 0.005, 200 * 0.08 / 730
