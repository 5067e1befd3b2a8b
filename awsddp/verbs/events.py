"""TensorBoard's event files, fetched while a job is followed."""

import contextlib
import threading
import time
from collections.abc import Iterator

from awsddp.errors import AwsddpError
from awsddp.jobs import protocol
from awsddp.jobs.selection import exclude_patterns, name_at_home
from awsddp.jobs.supervisor.manifest import EVENTS
from awsddp.nodes.results import Wanted
from awsddp.records import JobRecord
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.ledger import note_fetched
from awsddp.verbs.requests import answers_beside, holders
from awsddp.verbs.results import results_dir
from awsddp.verbs.selecting import MANIFEST_S, manifests_of, wanted_file

EVERY_S = 30.0
BYTES_PER_SECOND = 100e3
"""How much is fetched on average: after 16 MB nothing is for 160 s."""
BUSY = 0.05
"""The share of the time that a node may spend on listing them."""


class Events:
    """Fetches what has grown every 30 s. No error leaves it."""

    def __init__(self, cluster: ClusterHandle, job: JobRecord) -> None:
        self._cluster, self._job = cluster, job
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._fetched = 0

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Fetch in a thread, for as long as the context."""
        threading.Thread(target=self._run, daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()
            with self._writing:  # what is still being listed is not written any more
                note_fetched(self._cluster.ctx, self._cluster.record, self._job.job, self._fetched)

    def _run(self) -> None:
        wait_s = EVERY_S
        while not self._ended.wait(wait_s):
            began, before = time.monotonic(), self._fetched
            with contextlib.suppress(AwsddpError, OSError, LookupError, RuntimeError):
                self.fetch()  # a connection that breaks is reported, and opened again, where logs are read
            took = time.monotonic() - began
            wait_s = max(EVERY_S, took / BUSY, (self._fetched - before) / BYTES_PER_SECOND)

    def fetch(self) -> None:
        """Fetch the event files that are new or have grown. Raises AwsddpError."""
        from awsddp.nodes.results import pull

        ctx, fleet, settings = self._cluster.ctx, self._cluster.fleet, self._cluster.ctx.job.job
        target = results_dir(ctx, self._job.job)
        files = target.glob(f"node*/**/{EVENTS}*")
        known = {path.relative_to(target).as_posix(): path.lstat().st_size for path in files}
        exclude = exclude_patterns(settings.exclude)
        request = protocol.events_request(
            self._job.job, outputs=settings.outputs, exclude=exclude, known=known
        )
        requests = dict.fromkeys(holders(fleet, self._job), request)
        answers = answers_beside(fleet, requests, timeout_s=MANIFEST_S)
        listed = {node: one for node, one in answers.items() if not isinstance(one, AwsddpError)}
        wanted: dict[int, list[Wanted]] = {}
        for one in name_at_home(manifests_of(self._job, listed)[0])[0]:
            file = one.file
            if file.data is not None and file.sha256 and file.path.rpartition("/")[2].startswith(EVENTS):
                wanted.setdefault(one.node, []).append(wanted_file(one, size=file.size, sha256=file.sha256))
        with self._writing, ctx.folder.lock("fetch", part="results"):
            if wanted and not self._ended.is_set():
                came = pull(wanted, target, ssh_config=ctx.folder.ssh_config)
                self._fetched += sum(one.bytes for one in came.values())
