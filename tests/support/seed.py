"""The seed of everything that the long matrices draw (AWSDDP_SEED=N draws others), and how they draw."""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

SEED = int(os.environ.get("AWSDDP_SEED", "1"))
FULL = bool(os.environ.get("AWSDDP_FULL"))


def drawn(cases: Sequence[Case], count: int, *, what: str) -> list[Case]:
    """Return `count` of the cases in their order, drawn by the seed; with AWSDDP_FULL all of them."""
    if FULL or count >= len(cases):
        return list(cases)
    chosen = random.Random(f"{SEED} {what}").sample(range(len(cases)), count)
    return [cases[number] for number in sorted(chosen)]
