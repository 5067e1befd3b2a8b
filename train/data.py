"""Get a data set from where it is published, or make a small one for a rehearsal.

    python train/data.py get stl10 data      # stl10 | cifar10 | mnist: download, check, unpack into data/
    python train/data.py make stl10 data     # random patterns in exactly that format, marked as made

Do this once a node, before the ranks start: `awsddp exec -- python train/data.py get stl10 data`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import image_files
import obtain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("get", "download a published set"), ("make", "make a small set for a rehearsal")):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("name", choices=sorted(obtain.PUBLISHED))
        sub.add_argument("folder", type=Path, metavar="DIR")
        if verb == "get":
            sub.add_argument("--mirror", metavar="URL", help="a base address that holds the same files")
        else:
            sub.add_argument("--train", type=int, default=500, metavar="N")
            sub.add_argument("--test", type=int, default=100, metavar="N")
    args = vars(parser.parse_args())
    try:
        if args.pop("verb") == "get":
            obtain.get(args.pop("name"), args.pop("folder"), **args)
        else:
            obtain.make(args.pop("name"), args.pop("folder"), **args)
    except (image_files.DataError, OSError) as error:  # the latter from a disk that fills while unpacking
        sys.exit(f"data.py: {error}")


if __name__ == "__main__":
    main()
