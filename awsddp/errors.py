"""Expected failures: what failed, why, and what to type next.

Every error that awsddp raises on purpose is an `AwsddpError`. Its class gives the exit code, the `kind` and
whether it is `retryable`; docs/design.md lists them. This module imports no other module of awsddp.
"""

from typing import Any

SCHEMA = 1
"""The version of every JSON document."""


class AwsddpError(Exception):
    """An expected failure.

    `message` says what failed, `why` the cause, `next` the next command to type. `kind` is fixed per class or
    given; `retryable` tells that the same command may succeed later although nothing was changed. `result`
    is the verb's document as far as it came.
    """

    exit_code = 1
    kind = "internal"
    retryable = False
    result: Any = None

    def __init_subclass__(cls, **fixed: Any) -> None:
        """Set what is fixed per class: `class JobError(AwsddpError, exit_code=1)`."""
        for name, value in fixed.items():
            setattr(cls, name, value)

    def __init__(self, message: str, why: str = "", next: str = "", *, kind: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.next = next
        self.kind = kind or self.kind

    @property
    def summary(self) -> str:
        """What failed and why, in one line."""
        why = self.why.replace("\n", "; ")
        return f"{self.message} ({why})" if why else self.message

    def document(self) -> dict[str, Any]:
        """Return the error as its JSON document, behind the verb's own document."""
        keys = ("kind", "retryable", "message", "why", "next", "exit_code")
        from msgspec import to_builtins

        return {**to_builtins(self.result or {}), "error": {key: getattr(self, key) for key in keys}}

    def __str__(self) -> str:
        return "\n".join(part for part in (self.message, self.why, self.next) if part)


class JobError(AwsddpError, exit_code=1, kind="job_failed"):
    """The job, or a command on a node, failed."""


class UsageError(AwsddpError, exit_code=2, kind="usage"):
    """Invalid command-line usage."""


class ConfigError(AwsddpError, exit_code=3, kind="config"):
    """awsddp.toml, the environment or the local folder is invalid."""


class NoRegion(ConfigError, kind="no_region"):
    """Nothing names a region of AWS."""


class InUse(ConfigError, kind="in_use", retryable=True):
    """The nodes are in use: another job runs there, or another client is about to start one."""


class LocalCloudError(ConfigError, kind="local_cloud"):
    """The local cloud cannot be started or run on this machine."""


class CloudError(AwsddpError, exit_code=4, kind="aws"):
    """AWS refused a call or did not answer.

    Its kind is `aws`, or more exactly `credentials`, `permission`, `quota`, `throttled` or `unavailable`.
    `needs_login`: the credentials are no longer accepted, and a person has to log in.
    """

    needs_login = False


class CapacityError(AwsddpError, exit_code=5, kind="capacity", retryable=True):
    """AWS has no such instances available, in any allowed place."""


class NodeError(AwsddpError, exit_code=6, kind="node"):
    """A node cannot be reached or prepared. `nodes` are those that a verb was connected to."""

    nodes: tuple[Any, ...] = ()


class NotFoundError(AwsddpError, exit_code=7, kind="not_found"):
    """No object has that name."""


class LeftoverError(AwsddpError, exit_code=8, kind="leftover", retryable=True):
    """Something could not be terminated, and may still cost money."""


class Interrupted(AwsddpError, exit_code=130, kind="interrupted"):
    """The user stopped the command. Without `why` and `next` nothing is wrong: the message says all."""


class LetGo(KeyboardInterrupt):
    """The terminal closed, or the process was asked to end (signal `number`): nobody waits for more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
