"""A second cluster of the same name."""

from awsddp.aws.client import AwsClient
from awsddp.model.records import ClusterListing


def launch_namesake(aws: AwsClient, mine: ClusterListing) -> str:
    """Launch a node of a second cluster of the same name and owner, as from another machine."""
    tags = {
        "awsddp:cluster": "demo",
        "awsddp:owner": mine.owner,
        "awsddp:id": "ffffffff",
        "awsddp:nodes": "0",
    }
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    launch = {"ImageId": mine.nodes[0].image_id, "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
    tagging = {"TagSpecifications": [{"ResourceType": "instance", "Tags": pairs}]}
    return str(aws.call("RunInstances", launch | tagging)["Instances"][0]["InstanceId"])
