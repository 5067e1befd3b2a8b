"""The verbs of the command line. A verb is one entry here and one file in cli/, verbs/ and tests/."""

from typing import NamedTuple


class Entry(NamedTuple):
    """A verb's line on `awsddp --help`."""

    summary: str


VERBS = {
    "init": Entry("Write a starter awsddp.toml."),
    "plan": Entry("Show what `up` would do and cost. Changes nothing."),
    "up": Entry("Launch and prepare the nodes. Idempotent: finishes, repairs, resizes."),
    "status": Entry("Show nodes, addresses, jobs, price, cost and time left."),
    "sync": Entry("Send the working folder to every node."),
    "train": Entry("Sync, launch the ranks, stream their logs, fetch the results."),
    "jobs": Entry("List the cluster's jobs."),
    "logs": Entry("Show a job's logs; -f follows the job to its end and fetches its results."),
    "cancel": Entry("End a job; it gets time to save a checkpoint."),
    "fetch": Entry("Fetch a job's results."),
    "exec": Entry("Run a command on all nodes."),
    "ssh": Entry("Open a shell on a node."),
    "doctor": Entry("Check what a launch needs; --why JOB shows where a running job hangs."),
    "report": Entry("Summarize a job; --cost shows what every cluster cost."),
    "stop": Entry("Stop the instances, keep their disks; `up` starts them again."),
    "down": Entry("Terminate everything, wait until it is gone, and show the cost."),
    "run": Entry("up, train and down in one: nothing is left, whatever happens."),
    "local": Entry("The local cloud: a rehearsal without an AWS account."),
}
