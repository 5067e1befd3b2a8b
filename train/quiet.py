"""Import this before torch: without NumPy, which nothing here needs, torch would warn at each start."""

import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
