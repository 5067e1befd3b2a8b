"""Sessions, and how they find a cluster and connect to its nodes."""
