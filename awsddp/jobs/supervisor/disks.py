"""Which disk of this node a file lies on: instance store is empty after a stop."""

from __future__ import annotations

import os
from pathlib import Path

_INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
_SYSFS = Path("/sys/dev/block")


def is_ephemeral(device: int, sysfs: Path = _SYSFS) -> bool:
    """Tell whether a device (st_dev) is instance store, or made of it, as DLAMIs do at /opt/dlami/nvme."""
    return _is_instance_store(Path(os.path.realpath(str(sysfs / f"{os.major(device)}:{os.minor(device)}"))))


def _is_instance_store(block: Path) -> bool:
    below = list((block / "slaves").glob("*"))  # of a volume of LVM or a RAID
    if below:
        return any(_is_instance_store(Path(os.path.realpath(str(path)))) for path in below)
    models = [place / "device" / "model" for place in (block, block.parent)]  # a partition lies in its disk
    return any(path.is_file() and path.read_text().strip() == _INSTANCE_STORE for path in models)
