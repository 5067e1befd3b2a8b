"""The training programs are started as files: their folder is what Python finds their neighbours in."""

from __future__ import annotations

import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "train"
sys.path.insert(0, str(TRAIN))
