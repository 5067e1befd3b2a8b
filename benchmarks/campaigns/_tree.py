"""Draws a tree of results. It runs on a node in place of a training program.

    python tree.py SEED LABEL FILES [SECONDS]

The names at the top level contain LABEL. All other names, and the content of all files, are drawn from SEED.
FILES is the number of small files. For SECONDS seconds, files are changed and a log is rotated, both five
times per second.
"""

import os
import random
import sys
import time
from pathlib import Path

NAMES = (
    *(
        "model.pt",
        "model.pt~2",
        "model.pt~2~2",
        "Model.PT",
        "MODEL.pt",
        "line\nbreak",
        "\x1b[2J",
        "back\\slash",
    ),
    *(
        "caf\u00e9",
        "cafe\u0301",
        "latin\udce9",
        "latin\\xe9",
        "latin\\udce9",
        " blank ",
        "-rf",
        "a:b*?",
        ".git",
    ),
    *(
        "job.json",
        "~2",
        "metrics.jsonl",
        "x" * 255,
        "%41",
        "+",
        "&<>\"'",
        "deep/er/still/model.pt",
        "deep/er~2/a",
    ),
)


class Tree:
    """A tree of files and links in a job's run folder and project folder. Some links lead to `outside`."""

    def __init__(self, seed: str, label: str, run: Path, work: Path, outside: Path) -> None:
        self.dice = random.Random(seed)
        self.tops = [run / label, work / "run" / label, work / label]
        self.outside = outside / label

    def draw(self, files: int) -> None:
        """Create files and links."""
        dice, run, work = self.dice, self.tops[0], self.tops[2]
        for top in self.tops:
            for name in dice.sample(NAMES, dice.randint(5, len(NAMES))):
                self._write(top / name)
        for number in range(files):
            self._write(work / f"{number % 7}/small-{number}", size=dice.randrange(100))
        self._write(self.outside / "folder/inner")
        self._write(self.outside / "file")
        made = sorted(path for top in self.tops for path in top.rglob("*") if path.is_file())
        for number in range(dice.randint(2, 8)):
            to_file, to_folder = dice.choice(made), dice.choice(made).parent
            target = dice.choice(
                (to_file, to_folder, self.outside / "file", self.outside / "folder", Path("nowhere"))
            )
            link = dice.choice((run, work)) / f"link {number}"
            link.symlink_to(target if dice.random() < 0.5 else os.path.relpath(target, link.parent))
        os.link(made[0], work / "hard link")

    def change(self, seconds: float) -> None:
        """For `seconds`, rewrite files (some in place, with unchanged size and time), rename some, and rotate
        a log."""
        for number in range(round(5 * seconds)):
            self._rotate(number)
            files = sorted(path for top in self.tops for path in top.rglob("*.p[tT]") if path.is_file())
            for path in self.dice.sample(files, min(3, len(files))):
                change = self.dice.choice((self._write, self._rewrite, self._replace, self._rename))
                change(path)
            time.sleep(0.2)

    def _write(self, path: Path, size: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = self.dice.choice((0, 1, 1000, 50_000, 200_000)) if size is None else size
        path.write_bytes(self.dice.randbytes(size))

    def _rewrite(self, path: Path) -> None:
        before = path.stat()
        path.write_bytes(self.dice.randbytes(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _replace(self, path: Path) -> None:
        part = path.with_name("being written")
        self._write(part)
        part.replace(path)

    def _rename(self, path: Path) -> None:
        path.replace(path.with_name("renamed.pt"))

    def _rotate(self, number: int) -> None:
        log = self.tops[2] / "train.log"
        for older in (3, 2, 1, 0):
            path = log.with_name(f"train.log.{older}") if older else log
            if path.exists():
                path.replace(log.with_name(f"train.log.{older + 1}"))
        log.write_bytes(b"%d\n" % number * self.dice.randrange(5000))


if __name__ == "__main__":
    seed, label, files, *seconds = sys.argv[1:]
    tree = Tree(seed, label, Path(os.environ["AWSDDP_RUN_DIR"]), Path.cwd(), Path.home() / "outside")
    tree.draw(int(files))
    tree.change(float(seconds[0]) if seconds else 0.0)
    print("drawn", seed)
