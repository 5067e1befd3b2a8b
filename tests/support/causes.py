"""An explanation in the cause of a failed job."""

MISSING = (
    "ModuleNotFoundError: No module named '{0}'. {0} is not installed for the python that runs the ranks."
)
