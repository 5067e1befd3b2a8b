"""What AWS lists may be a little old: what this machine knows to be there is waited for before it is believed
to be gone."""

from datetime import timedelta
from typing import TYPE_CHECKING

from awsddp.cluster import Cluster
from awsddp.state import Record

if TYPE_CHECKING:
    from awsddp.aws.session import Aws

# Terminated instances are listed for about as long: until then one that is not listed is not listed yet.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/terminating-instances.html
LISTED = timedelta(hours=1)


def settled(aws: "Aws", name: str, record: Record, cluster: Cluster | None) -> Cluster | None:
    """Return the cluster once every instance of it that was made ready within the hour is listed.

    It is waited for two minutes, and looked for again only if something was missing. A cluster of another id
    than the record's is returned as it is. Raises CloudError.
    """
    from awsddp.aws.clusters import describe, find_clusters, tagged
    from awsddp.aws.waits import CLOCK, VISIBLE_S, poll

    missing = {found.instance_id for found in record.prepared}
    missing -= {node.instance_id for node in cluster.nodes} if cluster else set()
    other = cluster is not None and cluster.id != record.id
    if other or not missing or CLOCK.now() - record.created > LISTED:
        return cluster
    # A cloud that brings its own keys knows its caller for as long as it lives: this is another one.
    if record.target.access_key_id is not None and record.owner != aws.identity().user_id:
        return cluster

    def look() -> bool | None:
        found = describe(aws, tagged("awsddp:id", record.id))
        return True if missing <= {item["InstanceId"] for item in found} else None

    poll(look, deadline_s=VISIBLE_S, clock=CLOCK)
    return next((one for one in find_clusters(aws, name, record.owner) if one.id == record.id), None)
