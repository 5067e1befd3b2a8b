"""Files that ship with the package."""

import pytest

from awsddp.util import shipped_files
from awsddp.util.shipped_files import is_bundled, render, shipped_folder


def test_a_bundled_program_is_recognized_by_its_path_on_a_node() -> None:
    assert (shipped_folder("train") / "main.py").is_file()
    assert is_bundled("/home/ubuntu/awsddp/train/main.py")
    assert not is_bundled("main.py") and not is_bundled("/home/ubuntu/awsddp/train/other.py")


def test_each_placeholder_of_a_template_needs_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_files, "template", lambda name: "echo $HOME @@{node}\n")
    assert render("any", node=3) == "echo $HOME 3\n"
    with pytest.raises(KeyError, match="node"):
        render("any")
