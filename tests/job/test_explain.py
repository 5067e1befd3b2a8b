"""The client explains the cause of a job by what it knows of a missing module or file."""

from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.agent.diagnosis.causes import Evidence, explain
from awsddp.job.explain import explain_cause
from awsddp.model.records import Cause, JobRecord
from awsddp.nodes.project_files import list_files_to_send
from awsddp.session.context import Session
from awsddp.settings.loader import load
from tests.support.causes import MISSING

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n'
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: '{0}'. The node does not have this file."
PACKAGE = {"pyproject.toml": '[project]\nname = "x"\n', "src/mypkg/__init__.py": ""}


def explain_in(
    tmp_path: Path,
    files: dict[str, str],
    text: str,
    *,
    script: str,
    tail: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    kind: str = "",
    **keys: object,
) -> Cause:
    """Return the explained cause of a job whose project has these files; `text` is the node's explanation."""
    project = tmp_path / "project"
    for name, content in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(content)
    kinds = {"Module": ("import_error", "module"), "Packag": ("no_metadata", "package")}
    kind, key = kinds.get(text[:6], (kind or "file_not_found", ""))
    values = {key: text.split("'")[1]} if key else {}
    cause = Cause(rank=1, node=0, kind=kind, values=values, explanation=text, next="-", tail=tail)
    settings = load(environ={}, overrides={"sync.workdir": str(project), **keys})
    session = Session(name="default", home=tmp_path / "home", settings=settings, on_event=print)
    job = JobRecord(
        job="j", state="failed", cause=cause, ranks=(), home="runs/j", script=script, options=options
    )
    explained = explain_cause(session, job)
    assert explained.cause is not None
    return explained.cause


def test_a_submodule_that_an_installed_package_lacks_is_a_wrong_version(tmp_path: Path) -> None:
    text = MISSING.format("torch._six")
    cause = explain_in(tmp_path, {"requirements.txt": "deepspeed\n"}, text, script="t.py")
    assert cause.explanation.endswith("The code that imports it was written for another version of torch.")
    assert cause.next == "with --env FILE, set another version of that code's package or of torch"


NO_METADATA = "PackageNotFoundError: '{0}'. {0} is not installed for the python that runs the ranks."
STATIC = {"pyproject.toml": '[project]\nname = "my.lib"\nversion = "1"\n', "requirements.txt": "six\n"}
DYNAMIC = {"pyproject.toml": '[project]\nname = "my-lib"\ndynamic = ["version"]\n'}


@pytest.mark.parametrize(
    ("files", "package", "env_file", "why", "advice"),
    [
        (STATIC, "my-lib", None, "only if --env names it", "awsddp train --env {}/pyproject.toml t.py"),
        (STATIC, "my-lib", "requirements.txt", "not name the project itself", "add the line -e . to {}/requ"),
        (DYNAMIC, "my_lib", None, "only if --env names it", "awsddp train --env {}/pyproject.toml t.py"),
        (
            STATIC,
            "wandb",
            None,
            "--env does not name it",
            "name wandb in a requirements.txt: awsddp train --env",
        ),
        (STATIC, "$(rm)", None, "", "-"),
    ],
)
def test_a_package_without_metadata_is_explained_with_the_command_to_type(
    tmp_path: Path, files: dict[str, str], package: str, env_file: str | None, why: str, advice: str
) -> None:
    project = tmp_path / "project"
    keys = {"env.file": str(project / env_file)} if env_file else {}
    cause = explain_in(tmp_path, files, NO_METADATA.format(package), script="t.py", **keys)
    assert why in cause.explanation and cause.next.startswith(advice.format(project))


@pytest.mark.parametrize(
    ("files", "module", "script", "why", "advice"),
    [
        (
            {"requirements.txt": "numpy\n"},
            "yaml",
            "t.py",
            "requirements.txt exists, but --env does not name it",
            "--env {}/requirements.txt t.py",
        ),
        (
            {"pyproject.toml": '[project]\ndependencies = ["pyyaml"]\n'},
            "yaml",
            "t.py",
            "pyproject.toml exists, but --env",
            "--env {}/pyproject.toml t.py",
        ),
        (
            {"environment.yml": "dependencies:\n- timm\n"},
            "timm",
            "t.py",
            "environment.yml exists, but --env",
            "--env {}/environment.yml t.py",
        ),
        (
            {},
            "timm",
            "t.py",
            "the project has no requirements file",
            "name the package of timm in requirements.txt, then: awsddp train --env requirements.txt",
        ),
        (
            {"code/mypkg/__init__.py": ""},
            "mypkg.train",
            "mypkg.train",
            "code/mypkg is on the nodes, and code is not on the PYTHONPATH",
            "--env-var PYTHONPATH=code mypkg.train",
        ),
        (
            {"src/mypkg/__init__.py": ""},
            "mypkg",
            "t.py",
            "src/mypkg is on the nodes, and src is",
            "--env-var PYTHONPATH=src t.py",
        ),
        (
            {"helpers.py": "", "tools/t.py": ""},
            "helpers",
            "tools/t.py",
            "helpers.py is on the nodes, and . is",
            "--env-var PYTHONPATH=. tools/t.py",
        ),
        (
            {**PACKAGE, "src/mypkg/data/x.py": "", ".gitignore": "data/\n"},
            "mypkg.data",
            "t.py",
            "src/mypkg/data/ is here, and .gitignore keeps it",
            "-o 'sync.ignore=[\"!/src/mypkg/data/\"]'",
        ),
        (PACKAGE, "mypkg.nope", "t.py", "", "-"),
    ],
)
def test_a_missing_module_is_explained_with_the_command_to_type(
    tmp_path: Path, files: dict[str, str], module: str, script: str, why: str, advice: str
) -> None:
    scripts = {script: ""} if script.endswith(".py") else {}
    cause = explain_in(tmp_path, {**scripts, **files}, MISSING.format(module), script=script)
    assert why in cause.explanation
    assert advice.format(tmp_path / "project") in cause.next


@pytest.mark.parametrize("module", ["x; touch y", "/etc/x", "../x", "x\ny", "$(x)"])
def test_an_invalid_module_name_is_not_put_into_a_command(tmp_path: Path, module: str) -> None:
    assert explain_in(tmp_path, {}, MISSING.format(module), script="t.py").next == "-"


@pytest.mark.parametrize("file", ["needs.txt", "environment.yml", "uv.lock"])
def test_a_package_that_the_env_file_does_not_install_must_be_named_there(tmp_path: Path, file: str) -> None:
    env_file = str(tmp_path / file)
    files = {"requirements.txt": "timm\n"}
    cause = explain_in(tmp_path, files, MISSING.format("timm"), script="t.py", **{"env.file": env_file})
    assert cause.explanation.endswith(f"{env_file} did not install it.")
    assert cause.next == f"name the package of timm in {env_file}, then: awsddp train --env {env_file} t.py"


@pytest.mark.parametrize(
    ("path", "why", "advice"),
    [
        ("data/train/a.bin", "data/ is here, and .gitignore keeps it from the nodes", "!/data/"),
        ("/home/ubuntu/awsddp/work/data", "data/ is here, and .gitignore keeps it", "!/data/"),
        ("./weights.pt", "weights.pt is here, and sync.ignore keeps it", "remove it from sync.ignore"),
        ("runs/j/model.pt", "runs/ is here, and awsddp keeps it", "move it out of runs/"),
        ("/dev/null", "/dev/null is only on this machine", "move it into"),
        ("/nowhere/at/all", "", "-"),
        ("a.py", "", "-"),
    ],
)
def test_a_local_file_missing_on_the_nodes_is_explained_by_what_excludes_it(
    tmp_path: Path, path: str, why: str, advice: str
) -> None:
    files = {".gitignore": "data/\n", "data/train/a.bin": "", "weights.pt": "", "runs/j/model.pt": ""}
    cause = explain_in(tmp_path, files, NO_FILE.format(path), script="t.py", **{"sync.ignore": "*.pt"})
    assert why in cause.explanation
    assert advice in cause.next


def test_missing_files_are_explained_by_a_link_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/data").symlink_to("/mnt/datasets")
    cause = explain_in(tmp_path, {"t.py": ""}, NO_FILE.format("data/train/a.bin"), script="t.py")
    assert "data is here, and is not sent: a link that leads out of the folder" in cause.explanation
    assert "awsddp exec" in cause.next


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: unable to open file <data/train.bin> in read mode: No such file or directory (2).",
        "OSError: Unable to open file (unable to open file: name = 'data/x.h5', errno = 2, error message = "
        "'No such file or directory').",
        "lmdb.Error: data/train.lmdb: No such file or directory.",
        "AssertionError: data/train.bin is missing.",
        "RuntimeError: Dataset not found or corrupted. You can use download=True to download it.",
    ],
)
def test_data_that_a_library_does_not_find_is_explained_by_its_ignore_file(tmp_path: Path, text: str) -> None:
    files = {".gitignore": "data/\n", "data/train.bin": "x", "t.py": "Dataset('data', train=True)"}
    kind = explain(Evidence(1, TRACEBACK + text.rstrip(".") + "\n")).kind
    assert kind == ("exit" if text.startswith("Assert") else "file_not_found")
    cause = explain_in(tmp_path, files, text, script="t.py", kind=kind)
    assert cause.explanation.endswith("data/ is here, and .gitignore keeps it from the nodes.")
    assert 'sync.ignore=["!/data/"]' in cause.next


@pytest.mark.parametrize("path", ["ckpts/1", "runs/j", "ckpts"])
def test_a_missing_output_folder_is_not_explained_as_missing_data(tmp_path: Path, path: str) -> None:
    files = {".gitignore": "ckpts/\n", "ckpts/1/a.pt": "x", "runs/j/a.pt": "x", "t.py": ""}
    text = f"RuntimeError: Parent directory {path} does not exist."
    assert explain_in(tmp_path, files, text, script="t.py", kind="exit").explanation == text


@pytest.mark.parametrize("text", ["{}/real", "../../project/real"])
def test_a_link_that_nodes_cannot_follow_is_explained_with_a_relative_one(tmp_path: Path, text: str) -> None:
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "sub/data").symlink_to(text.format(project))
    files = {"t.py": "", "real/a.bin": ""}
    cause = explain_in(tmp_path, files, NO_FILE.format("sub/data/a.bin"), script="t.py")
    assert "a link into the folder by a path that the nodes do not have" in cause.explanation
    assert cause.next == "ln -sfn ../real sub/data"


@pytest.mark.parametrize(("file", "is_explained"), [("<frozen os>", True), ("table.py", False)])
def test_a_variable_set_only_on_this_machine_is_named_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, is_explained: bool
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x")
    (tmp_path / "t.py").touch()
    tail = (f'  File "{file}", line 714, in __getitem__', "KeyError: 'WANDB_API_KEY'")
    settings = load(environ={}, overrides={"sync.workdir": str(tmp_path)})
    session = Session(name="default", home=tmp_path / "home", settings=settings, on_event=print)
    cause = Cause(rank=0, node=0, kind="exit", tail=tail, explanation="It ended with exit code 1.", next="-")
    cause = explain_cause(
        session, JobRecord(job="j", state="failed", cause=cause, ranks=(), home="runs/j", script="t.py")
    ).cause
    assert cause is not None
    assert ("WANDB_API_KEY is set on this machine, but not on the nodes" in cause.explanation) is is_explained
    assert cause.next.endswith("--env-var WANDB_API_KEY t.py") is is_explained


def test_the_advice_sends_the_whole_folder_and_keeps_the_jobs_options(tmp_path: Path) -> None:
    options = ("-o", "job.world_size=4", "-o", 'job.outputs=["a b"]', "-o", "job.module=true")
    files = {".gitignore": "*.bin\n*.pkl\n", "data/chars/train.bin": "", "data/chars/meta.pkl": ""}
    text = NO_FILE.format("data/chars/train.bin")
    cause = explain_in(
        tmp_path, files, text, script="t", options=(*options, "--env-var", "LR"), **{"env.variables.LR": "2"}
    )
    command = "awsddp train --world-size 4 --output 'a b' -m --env-var LR=2 "
    command += "-o 'sync.ignore=[\"!/data/chars/**\"]' t"
    assert cause.next == f"{command}   # or in awsddp.toml"
    sent = list_files_to_send(tmp_path / "project", ["!/data/chars/**"]).entries
    assert [entry.path for entry in sent if entry.path.startswith("data/")] == [
        "data/chars/meta.pkl",
        "data/chars/train.bin",
    ]


def test_a_value_that_may_be_secret_is_not_put_into_a_command(tmp_path: Path) -> None:
    options = ("--env-var", "MY_TOKEN")
    keys: dict[str, object] = {"env.variables.MY_TOKEN": "hidden"}
    cause = explain_in(tmp_path, {"t.py": ""}, MISSING.format("timm"), script="t.py", options=options, **keys)
    assert cause.next.endswith("awsddp train --env-var MY_TOKEN --env requirements.txt t.py")


def test_a_nodes_advice_becomes_the_command_of_this_job(tmp_path: Path) -> None:
    advice = "awsddp train --env-var NCCL_DEBUG=INFO   # NCCL's log then says why"
    settings = load("second", environ={}, overrides={"sync.workdir": str(tmp_path)})
    session = Session(name="second", home=tmp_path / "home", settings=settings, on_event=print, local=True)
    cause = Cause(rank=0, node=0, kind="nccl_error", explanation="NCCL failed.", next=advice)
    options = ("-o", "job.world_size=4")
    job = JobRecord(job="j", state="failed", cause=cause, ranks=(), home="x", script="t.py", options=options)
    for verb in ("train", "run"):
        explained = explain_cause(replace(session, verb=verb), job).cause
        assert explained is not None
        assert explained.next == (
            f"awsddp -c second --local {verb} --world-size 4 --env-var NCCL_DEBUG=INFO t.py"
            "   # NCCL's log then says why"
        )


def test_a_message_that_names_only_a_folder_is_explained(tmp_path: Path) -> None:
    files = {".gitignore": "/data\n", "data/a.bin": "", "t.py": ""}
    text = (
        "FileNotFoundError: Couldn't find any class folder in data/train. The node does not have this file."
    )
    assert (
        "data/ is here, and .gitignore keeps it"
        in explain_in(tmp_path, files, text, script="t.py").explanation
    )
