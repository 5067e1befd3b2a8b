"""Puts train/ on sys.path, as its programs run as scripts and import their neighbours."""

from __future__ import annotations

import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "train"
sys.path.insert(0, str(TRAIN))
