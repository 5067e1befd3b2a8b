"""Import before torch: nothing here needs NumPy, and torch need not warn at each start if it is missing."""

import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
