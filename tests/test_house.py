"""The house itself: who may import whom, and that the wheel carries everything."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "awsddp"

_BASE = {"errors", "harmless", "limits"}
_RECORDS = {"answers", "spec", "records", "resources"} | _BASE
_PURE = {"plan", "report", "compat", "billing", "parallel", "page"} | _RECORDS
_MIDDLE = _PURE | {"state"}
LADDER = {
    "errors": _BASE,
    "harmless": _BASE,
    "limits": _BASE,
    "answers": _BASE,
    "spec": _RECORDS,
    "records": _RECORDS,
    "resources": _RECORDS,
    "compat": _PURE,
    "plan": _PURE,
    "report": _PURE,
    "page": _PURE,
    "billing": _PURE,
    "documents": _PURE,
    "keywords": _BASE,
    "parallel": _BASE,
    "state": _PURE,
    "aws": _MIDDLE | {"aws"},
    "nodes": _MIDDLE | {"nodes"},
    "jobs": _MIDDLE | {"jobs"},
    "local": _MIDDLE | {"local"},
    "verbs": _MIDDLE | {"aws", "nodes", "jobs", "verbs"},
    "cli": _MIDDLE | {"verbs", "cli"},
    "api": _MIDDLE | {"verbs", "jobs", "nodes", "keywords"},
}
OWNERS = {
    "boto3": {"aws"},
    "botocore": {"aws", "local"},  # the local endpoint checks signatures with botocore's signer
    "paramiko": {"nodes"},
    "fabric": {"nodes"},
    "moto": {"local"},
    "werkzeug": {"local"},
    "click": {"cli"},
    "rich": {"cli"},
    "torch": set(),
}


def imports(file: Path) -> set[str]:
    """Return every module that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found |= {f"{node.module}.{name.name}" for name in node.names} | {str(node.module)}
    return found


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_imports_go_down_the_ladder_only(file: Path) -> None:
    room = room_of(file)
    if room in ("__init__", "__main__"):
        return
    allowed = LADDER[room] | ({"local"} if file == PACKAGE / "verbs" / "local.py" else set())
    for name in imports(file):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "awsddp" and target and target != "__version__":
            assert target in allowed, f"{room} imports awsddp.{target}"
        if top in OWNERS:
            assert room in OWNERS[top], f"{room} imports {top}"


def test_training_programs_do_not_know_awsddp() -> None:
    for file in (ROOT / "train").rglob("*.py"):
        assert not any(name.split(".")[0] == "awsddp" for name in imports(file)), file


def test_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("awsddp-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for carried in ("awsddp/_train/main.py", "awsddp/_train/digits.csv.gz", "awsddp/_templates/ssh_config"):
        assert carried in names
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    (site,) = (empty / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    needs = {path.parent for path in map(Path, sys.path) if path.name == "site-packages"}
    assert needs
    own = next(path for path in sys.path if path.endswith("site-packages"))
    for package in ("click", "msgspec"):
        (site / package).symlink_to(Path(own) / package)
    program = (
        "import sys; from awsddp.resources import template, train_folder; "
        "assert (train_folder() / 'main.py').is_file() and template('ssh_config'); "
        "from awsddp.cli.main import main; sys.argv = ['awsddp', '--help']; main()"
    )
    shown = subprocess.run(
        [empty / "bin" / "python", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "train" in shown.stdout


def test_help_needs_neither_aws_nor_ssh_nor_torch() -> None:
    program = (
        "import sys\nfrom awsddp.cli.main import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'boto3', 'botocore', 'paramiko', 'rich', 'moto', 'torch', 'msgspec'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
