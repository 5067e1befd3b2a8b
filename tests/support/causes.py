"""What a node says of a job that failed."""

MISSING = (
    "ModuleNotFoundError: No module named '{0}'. {0} is not installed for the python that runs the ranks."
)
