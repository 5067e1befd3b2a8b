"""The contents of a node's disk."""

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
at_once, libraries = threading.Barrier(8), set()
def boot():
    at_once.wait()
    libraries.add(image.find_python_library())
hosts = [threading.Thread(target=boot) for _ in range(8)]
[host.start() for host in hosts]
[host.join() for host in hosts]
print(*libraries, sep="\\n")
"""


@needs_root
def test_hosts_that_boot_at_once_use_the_same_python_library() -> None:
    process = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True)
    [library] = process.stdout.splitlines()
    assert Path(library).exists()


BACKEND_MODULE = """
import zipfile

def build_wheel(folder, *others):
    import torch
    with zipfile.ZipFile(f"{folder}/kernels-1-py3-none-any.whl", "w") as wheel:
        seen = f"Metadata-Version: 2.1\\nName: kernels\\nVersion: 1\\nSummary: {torch.cuda.is_available()}"
        wheel.writestr("kernels-1.dist-info/METADATA", f"{seen} {torch.version.cuda}\\n")
        wheel.writestr("kernels-1.dist-info/WHEEL", "Wheel-Version: 1.0\\n")
    return "kernels-1-py3-none-any.whl"
"""


PROJECT_FILE = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def test_a_package_build_sees_the_cpu_build_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    node, package = tmp_path / "node", tmp_path / "package"
    for folder in (node, package):
        folder.mkdir()
    image.install_rehearsal(node, "g6.24xlarge")
    (node / "rehearse_gpu.pth").rename(node / "sitecustomize.py")  # .pth files are read in site-packages only
    (package / "backend.py").write_text(BACKEND_MODULE)
    (package / "pyproject.toml").write_text(PROJECT_FILE)
    args = ["wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(package)]
    environ = {**os.environ, "PYTHONPATH": str(node)}
    build = subprocess.run([sys.executable, "-m", "pip", *args], env=environ, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    [wheel] = tmp_path.glob("kernels-1-*.whl")
    assert "Summary: False None" in zipfile.ZipFile(wheel).read("kernels-1.dist-info/METADATA").decode()
    program = "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    process = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert process.stdout.split() == ["True", "13.0"], process.stderr
