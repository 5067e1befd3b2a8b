"""The seed of everything that the long matrices draw: AWSDDP_SEED=N draws others."""

import os

SEED = int(os.environ.get("AWSDDP_SEED", "1"))
