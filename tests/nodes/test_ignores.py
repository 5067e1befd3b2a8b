"""Ignore files: .awsddpignore, or those of git."""

import random
import subprocess
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes.project_files import list_files_to_send
from tests.support.project_folder import names, write_files


def test_awsddpignore_replaces_gitignore(tmp_path: Path) -> None:
    write_files(tmp_path, "a", "b", "sub/a", "sub/b")
    (tmp_path / ".gitignore").write_text("a\n")
    assert names(tmp_path) == [".gitignore", "b", "sub/b"]
    (tmp_path / ".awsddpignore").write_text("b\n.*ignore\n")
    assert names(tmp_path) == ["a", "sub/a"]


def test_ignore_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_files(tmp_path, "a", "b")
    (tmp_path / ".gitignore").write_bytes(b"\xef\xbb\xbfa\r\n")
    assert names(tmp_path) == [".gitignore", "b"]


def test_patterns_of_the_configuration_override_ignore_files(tmp_path: Path) -> None:
    write_files(tmp_path, "a", "b", "sub/c")
    (tmp_path / ".gitignore").write_text("a\n.gitignore\n")
    assert names(tmp_path, "!a", "sub/") == ["a", "b"]


@pytest.mark.parametrize("below", ["", "a", "a/b"])
@pytest.mark.parametrize("seed", range(6))
def test_sync_ignores_the_files_that_git_ignores(
    tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch, seed: int, below: str
) -> None:
    """Also in a subfolder, by .gitignore files above it, info/exclude and core.excludesFile."""
    rng = random.Random(seed)
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    parts = ["a", "b", "data", "x.log", "y.py", "keep"]
    for _ in range(30):
        path = "/".join(rng.choice(parts) for _ in range(rng.randint(1, 3)))
        if (
            not any((tmp_path / parent).is_file() for parent in Path(path).parents)
            and not (tmp_path / path).exists()
        ):
            write_files(tmp_path, path)
    patterns = [
        "*.log",
        "/a",
        "data/",
        "!keep",
        "b/*",
        "!b/y.py",
        "**/x.log",
        "a/**/b",
        "data/**",
        "# no",
        "",
        "\\!odd",
        "k??p",
    ]
    for folder in [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]:
        if folder == tmp_path or rng.random() < 0.4:
            (folder / ".gitignore").write_text("\n".join(rng.sample(patterns, 4)) + "\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and ".git" not in path.parts)
    subprocess.run(["git", "-C", tmp_path, "add", "-f", *rng.sample(files, 4)], check=True)
    (tmp_path / ".git/info/exclude").write_text("y.py\n")
    global_ignore = isolated / ".config/git/ignore"
    global_ignore.parent.mkdir(parents=True)
    global_ignore.write_text("!y.py\nkeep\n")
    git = ["git", "-C", tmp_path / below, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    expected = subprocess.run(git, capture_output=True, check=True, text=True).stdout.split("\0")[:-1]
    listing = list_files_to_send(tmp_path / below)
    if (
        not below
        or subprocess.run(["git", "-C", tmp_path, "check-ignore", "--no-index", "-q", below]).returncode
    ):
        assert sorted(entry.path for entry in listing.entries if entry.kind == "f") == sorted(expected)


def test_tracked_files_are_sent_and_an_unreadable_git_index_is_reported(
    tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / ".venv" / "project"
    write_files(project, "data/keep.csv", "data/other.csv", "a.py")
    (project / ".gitignore").write_text("data/\n")
    subprocess.run(["git", "init", "-q", project], check=True)
    subprocess.run(["git", "-C", project, "add", "-f", "data/keep.csv"], check=True)
    assert names(project) == [".gitignore", "a.py", "data/keep.csv"]
    (project / ".git/index").write_bytes(b"no index")
    (skipped,) = list_files_to_send(project).skipped
    assert "git tracks" in skipped[0]
    assert "index" in skipped[1]


@pytest.mark.parametrize("kind", ["no git", "a work tree", "a submodule", "a name"])
def test_files_that_ignore_files_outside_the_project_exclude_are_not_sent(
    tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(isolated / "config"))
    global_ignore = isolated / ("mine" if kind == "a name" else ".config/git/ignore")
    global_ignore.parent.mkdir(parents=True, exist_ok=True)
    global_ignore.write_text(".env\n")
    (isolated / "config").write_text("[core]\nexcludesFile = ~/mine\n" if kind == "a name" else "")
    write_files(tmp_path, "repo/proj/.env", "repo/proj/big.bin", "repo/proj/secret", "repo/proj/a.py")
    (tmp_path / "repo/.gitignore").write_text("/proj/big.bin\n")
    git = tmp_path / "repo/.git"
    subprocess.run(["git", "init", "-q", tmp_path / "repo"], check=True)
    (git / "info/exclude").write_text("secret\n")
    if kind != "a name":
        git.rename(tmp_path / "store")
        git.write_text(f"gitdir: {tmp_path}/store\n")
    if kind == "a work tree":
        write_files(tmp_path, "store/worktrees/w/HEAD")
        (tmp_path / "store/worktrees/w/commondir").write_text("../..\n")
        git.write_text("gitdir: ../store/worktrees/w\n")
    if kind == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    listing = list_files_to_send(tmp_path / "repo/proj")
    assert [entry.path for entry in listing.entries] == ["a.py"]
    sources = dict(listing.ignored)
    assert sources["big.bin"] == "../.gitignore"
    assert sources[".env"] == f"~/{global_ignore.relative_to(isolated)}"
    assert sources["secret"].endswith("info/exclude")


def test_awsddpignore_replaces_ignore_files_above_the_project(tmp_path: Path) -> None:
    write_files(tmp_path, "proj/a", "proj/b")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("a\n")
    assert names(tmp_path / "proj") == ["b"]
    (tmp_path / "proj/.awsddpignore").write_text("b\n")
    assert names(tmp_path / "proj") == [".awsddpignore", "a"]


def test_folder_that_its_repository_ignores_is_sent(tmp_path: Path) -> None:
    """For example below a home folder that is a repository with "*" in its .gitignore."""
    write_files(tmp_path, "proj/deep/a")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for text in ("*\n", "/proj/\n"):
        (tmp_path / ".gitignore").write_text(text)
        assert names(tmp_path / "proj/deep") == ["a"]


def test_invalid_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        list_files_to_send(tmp_path, ["!"])
