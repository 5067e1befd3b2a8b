"""Why a rank or a job ended, and where ranks hang."""
