"""A `conda` with the commands and options that awsddp uses; rattler parses, solves and installs.

CONDA_MIRROR is the URL of a folder of channels that replaces https://conda.anaconda.org; CONDA_CACHE is a
folder for rattler's caches. As conda does, it runs pip for the requirements below `pip:`.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import yaml
from rattler import Channel, ChannelConfig, Gateway, MatchSpec, Subdir, VirtualPackage, install, solve
from rattler.networking import Client
from rattler.networking.middleware import MirrorMiddleware


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verbs = parser.add_subparsers(required=True)
    create = verbs.add_parser("create")
    create.add_argument("-c", "--channel", action="append", default=[])
    create.add_argument("packages", nargs="*")
    env = verbs.add_parser("env").add_subparsers(required=True)
    by_file = env.add_parser("create"), env.add_parser("update")
    for verb in by_file:
        verb.add_argument("--file", type=Path, required=True)
    for verb in (create, *by_file):
        verb.add_argument("--prefix", type=Path, required=True)
    for verb in (create, by_file[0]):
        verb.add_argument("--yes", action="store_true")
    args = parser.parse_args()
    document = yaml.safe_load(args.file.read_text()) if "file" in args else {}
    pip = [line for row in document.get("dependencies", ()) if isinstance(row, dict) for line in row["pip"]]
    specs = [
        spec for spec in document.get("dependencies", args.__dict__.get("packages")) if isinstance(spec, str)
    ]
    channels = document.get("channels", ["conda-forge"])  # as miniforge has it
    specs += ["pip"] if pip and "pip" not in specs else []
    asyncio.run(make(args.prefix, [name for name in channels if name != "nodefaults"], specs))
    if pip:
        requirements = args.file.with_name("condaenv.requirements.txt")
        requirements.write_text("\n".join(pip))
        words = ["-m", "pip", "install", "-U", "-r", str(requirements), "--exists-action=b"]
        end(subprocess.run([args.prefix / "bin/python", *words]).returncode)
    end(0)


def end(code: int) -> NoReturn:
    """Exit without finalizing the interpreter, which a running thread of rattler would abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def make(prefix: Path, channels: list[str], specs: list[str]) -> None:
    """Solve and install. A failure ends the program with the error of rattler."""
    cache = Path(os.environ["CONDA_CACHE"])
    alias = os.environ.get("CONDA_CHANNEL_ALIAS", "https://conda.anaconda.org")
    mirror = os.environ.get("CONDA_MIRROR")
    client = Client([MirrorMiddleware({"https://conda.anaconda.org/": [mirror]})] if mirror else [])
    try:
        records = await solve(
            sources=[Channel(name, ChannelConfig(alias)) for name in channels],
            specs=[MatchSpec(re.sub(r"^([\w-]+)::", rf"{alias}/\1::", spec)) for spec in specs],
            gateway=Gateway(cache_dir=cache / "repodata", client=client),
            platforms=[Subdir.current(), "noarch"],
            virtual_packages=VirtualPackage.detect(),
        )
        await install(
            records,
            target_prefix=prefix,
            cache_dir=cache / "packages",
            client=client,
            show_progress=False,
        )
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        end(1)


if __name__ == "__main__":
    main()
