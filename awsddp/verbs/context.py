"""The context of a verb: the spec, the cluster's folder, and where progress goes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.cluster import Target
from awsddp.errors import ConfigError
from awsddp.report import Event, OnEvent
from awsddp.spec import SSM, ClusterSpec, JobSpec
from awsddp.state import Folder, Record
from awsddp.verbs import local
from awsddp.verbs.trail import Trail

if TYPE_CHECKING:
    from awsddp.aws.session import Aws
    from awsddp.nodes.jump import Jump
    from awsddp.plan import Facts

JUMP = "network.jump"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every verb gets. `local`: --local was given; `folder` may be empty.

    `agree` answers a question of a verb that has begun; without a terminal the answer is no.
    """

    spec: ClusterSpec
    job: JobSpec
    folder: Folder
    on_event: OnEvent
    local: bool = False
    agree: Callable[[str], bool] = lambda question: False

    @property
    def home(self) -> Path:
        """$AWSDDP_HOME."""
        return self.folder.root

    def say(self, text: str) -> None:
        """Report a step of the verb."""
        self.on_event(Event(text))


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
    if spec.access.key and spec.access.key_file:
        from awsddp.nodes.connection import check_own_key

        check_own_key(own_key_file(spec), name=spec.access.key, public=facts.public_key)
    return replace(facts, owner=owner_of(aws, record))


def own_key_file(spec: ClusterSpec) -> Path:
    """Return where `access.key_file` is."""
    return Path(str(spec.access.key_file)).expanduser().absolute()


@contextlib.contextmanager
def target_for(ctx: Context) -> Iterator[Target]:
    """Yield the target of `up` and `plan`: --local, else --region and --profile, else the remembered one.

    Raises ConfigError if the cluster of this name exists elsewhere.
    """
    record = ctx.folder.read()
    asked = ctx.spec.cluster
    wants_local = ctx.local or (
        record is not None and record.target.name == "local" and not asked.region and not asked.profile
    )
    with contextlib.ExitStack() as stack:
        target: Target | None = None
        if wants_local:
            target = stack.enter_context(local.opened(ctx.home, ctx.on_event))
            if target is not None and "cluster.region" in ctx.spec.from_cli and asked.region != target.region:
                raise ConfigError(
                    f"cluster.region: the local cloud is {target.region}, not {asked.region}",
                    "",
                    f"omit --region, or --region {target.region}; without --local it is on AWS",
                )
        if target is None:
            remembered = record.target if record else Target()
            target = Target(
                region=asked.region or remembered.region, profile=asked.profile or remembered.profile
            )
        if record is not None and record.target.place != target.place:
            raise ConfigError(
                f"cluster {ctx.spec.name} is in {record.target.place}, not in {target.place}",
                "cluster names are unique",
                f"awsddp -c {ctx.spec.name}-2 up ...   # another name\nawsddp down   # end the first one",
            )
        yield target


def jump_of(ctx: Context, record: Record | None = None) -> "Jump | None":
    """Return the jump host that is set now, else the one that the cluster was created with.

    "ssm" is Systems Manager, called as the cluster's own account.
    """
    asked = record.asked if record is not None and JUMP not in ctx.spec.explicit else {}
    name = asked.get(JUMP, ctx.spec.network.jump)
    if not name:
        return None
    if name == SSM:
        from awsddp.nodes.ssm import Ssm

        target = record.target if record is not None else Target()
        asked_now = ctx.spec.cluster
        return Ssm(
            name=name,
            folder=ctx.home,
            region=target.region or asked_now.region,
            profile=asked_now.profile or target.profile,
        )
    from awsddp.nodes.jump import Jump

    return Jump(name=name, folder=ctx.home)


def reach_jump(ctx: Context) -> None:
    """Connect to the jump host, if there is one, before anything is created behind it.

    Raises JumpFailure, ConfigError.
    """
    jump = jump_of(ctx)
    if jump is not None:
        jump.reach()
