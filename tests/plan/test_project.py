"""The folders of a project's packages."""

from pathlib import Path

import pytest

from awsddp.plan.project import source_folders


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        ('[project]\nname = "x"', ("src",)),
        ('[build-system]\nrequires = ["setuptools"]', ("src",)),
        ('[tool.setuptools.packages.find]\nwhere = ["python"]', ("python", "src")),
        ('[tool.setuptools.package-dir]\n"" = "python"', ("python", "src")),
        ('[tool.poetry]\npackages = [{include = "pkg", from = "python"}]', ("python", "src")),
        ('[project]\n[tool.hatch.build.targets.wheel]\npackages = ["python/pkg"]', ("python", "src")),
        ('[project]\n[tool.setuptools]\npackages = ["pkg"]\n[tool.poetry]\npackages = 3', ("src",)),
        ('[project]\n[tool.setuptools.packages.find]\nwhere = ["..", ".", "/tmp"]', ("src",)),
        ("[tool.ruff]\nline-length = 80", ()),
        ("not toml", ()),
    ],
)
def test_source_folders_are_read_from_pyproject(tmp_path: Path, text: str, folders: tuple[str, ...]) -> None:
    for folder in ("src", "python"):
        (tmp_path / folder / "pkg").mkdir(parents=True)
        (tmp_path / folder / "pkg" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(text)
    assert source_folders(tmp_path) == folders


def test_a_src_folder_that_is_a_package_or_empty_is_no_source_folder(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert source_folders(tmp_path) == ()
    (tmp_path / "src").mkdir()
    assert source_folders(tmp_path) == ()
    (tmp_path / "src" / "__init__.py").touch()
    assert source_folders(tmp_path) == ()
