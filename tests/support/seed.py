"""The seed from which the long matrices draw their cases (AWSDDP_SEED=N for others), and the drawing."""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

SEED = int(os.environ.get("AWSDDP_SEED", "1"))
FULL = bool(os.environ.get("AWSDDP_FULL"))


def draw_cases(cases: Sequence[Case], count: int, *, label: str) -> list[Case]:
    """Return `count` cases in their order, drawn by the seed and `what`; with AWSDDP_FULL all of them."""
    if FULL or count >= len(cases):
        return list(cases)
    chosen = random.Random(f"{SEED} {label}").sample(range(len(cases)), count)
    return [cases[number] for number in sorted(chosen)]
