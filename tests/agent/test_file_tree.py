"""The files below a folder of a node, and the disks that they are on."""

import os
from collections.abc import Sequence
from pathlib import Path

from awsddp.agent import file_tree


def make_block_device(sysfs: Path, number: str, model: str = "", slaves: Sequence[str] = ()) -> None:
    """Make the sysfs entries of a block device; a number such as 259:1p2 is a partition of 259:1."""
    disk, _, partition = number.partition("p")
    folder = sysfs / "devices" / disk / (number if partition else "")
    (folder / "slaves").mkdir(parents=True)
    (folder.parent if partition else folder).joinpath("device").mkdir(exist_ok=True)
    if model:
        (sysfs / "devices" / disk / "device/model").write_text(f"{model}\n")
    for slave in slaves:
        (folder / "slaves" / slave).symlink_to(sysfs / "devices" / slave)
    (sysfs / (f"{disk.split(':')[0]}:{partition}" if partition else number)).symlink_to(folder)


def test_instance_store_is_detected_under_partitions_and_volumes(tmp_path: Path) -> None:
    make_block_device(tmp_path, "259:0", "Amazon Elastic Block Store")
    make_block_device(tmp_path, "259:1", "Amazon EC2 NVMe Instance Storage")
    make_block_device(tmp_path, "259:1p7")
    make_block_device(tmp_path, "253:0", slaves=["259:0", "259:1"])
    make_block_device(tmp_path, "253:1", slaves=["259:0"])
    by_device = {
        (major, minor): file_tree.is_ephemeral(os.makedev(major, minor), tmp_path)
        for major, minor in ((259, 0), (259, 1), (259, 7), (253, 0), (253, 1), (0, 48))
    }
    assert [device for device, ephemeral in by_device.items() if ephemeral] == [(259, 1), (259, 7), (253, 0)]
