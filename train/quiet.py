"""Import this before torch, which otherwise warns at each start if NumPy (not needed here) is missing."""

import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
