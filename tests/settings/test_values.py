"""Values of settings: durations, sources of data, jump hosts."""

import pytest

from awsddp.errors import ConfigError
from awsddp.settings.values import parse_data_sources, parse_duration, parse_jump_host, parse_notify_url


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("30s", 30), ("1.5h", 5400), ("7d", 604800), ("2 m", 120)]
)
def test_a_duration_is_parsed_into_seconds(text: str, value: float) -> None:
    assert parse_duration(text) == value


@pytest.mark.parametrize("text", ["", "h", "-1s", "1y", "1h30m", "nan", "1e3"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://my-bucket/a/b/", ("b", "s3", "my-bucket", "a/b")),
        ("s3://my-bucket", ("my-bucket", "s3", "my-bucket", "")),
        ("x=s3://my-bucket/year=2024", ("x", "s3", "my-bucket", "year=2024")),
        ("hf://datasets/org/set@v1/x", ("set", "hf", "org/set", "v1/x")),
        ("hf://datasets/mnist", ("mnist", "hf", "mnist", "main")),
        ("d=./a=b", ("d", "folder", "./a=b", "")),
        ("./folder/", ("folder", "folder", "./folder/", "")),
    ],
)
def test_a_data_source_is_parsed(text: str, expected: tuple[str, ...]) -> None:
    assert parse_data_sources([text]) == (expected,)


@pytest.mark.parametrize(
    "texts",
    [
        ["folder"],
        ["s3://"],
        ["s3://B/x"],
        ["s3://my-bucket/a\nb"],
        ["s3://my-bucket/year=2024"],
        ["hf://datasets/--token"],
        ["hf://datasets/a@--x"],
        ["hf://models/a"],
        ["..=s3://my-bucket"],
        ["a.sent=s3://my-bucket"],
        ["a=s3://my-bucket", "s3://my-bucket/a"],
    ],
)
def test_an_invalid_data_source_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_data_sources(texts)


@pytest.mark.parametrize(
    ("name", "destination", "port"),
    [
        ("bastion", "bastion", None),
        ("ubuntu@203.0.113.9", "ubuntu@203.0.113.9", None),
        ("me@corp.example@host.example:2222", "me@corp.example@host.example", 2222),
        ("u@[2001:db8::1]:22", "u@2001:db8::1", 22),
    ],
)
def test_a_jump_host_is_split_at_its_port(name: str, destination: str, port: int | None) -> None:
    assert parse_jump_host(name) == (destination, port)


@pytest.mark.parametrize(
    "url", ["https://Hooks.example/services/s3cret", "http://hooks.example:8080/?t=s3cret"]
)
def test_host_of_a_url_is_the_part_that_is_no_secret(url: str) -> None:
    assert parse_notify_url(url) == "hooks.example"


@pytest.mark.parametrize(
    "url",
    [
        *("s3cret", "ftp://h/s3cret", "https:///s3cret", "https://me:s3cret@h/", "http://h/s3 cret"),
        *(
            "http://h:port/s3cret",
            "http://[/s3cret",
            "http://h/s3cret\n",
            "file:///s3cret",
            "https://hé/s3cret",
        ),
    ],
)
def test_error_for_an_invalid_url_does_not_have_the_url(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_notify_url(url)
    assert "s3" not in f"{error.value.message} {error.value.why} {error.value.next}"
