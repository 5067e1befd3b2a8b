import subprocess
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes import hostkeys
from awsddp.nodes.hostkeys import make_key


def test_a_key_is_what_openssh_makes_of_it(tmp_path: Path) -> None:
    pair = make_key("a comment")
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(pair.private)
    derived = subprocess.run(
        ["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True
    ).stdout
    assert derived.split()[:2] == pair.public.split()[:2]
    assert pair.public.endswith(" a comment")


def test_a_private_key_is_never_printed() -> None:
    pair = make_key("x")
    assert "PRIVATE" not in repr(pair)
    assert pair.private not in str(pair)


def test_keys_are_accepted_beside_each_other_until_one_is_settled_on(tmp_path: Path) -> None:
    known = tmp_path / "deep" / "known_hosts"
    seed, final, other = (make_key("c").public for _ in range(3))
    assert hostkeys.load_keys(known) == {}
    hostkeys.add_keys(known, {"i-0a": seed, "i-0b": other})
    hostkeys.add_keys(known, {"i-0a": final})
    hostkeys.add_keys(known, {"i-0a": final})
    assert hostkeys.load_keys(known)["i-0a"] == (hostkeys.strip_comment(seed), hostkeys.strip_comment(final))
    hostkeys.set_keys(known, {"i-0a": final})
    assert hostkeys.load_keys(known) == {
        "i-0a": (hostkeys.strip_comment(final),),
        "i-0b": (hostkeys.strip_comment(other),),
    }
    hostkeys.remove_instances(known, ["i-0b"])
    assert list(hostkeys.load_keys(known)) == ["i-0a"]
    assert known.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in known.parent.iterdir()] == ["known_hosts"]


def test_openssh_finds_the_keys_of_an_instance(tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    hostkeys.add_keys(known, {"i-0a": make_key("c").public})
    hostkeys.add_keys(known, {"i-0a": make_key("c").public})
    found = subprocess.run(
        ["ssh-keygen", "-F", "i-0a", "-f", known], capture_output=True, text=True, check=True
    )
    assert found.stdout.count("ssh-ed25519") == 2


def test_a_file_cut_anywhere_gives_no_key_that_was_not_there(tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    hostkeys.add_keys(known, {"i-0a": make_key("c").public, "i-0b": make_key("c").public})
    whole, text = hostkeys.load_keys(known), known.read_bytes()
    for end in range(len(text)):
        known.write_bytes(text[:end])
        for instance_id, keys in hostkeys.load_keys(known).items():
            assert any(whole_key.startswith(key) for key in keys for whole_key in whole.get(instance_id, ()))


@pytest.mark.parametrize("text", ["", "nonsense", "ssh-ed25519 a$b c", "@cert-authority *"])
def test_what_is_no_public_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="invalid public key"):
        hostkeys.add_keys(tmp_path / "known_hosts", {"i-0a": text})


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        hostkeys.add_keys(tmp_path / "file" / "known_hosts", {"i-0a": make_key("c").public})
