"""Build the wheel and the sdist into dist/, check them with twine, and test the wheel without a clone.

The wheel is installed into an empty environment, with the dependencies of the local cloud; `awsddp
--version`, `--local plan` and `--local run` must work in it. The sdist must build the same wheel.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def run(*words: str | Path, cwd: Path = ROOT, **environ: str) -> None:
    """Print and run a command. Raises CalledProcessError."""
    print("+", *words, flush=True)
    subprocess.run(words, cwd=cwd, env={**os.environ, **environ}, check=True, stdin=subprocess.DEVNULL)


def environment(folder: Path, *packages: str | Path) -> Path:
    """Create a virtual environment with these packages, and return the folder of its programs."""
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return folder / "bin"


def build(programs: Path, folder: Path) -> Path:
    """Build and check the wheel and the sdist; return the wheel. Raises CalledProcessError, ValueError."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(programs / "python", "-m", "build", "--outdir", DIST, ROOT)
    run(programs / "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(programs / "python", "-m", "build", "--wheel", "--outdir", folder, ROOT)
    (direct_wheel,) = folder.glob("*.whl")
    if zipfile.ZipFile(direct_wheel).namelist() != zipfile.ZipFile(wheel).namelist():
        raise ValueError(f"the wheel built from {sdist.name} differs from the wheel of this tree")
    return wheel


def use(wheel: Path, folder: Path) -> None:
    """Test the wheel in an empty environment and an empty folder. Raises CalledProcessError."""
    awsddp = environment(folder / "empty", f"awsddp[local] @ {wheel.as_uri()}") / "awsddp"
    project = folder / "project"
    project.mkdir()
    home = {"AWSDDP_HOME": str(folder / "home"), "PATH": f"{awsddp.parent}:{os.environ['PATH']}"}
    try:
        run(awsddp, "--version", cwd=project, **home)
        run(awsddp, "--local", "plan", cwd=project, **home)
        run(awsddp, "--local", "run", "-y", "--nodes", "2", "--world-size", "2", cwd=project, **home)
    finally:
        run(awsddp, "local", "stop", cwd=project, **home)


def main() -> None:
    """Build, check and test the distributions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = environment(folder / "tools", "build", "twine")
        wheel = build(programs, folder / "wheel")
        use(wheel, folder)
    print("\nin dist/:", *(path.name for path in sorted(DIST.iterdir())), sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
