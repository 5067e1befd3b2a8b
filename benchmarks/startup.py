"""Seconds of `awsddp --help`, compared with `python -c 'import click'`, interleaved in one run.

    python benchmarks/startup.py [ROUNDS]

The promise is at most 1.5 times the time of the import. Whole processes are timed; the least and the median
time are shown.
"""

import argparse
import statistics
import subprocess
import sys
import time

CASES = {
    "python -c pass": ["-c", "pass"],
    "import click": ["-c", "import click"],
    "awsddp --help": ["-m", "awsddp", "--help"],
}


def seconds(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=21)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for words in CASES.values():
        seconds(words)
    for _ in range(rounds):
        for name, words in CASES.items():
            times[name].append(seconds(words))
    reference = statistics.median(times["import click"])
    print(f"{'case':<16} {'least s':>8} {'median s':>9} {'x click':>8}   ({rounds} rounds)")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:<16} {min(taken):8.3f} {median:9.3f} {median / reference:8.2f}")


if __name__ == "__main__":
    main()
