"""Packages made by the tests, which need no index."""

import io
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: tuple[str, ...] = (),
    extras: tuple[str, ...] = (),
    tag: str = "any",
    text: str = "",
    python: str = "",
) -> None:
    """Write a wheel with one module, which holds its version and `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n{text}")
        needs = "".join(f"Requires-Dist: {name}\n" for name in requires)
        needs += f"Requires-Python: {python}\n" if python else ""
        needs += "".join(f"Provides-Extra: {name}\n" for name in extras)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{tag}\n")
        file.writestr(f"{info}/RECORD", "")


def write_sdist(
    folder: Path, name: str, version: str = "1.0", *, info: str = "Metadata-Version: 2.2"
) -> None:
    """Write the sdist of a package with the metadata `info`, name and version.

    Its build backend is in the archive, so that running it needs no installation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "PKG-INFO": f"{info}\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
        "own.py": f"open({str(folder.absolute() / 'it-ran')!r}, 'w').close()\n",
    }
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as file:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text.encode())
            file.addfile(member, io.BytesIO(text.encode()))


def write_installed_wheel(folder: Path, name: str) -> None:
    """Write the wheel of an installed package of pure Python, with its own code."""
    distribution = metadata.distribution(name)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{distribution.version}-py3-none-any.whl", "w") as file:
        for path in distribution.files or ():
            is_generated = path.name in ("INSTALLER", "REQUESTED", "RECORD") or path.suffix == ".pyc"
            if not is_generated and ".." not in path.parts:
                file.write(path.locate(), path)
        file.writestr(f"{name}-{distribution.version}.dist-info/RECORD", "")


def make_image(folder: Path, *, torch: str = "2.13.0+cpu") -> Path:
    """Make the Python of an image, with pip and a fake torch; return its path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    import pip

    pip_folder = Path(pip.__file__).parent
    for part in (pip_folder, *pip_folder.parent.glob("pip-*.dist-info")):
        (packages / part.name).symlink_to(part)
    (packages / "torch").mkdir()
    (packages / "torch/__init__.py").write_text(torch_text(torch))
    (packages / f"torch-{torch}.dist-info").mkdir()
    (packages / f"torch-{torch}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
    )
    (packages / f"torch-{torch}.dist-info/entry_points.txt").write_text(
        "[console_scripts]\ntorchrun = torch.distributed.run:main\n"
    )
    return folder / "bin/python"


def add_package(image: Path, name: str, version: str, *, needs: str = "") -> None:
    """Add the metadata of a package to an image; `needs` are more lines of it."""
    info = next(image.glob("lib/python3*/site-packages")) / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")


def torch_text(version: str) -> str:
    """Return the code of the fake torch."""
    return (
        f"__version__ = {version!r}\nclass version:\n    cuda = None\nclass cuda:\n"
        "    is_available = staticmethod(lambda: False)\n"
    )
