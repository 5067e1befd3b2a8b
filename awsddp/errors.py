"""What can go wrong, as the user is told it: what failed, why, and what to type next.

Every error the product raises on purpose is an `AwsddpError`; its class decides the exit code
(docs/commands.md). Nothing here knows of any other room.
"""

from typing import Any


class AwsddpError(Exception):
    """An expected failure.

    `message` says what failed, `why` the cause, `next` the next command to type. `exit_code` is the
    documented process status of its kind, `result` the verb's document as far as it came.
    """

    exit_code = 1
    result: dict[str, Any] | None = None

    def __init__(self, message: str, why: str = "", next: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.next = next

    def document(self) -> dict[str, object]:
        """Return the error as its JSON document, behind what the verb had to tell."""
        return {
            **(self.result or {}),
            "error": {
                "message": self.message,
                "why": self.why,
                "next": self.next,
                "exit_code": self.exit_code,
            },
        }

    def __str__(self) -> str:
        return "\n".join(part for part in (self.message, self.why, self.next) if part)


class JobError(AwsddpError):
    """The job, or a command on a node, failed."""

    exit_code = 1


class UsageError(AwsddpError):
    """The words on the command line cannot be meant."""

    exit_code = 2


class ConfigError(AwsddpError):
    """awsddp.toml, the environment or the local folder is wrong."""

    exit_code = 3


class InUse(ConfigError):
    """The nodes are in use: another job runs there, or another client is about to start one."""


class LocalCloudError(ConfigError):
    """The local cloud cannot be started or run on this machine."""


class CloudError(AwsddpError):
    """AWS refused: credentials, permission, quota, or it did not answer.

    `needs_login`: it takes the credentials no more, and a person has to log in.
    """

    exit_code = 4
    needs_login = False


class CapacityError(AwsddpError):
    """AWS has no such machines to give now, in any place that was allowed."""

    exit_code = 5


class NodeError(AwsddpError):
    """A node cannot be reached or prepared."""

    exit_code = 6


class NotFoundError(AwsddpError):
    """Nothing goes by that name."""

    exit_code = 7


class LeftoverError(AwsddpError):
    """Something could not be ended, and may still cost money."""

    exit_code = 8


class Interrupted(AwsddpError):
    """The user asked to stop."""

    exit_code = 130


class LetGo(KeyboardInterrupt):
    """The terminal closed, or the process was asked to end (signal `number`): nobody waits for more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
