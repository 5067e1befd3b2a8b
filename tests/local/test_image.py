"""What a node's disk shows."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from awsddp.local import image
from tests.support.local_cloud import needs_root

LIBRARIES = """\
import threading
from awsddp.local import image
at_once, found = threading.Barrier(8), set()
def boot():
    at_once.wait()
    found.add(image.find_python_library())
hosts = [threading.Thread(target=boot) for _ in range(8)]
[host.start() for host in hosts]
[host.join() for host in hosts]
print(*found, sep="\\n")
"""


@needs_root
def test_hosts_that_boot_at_once_are_shown_the_same_library_of_python() -> None:
    found = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True)
    assert len(found.stdout.splitlines()) == 1


BUILT = """
import zipfile

def build_wheel(folder, *others):
    import torch
    with zipfile.ZipFile(f"{folder}/kernels-1-py3-none-any.whl", "w") as wheel:
        seen = f"Metadata-Version: 2.1\\nName: kernels\\nVersion: 1\\nSummary: {torch.cuda.is_available()}"
        wheel.writestr("kernels-1.dist-info/METADATA", f"{seen} {torch.version.cuda}\\n")
        wheel.writestr("kernels-1.dist-info/WHEEL", "Wheel-Version: 1.0\\n")
    return "kernels-1-py3-none-any.whl"
"""


BACKEND = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def test_what_builds_a_package_sees_the_cpu_build_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    node, package = tmp_path / "node", tmp_path / "package"
    for folder in (node, package):
        folder.mkdir()
    image.install_rehearsal(node, "g6.24xlarge")
    (node / "rehearse_gpu.pth").rename(node / "sitecustomize.py")  # as .pth files are read in packages alone
    (package / "backend.py").write_text(BUILT)
    (package / "pyproject.toml").write_text(BACKEND)
    words = ["wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(package)]
    environ = {**os.environ, "PYTHONPATH": str(node)}
    built = subprocess.run([sys.executable, "-m", "pip", *words], env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = tmp_path.glob("kernels-1-*.whl")
    assert "Summary: False None" in zipfile.ZipFile(wheel).read("kernels-1.dist-info/METADATA").decode()
    asked = "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    seen = subprocess.run([sys.executable, "-c", asked], env=environ, capture_output=True, text=True)
    assert seen.stdout.split() == ["True", "13.0"], seen.stderr
