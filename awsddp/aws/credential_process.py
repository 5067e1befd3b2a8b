"""Get credentials from the program `credential_process`, with a timeout, and check its output."""

import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Literal

import botocore.session
import msgspec
from botocore.compat import compat_shell_split
from botocore.credentials import ProcessProvider
from botocore.exceptions import CredentialRetrievalError
from botocore.utils import parse_timestamp

PROGRAM_S, QUIET_S = 120.0, 3.0
"""The time limit (s) for a `credential_process`, during which the user may have to log in with a browser, and
the time (s) after which awsddp reports that it is waiting. The SDK for Go allows 60 s:
https://docs.aws.amazon.com/sdk-for-go/api/aws/credentials/processcreds/
"""
AGAIN_S = 5.0
"""For this time (s), the failure of a `credential_process` also fails the parallel calls that waited for it.
"""
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class ProgramFailed(CredentialRetrievalError):
    """A `credential_process` gave no credentials."""

    fmt = "{error_msg}"


Failures = dict[str, tuple[float, ProgramFailed]]
"""Maps a `credential_process` command that failed to the time of the failure (monotonic clock) and its error.
"""


class _ProcessOutput(msgspec.Struct, rename="pascal"):
    """The output of a `credential_process`.

    https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html
    """

    version: Literal[1]
    access_key_id: _Text
    secret_access_key: _Text
    session_token: str | None = None
    expiration: str | None = None
    account_id: str | None = None


class ProgramProvider(ProcessProvider):
    """Runs `credential_process` with a timeout. Every failure raises ProgramFailed.

    `failures` records the failed runs of all providers in the session. `report_wait` is called with a text
    while the program runs.
    """

    def __init__(
        self,
        profile: str,
        session: botocore.session.Session,
        failures: Failures,
        report_wait: Callable[[str], None],
    ) -> None:
        super().__init__(profile, lambda: session.full_config)
        self._profile, self._failures, self._report_wait = profile, failures, report_wait

    def _retrieve_credentials_using(self, command: str) -> dict[str, str | None]:
        failed_at, failure = self._failures.get(command, (0.0, None))
        if failure is not None and time.monotonic() - failed_at < AGAIN_S:
            raise failure
        try:
            credentials = self._run(command)
        except (OSError, ValueError, OverflowError, subprocess.TimeoutExpired) as error:
            is_late = isinstance(error, subprocess.TimeoutExpired)
            failure = self._failed(
                command, f"it did not end within {PROGRAM_S:g} s" if is_late else str(error)
            )
            self._failures[command] = (time.monotonic(), failure)
            raise failure from error
        return {
            "access_key": credentials.access_key_id,
            "secret_key": credentials.secret_access_key,
            "token": credentials.session_token,
            "expiry_time": credentials.expiration,
            "account_id": credentials.account_id or self.profile_config.get("aws_account_id"),
        }

    def _run(self, command: str) -> _ProcessOutput:
        """Return the program's validated output.

        Raises ValueError for invalid output, and the errors that `_output` raises.
        """
        if not (arguments := compat_shell_split(command)):
            raise ValueError("it is empty")
        credentials = msgspec.json.decode(self._output(arguments), type=_ProcessOutput)
        if credentials.expiration is not None:
            if (ends := parse_timestamp(credentials.expiration)).tzinfo is None:
                raise ValueError("Expiration has no time zone")
            if ends <= datetime.now(UTC):
                raise ValueError(f"the credentials that it prints expired at {credentials.expiration}")
        return credentials

    def _failed(self, command: str, why: str) -> ProgramFailed:
        program = "".join(command.split()[:1])  # without the arguments, which may contain secrets
        return ProgramFailed(
            provider=self.METHOD,
            error_msg=": ".join(filter(None, (f"profile {self._profile}", program, why))),
        )

    def _output(self, arguments: list[str]) -> bytes:
        """Run a program and return its output.

        Raises TimeoutExpired, OSError or ValueError if the program failed.
        """
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            try:
                output, errors = process.communicate(timeout=QUIET_S)
            except subprocess.TimeoutExpired:
                self._report_wait(
                    f"waiting for credential_process of profile {self._profile}: {arguments[0]} "
                    f"(at most {PROGRAM_S:g} s)"
                )
                output, errors = process.communicate(timeout=PROGRAM_S - QUIET_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode:
            last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise ValueError(f"exit code {process.returncode}" + (f": {last}" if last else ""))
        return output
