import subprocess
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes import hostkeys
from awsddp.nodes.hostkeys import make_key


def test_openssh_derives_the_same_public_key(tmp_path: Path) -> None:
    pair = make_key("a comment")
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(pair.private)
    derived = subprocess.run(
        ["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True
    ).stdout
    assert derived.split()[:2] == pair.public.split()[:2]
    assert pair.public.endswith(" a comment")


def test_private_key_is_never_printed() -> None:
    pair = make_key("x")
    assert "PRIVATE" not in repr(pair)
    assert pair.private not in str(pair)


def test_instance_has_several_accepted_keys_until_one_is_set(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "known_hosts"
    seed, final, other = (make_key("c").public for _ in range(3))
    assert hostkeys.load_keys(path) == {}
    hostkeys.add_keys(path, {"i-0a": seed, "i-0b": other})
    hostkeys.add_keys(path, {"i-0a": final})
    hostkeys.add_keys(path, {"i-0a": final})
    assert hostkeys.load_keys(path)["i-0a"] == (hostkeys.strip_comment(seed), hostkeys.strip_comment(final))
    hostkeys.set_keys(path, {"i-0a": final})
    assert hostkeys.load_keys(path) == {
        "i-0a": (hostkeys.strip_comment(final),),
        "i-0b": (hostkeys.strip_comment(other),),
    }
    hostkeys.remove_instances(path, ["i-0b"])
    assert list(hostkeys.load_keys(path)) == ["i-0a"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["known_hosts"]


def test_openssh_finds_the_keys_of_an_instance(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    hostkeys.add_keys(path, {"i-0a": make_key("c").public})
    hostkeys.add_keys(path, {"i-0a": make_key("c").public})
    result = subprocess.run(
        ["ssh-keygen", "-F", "i-0a", "-f", path], capture_output=True, text=True, check=True
    )
    assert result.stdout.count("ssh-ed25519") == 2


def test_truncated_file_gives_no_key_that_was_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    hostkeys.add_keys(path, {"i-0a": make_key("c").public, "i-0b": make_key("c").public})
    whole, text = hostkeys.load_keys(path), path.read_bytes()
    for end in range(len(text)):
        path.write_bytes(text[:end])
        for instance_id, keys in hostkeys.load_keys(path).items():
            assert any(original.startswith(key) for key in keys for original in whole.get(instance_id, ()))


@pytest.mark.parametrize("text", ["", "nonsense", "ssh-ed25519 a$b c", "@cert-authority *"])
def test_invalid_public_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="invalid public key"):
        hostkeys.add_keys(tmp_path / "known_hosts", {"i-0a": text})


def test_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        hostkeys.add_keys(tmp_path / "file" / "known_hosts", {"i-0a": make_key("c").public})
