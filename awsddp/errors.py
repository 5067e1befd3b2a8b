"""The errors that awsddp raises on purpose. This module imports nothing else from awsddp.

An error's class sets its exit code, its `kind` and whether it is `retryable`; docs/design.md lists them.
"""

from typing import Any

SCHEMA = 1
"""The version of every JSON document."""


class AwsddpError(Exception):
    """An expected failure.

    `message` says what failed, `why` is the cause, and `next` is the next command to type. `kind` is the
    class's kind, unless the caller passes another kind. `retryable` is True if the same command may succeed
    later without a change. `result` is the verb's document, with what the verb did before it failed.
    """

    exit_code = 1
    kind = "internal"
    retryable = False
    result: Any = None

    def __init_subclass__(cls, **fixed: Any) -> None:
        """Set class attributes from keywords: `class JobError(AwsddpError, exit_code=1)`."""
        for name, value in fixed.items():
            setattr(cls, name, value)

    def __init__(self, message: str, why: str = "", next_step: str = "", *, kind: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.next = next_step
        self.kind = kind or self.kind

    @property
    def summary(self) -> str:
        """The message and the cause on one line."""
        why = self.why.replace("\n", "; ")
        return f"{self.message} ({why})" if why else self.message

    def document(self) -> dict[str, Any]:
        """Return the verb's JSON document, with the error in its field `error`."""
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
    """No AWS region is configured."""


class InUse(ConfigError, kind="in_use", retryable=True):
    """The nodes are in use: another job runs on them, or another client is about to start one."""


class LocalCloudError(ConfigError, kind="local_cloud"):
    """The local cloud cannot be started or run on this machine."""


class CloudError(AwsddpError, exit_code=4, kind="aws"):
    """AWS refused a call or did not answer.

    The error's kind is `aws`, or one of `credentials`, `permission`, `quota`, `throttled` and `unavailable`.
    `needs_login` is True if the credentials are no longer accepted and the user has to log in.
    """

    needs_login = False


class CapacityError(AwsddpError, exit_code=5, kind="capacity", retryable=True):
    """AWS has no capacity for the instances in any allowed zone."""


class NodeError(AwsddpError, exit_code=6, kind="node"):
    """A node cannot be reached or prepared. `nodes` are the nodes to which the verb was connected."""

    nodes: tuple[Any, ...] = ()


class NotFoundError(AwsddpError, exit_code=7, kind="not_found"):
    """No cluster, job or other object has this name."""


class LeftoverError(AwsddpError, exit_code=8, kind="leftover", retryable=True):
    """Something could not be terminated, and may still cost money."""


class Interrupted(AwsddpError, exit_code=130, kind="interrupted"):
    """The user stopped the command. If `why` and `next` are empty, there is nothing left to do."""


class Terminated(KeyboardInterrupt):
    """The terminal was closed, or the process received the signal `signal_number`. awsddp then exits without
    a message."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal_number = number
