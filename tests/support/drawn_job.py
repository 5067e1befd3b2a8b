"""A job that makes files drawn by its seed. Nodes run it; a test imports it for the expected results."""

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

KINDS = ("plain", "deep", "runs", "odd", "same", "link", "outside", "closed")


def draw_files(seed: int, node: int) -> dict[str, str]:
    """Return the files of rank `node`: the kind of each, by its path in the work folder."""
    draw = random.Random(f"{seed} {node}")
    made = {f"always{node}.txt": "plain"}
    for number in range(draw.randint(2, 6)):
        kind = draw.choice(KINDS)
        name = {
            "deep": f"a/b {number}/c/deep.bin",
            "runs": f"runs/exp{number}/events.out",
            "odd": f"odd '{number}' \u00e4\n.txt",
            "same": "same.bin",
        }.get(kind, f"{kind}{number}")
        made[name] = kind
    return made


def content(seed: int, node: int, path: str) -> bytes:
    """Return the bytes of a file; "same.bin" is the same everywhere."""
    text = f"{seed} {path}" if path == "same.bin" else f"{seed} {node} {path}"
    return hashlib.sha256(text.encode()).digest() * (1 + len(path) * 50)


def make(seed: int, node: int) -> None:
    """Make the files in the current folder."""
    for path, kind in draw_files(seed, node).items():
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # left by an earlier job
        if kind == "link":
            target.symlink_to(f"always{node}.txt")
        elif kind == "outside":
            store = Path.home() / f"outside-{seed}-{target.name}"
            store.write_bytes(content(seed, node, path))
            target.symlink_to(store)
        else:
            target.write_bytes(content(seed, node, path))
        if kind == "closed":
            target.chmod(0)


def main() -> None:
    """Usage: drawn_job.py SEED RANK SECONDS. On TERM it saves for 2 s and exits with 0."""
    seed, rank, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

    def save(*_: object) -> None:
        time.sleep(2)
        Path(os.environ["AWSDDP_RUN_DIR"], "saved").write_text("in time")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    make(seed, rank)
    os.write(1, b"made\n")
    time.sleep(seconds)


if __name__ == "__main__":
    main()
