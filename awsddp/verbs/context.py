"""The context of a verb: the spec, the cluster's folder, and where progress goes."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from awsddp.errors import ConfigError
from awsddp.records import Target
from awsddp.report import Event, OnEvent
from awsddp.spec import SSM, ClusterSpec, JobSpec, overlaid
from awsddp.state import Folder, Record, make_folder, open_to_append
from awsddp.verbs import local

if TYPE_CHECKING:
    from awsddp.aws.session import Aws, Call
    from awsddp.nodes.jump import Jump
    from awsddp.plan.records import Facts

JUMP = "network.jump"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every verb gets. `local`: --local was given; `folder` may be empty.

    `verb` starts a job: "train", or "run", which ends the cluster with it.
    `agree` answers a question of a verb that has begun; without a terminal the answer is no.
    """

    spec: ClusterSpec
    job: JobSpec
    folder: Folder
    on_event: OnEvent
    local: bool = False
    verb: Literal["train", "run"] = "train"
    agree: Callable[[str], bool] = lambda question: False

    @property
    def home(self) -> Path:
        """$AWSDDP_HOME."""
        return self.folder.root

    def say(self, text: str) -> None:
        """Report a step of the verb."""
        self.on_event(Event(text))


class Trail:
    """The audit trail: hears of calls and writes them down in a folder, a line each; secrets were redacted.

    What is asked before a cluster has its folder is kept, and written once there is one; a call that may have
    changed something makes it. Of a cluster that never comes to be nothing is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    def __call__(self, call: "Call") -> None:
        """Write one call down: when, how long, what, with which parameters, AWS's request id, its error."""
        with self._lock, contextlib.suppress(OSError):  # a folder that cannot be written holds no call up
            self._waiting.append(msgspec.json.encode(call, enc_hook=str) + b"\n")
            if call.changes:
                make_folder(self._folder)
            elif not self._folder.is_dir():
                return
            with open_to_append(self._folder / "calls.jsonl") as stream:
                stream.write(b"".join(self._waiting))
            self._waiting.clear()


def aws_of(ctx: Context, target: Target, *, trail: Path | None = None, login: "Aws | None" = None) -> "Aws":
    """Return the gateway to a target. Its calls are recorded in the cluster's folder, or in `trail`.

    With `login` it uses that gateway's credentials. Raises ConfigError.
    """
    from awsddp.aws.session import Aws

    return Aws(target, on_call=Trail(trail or ctx.folder.path), login=login)


def owner_of(aws: "Aws", record: Record | None) -> str:
    """Return the owner of a cluster: that of its record, whose login may differ now, else the caller.

    In a local cloud always the caller. Raises CloudError, ConfigError.
    """
    if record is None or record.target.access_key_id is not None:
        return aws.identity().user_id
    return record.owner


def check_account(ctx: Context, aws: "Aws", record: Record) -> None:
    """Raise ConfigError where the credentials are of another account than the cluster's."""
    account = aws.identity().account
    if record.account not in ("", account):
        raise ConfigError(
            f"cluster {ctx.spec.name} belongs to AWS account {record.account}",
            f"these credentials are of account {account}; nothing was changed or forgotten",
            "use credentials of the cluster's account: awsddp --profile NAME ...",
        )


def facts_of(aws: "Aws", spec: ClusterSpec, target: Target, record: Record | None = None) -> "Facts":
    """Read what a plan for `spec` needs, and check that the user's own login key matches the one in EC2.

    What is launched for the cluster of `record` gets its owner, whoever logs in. Raises ConfigError,
    CloudError.
    """
    from awsddp.aws.facts import gather

    facts = gather(aws, spec, caller_address=target.caller_address, target=target.name)
    if spec.access.key:
        from awsddp.nodes.connection import check_own_key

        check_own_key(own_key_file(spec), name=spec.access.key, public=facts.public_key)
    return replace(facts, owner=owner_of(aws, record))


def own_key_file(spec: ClusterSpec) -> Path:
    """Return where `access.key_file` is."""
    return Path(str(spec.access.key_file)).expanduser().absolute()


def target_of(ctx: Context, record: Record | None) -> Target:
    """Return the place that a record names; no setting moves it, and only --profile changes who logs in.

    Without a record it is the place that is set now. Raises ConfigError where the command line names another
    place than the record.
    """
    requested, typed = ctx.spec.cluster, ctx.spec.from_cli
    if record is None:
        here = Target(region=requested.region, profile=requested.profile)
        return Target(name="local") if ctx.local else here
    target = record.target
    region = requested.region if "cluster.region" in typed else None
    profile = requested.profile if "cluster.profile" in typed else None
    if target.name == "local":
        other = "" if ctx.local else region or (profile and f"AWS as profile {profile}")
    else:
        other = "the local cloud" if ctx.local else region if region != target.region else ""
    if other:
        raise _elsewhere(ctx, record, other)
    return replace(target, profile=profile or target.profile)


def _elsewhere(ctx: Context, record: Record, other: str) -> ConfigError:
    """Return the error for a cluster that is not where it is requested."""
    name, place = ctx.spec.name, record.target.place
    return ConfigError(
        f"cluster {name} is in {place}, not in {other}",
        "cluster names are unique; nothing was changed or forgotten",
        f"awsddp status   # without another region, profile or --local: the cluster in {place}\n"
        "awsddp down   # end it there\n"
        f"awsddp -c {name}-2 up ...   # another name",
    )


@contextlib.contextmanager
def target_for(ctx: Context, *, of_all: bool = False) -> Iterator[Target]:
    """Open the target of `up` and `plan`: that of the cluster, else --local, else --region and --profile.

    What is about all clusters (`of_all`) goes where an option or a key says, else to the cluster's. Raises
    ConfigError if the cluster of this name exists elsewhere.
    """
    asked = ctx.spec.cluster
    is_set = bool(ctx.local or asked.region or asked.profile)
    record = None if of_all and is_set else ctx.folder.read()
    chosen = target_of(ctx, record)
    if chosen.name != "local":
        if record is not None and asked.region not in (None, chosen.region):
            raise _elsewhere(ctx, record, str(asked.region))
        yield chosen
        return
    if "cluster.region" in ctx.spec.from_cli:
        local.check_region(asked.region)
    with local.opened(ctx.home, ctx.on_event, remembered=chosen.daemon_home) as target:
        assert target is not None, "it was started"
        yield target


def jump_of(ctx: Context, record: Record | None = None) -> "Jump | None":
    """Return the jump host of an option or a variable, else the cluster's; without a cluster the one set now.

    "ssm" is Systems Manager, called as the cluster's own account.
    """
    name = overlaid(ctx.spec, record.settings if record is not None else {}).network.jump
    if not name:
        return None
    if name == SSM:
        from awsddp.nodes.ssm import Ssm

        target = target_of(ctx, record)
        return Ssm(name=name, folder=ctx.home, region=target.region, profile=target.profile)
    from awsddp.nodes.jump import Jump

    return Jump(name=name, folder=ctx.home)


def reach_jump(ctx: Context) -> None:
    """Connect to the jump host, if there is one, before anything is created behind it.

    Raises JumpFailure, ConfigError.
    """
    jump = jump_of(ctx)
    if jump is not None:
        jump.reach()
