"""init: a starter awsddp.toml, every key in it with what it means."""

from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.resources import template
from awsddp.spec import FILE


def init(folder: Path) -> Path:
    """Write the starter file into `folder` and return its path. Raises ConfigError where one is there."""
    path = folder / FILE
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(template(FILE))
    except FileExistsError as error:
        raise ConfigError(f"{path} already exists", "", "edit it, or move it away") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}", error.strerror or str(error)) from error
    return path
