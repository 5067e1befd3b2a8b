"""Download a published data set, or make a small one for a rehearsal.

    python train/data.py get stl10 data      # stl10 | cifar10 | mnist: download, check, unpack into data/
    python train/data.py make stl10 data     # random patterns in exactly that format, marked as synthetic

Do this once per node, before the ranks start: `awsddp exec -- python train/data.py get stl10 data`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import image_files
import obtain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    get = verbs.add_parser("get", help="download a published set")
    make = verbs.add_parser("make", help="make a small set for a rehearsal")
    for verb, function in ((get, obtain.get), (make, obtain.make)):
        verb.set_defaults(function=function)
        verb.add_argument("name", choices=sorted(obtain.PUBLISHED))
        verb.add_argument("folder", type=Path, metavar="DIR")
    get.add_argument("--mirror", metavar="URL", help="base URL of a mirror with the same files")
    make.add_argument("--train", type=int, default=500, metavar="N")
    make.add_argument("--test", type=int, default=100, metavar="N")
    args = vars(parser.parse_args())
    try:
        args.pop("function")(**args)
    except (image_files.DataError, OSError) as error:  # OSError: the disk filled up while unpacking
        sys.exit(f"data.py: {error}")


if __name__ == "__main__":
    main()
