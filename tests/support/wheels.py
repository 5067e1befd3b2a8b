"""Packages of our own, so that no test needs an index."""

import io
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path


def wheel(
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
    """Write a wheel whose one module holds its version, and `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n{text}")
        needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
        needs += f"Requires-Python: {python}\n" if python else ""
        needs += "".join(f"Provides-Extra: {one}\n" for one in extras)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{tag}\n")
        file.writestr(f"{info}/RECORD", "")


def sdist(folder: Path, name: str, version: str = "1.0", *, info: str = "Metadata-Version: 2.2") -> None:
    """Write the source of a package, with its metadata but for its name and version.

    Its build backend lies in the archive, so that nothing has to be installed to run it.
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


def installed_wheel(folder: Path, name: str) -> None:
    """Write the wheel of a package of pure Python that is installed here, with its own code."""
    of = metadata.distribution(name)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{of.version}-py3-none-any.whl", "w") as file:
        for path in of.files or ():
            made_here = path.name in ("INSTALLER", "REQUESTED", "RECORD") or path.suffix == ".pyc"
            if not made_here and ".." not in path.parts:
                file.write(path.locate(), path)
        file.writestr(f"{name}-{of.version}.dist-info/RECORD", "")


def image(folder: Path, *, torch: str = "2.13.0+cpu") -> Path:
    """Make a Python as an image has it, with pip and something that calls itself torch; return its path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    import pip

    own = Path(pip.__file__).parent
    for part in (own, *own.parent.glob("pip-*.dist-info")):
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


def add(image: Path, name: str, version: str, *, needs: str = "") -> None:
    """Have an image say that it holds a package; `needs` is a part of its metadata."""
    info = next(image.glob("lib/python3*/site-packages")) / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")


def torch_text(version: str) -> str:
    """Return the module that calls itself torch."""
    return (
        f"__version__ = {version!r}\nclass version:\n    cuda = None\nclass cuda:\n"
        "    is_available = staticmethod(lambda: False)\n"
    )
