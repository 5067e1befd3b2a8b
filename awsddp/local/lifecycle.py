"""What happens to instances after the reply: one worker brings records and hosts together.

The records say what should be (`pending`, `stopping`, `shutting-down`, a reboot that was asked for), the
hosts say what is; each pass takes each instance one step. Nothing else is remembered that a restart would
lose. Steps that take time run in a pool, one at a time for an instance.
"""

from __future__ import annotations

import base64
import math
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from awsddp.local import emulator as records
from awsddp.local.emulator import Emulator, Store
from awsddp.local.faults import Faults
from awsddp.local.hosts import Condition, Hosts, HostSpec
from awsddp.local.network import fault_rules, group_rules

BUSY_POLL_S = 0.05
IDLE_POLL_S = 0.5
SHUT_DOWN_S = 60.0
BOOT_S = 60.0
"""A host that has not answered so long after its start hangs, and is started again."""
ENDED = ("stopped", "terminated")
_OFF = {"stopped": {"cut"}}
"""A machine that is off answers nothing, not even that nothing listens there."""


class Lifecycle:
    """The worker."""

    def __init__(self, emulator: Emulator, store: Store, hosts: Hosts, faults: Faults) -> None:
        self._faults = faults
        self._emulator = emulator
        self._store = store
        self.hosts = hosts
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="host")
        self._busy: set[str] = set()
        self._booted: dict[str, float] = {}
        self._broken: dict[str, str] = {}
        self._asked: dict[str, float] = {}
        self._rules: dict[str, str] = {}
        self._suffered: dict[str, frozenset[str]] = {}
        self._turn = threading.Lock()
        self._names: dict[str, str] = {}
        self._wanted = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="lifecycle", daemon=True).start()

    def wake(self) -> None:
        """Asks for a pass now."""
        self._wanted.set()

    def settle(self) -> bool:
        """Takes a pass, after which what was asked for is in force; true if nothing is on its way."""
        with self._turn:
            try:
                return self._pass()
            except Exception:
                traceback.print_exc()
                return True

    def _run(self) -> None:
        while True:
            self._wanted.clear()
            self._wanted.wait(IDLE_POLL_S if self.settle() else BUSY_POLL_S)

    def _pass(self) -> bool:
        """One step for every instance; true if nothing is on its way."""
        with self._emulator.lock:
            instances = list(self._emulator.instances())
            before = [(one.id, one.state, one.reboot_wanted) for one in instances]
            for instance in instances:
                if instance.state not in ENDED and instance.id not in self._busy:
                    self._step(instance)
            living = [one for one in instances if one.state != "terminated"]
            changed = before != [(one.id, one.state, one.reboot_wanted) for one in instances]
            if self._emulator.forget_old() or changed:
                self._store.save()
            self._faults.forget_nodes({one.id for one in living})
            effects = {one.id: self._faults.of(one.id) for one in living}
            cut = {one.id: effects[one.id] | _OFF.get(one.state, set()) for one in living}
            rules = {one.id: _rules(one, living) + fault_rules(cut[one.id]) for one in living}
            names = {one.private_ip: one.private_dns_name for one in living}
            unsettled = bool(self._busy) or any(
                one.state not in (*ENDED, "running") or one.reboot_wanted for one in living
            )
        self._enforce(rules, effects, names)
        return not unsettled and not changed

    def _enforce(
        self, rules: dict[str, str], effects: dict[str, frozenset[str]], names: dict[str, str]
    ) -> None:
        """Brings about what changed, after a restart all: rules, the faults that rules cannot do, names."""
        for instance_id in rules.keys() - self._busy:
            if self._rules.get(instance_id) != (text := rules[instance_id]):
                self.hosts.apply_rules(instance_id, text)
                self._rules[instance_id] = text
            wanted = effects[instance_id]
            if self._suffered.get(instance_id) != wanted and self.hosts.suffer(instance_id, wanted):
                self._suffered[instance_id] = wanted
        if names != self._names:
            self.hosts.announce(names)
            self._names = names
        for gone in (self._rules.keys() | self._suffered.keys()) - rules.keys():
            self._rules.pop(gone, None)
            self._suffered.pop(gone, None)

    def _step(self, instance: Any) -> None:
        """One instance, under the lock."""
        steps = {
            "pending": self._pending,
            "running": self._running,
            "stopping": self._stopping,
            "shutting-down": self._shutting_down,
        }
        steps[instance.state](instance, self.hosts.condition(instance.id))

    def _pending(self, instance: Any, condition: Condition) -> None:
        if condition is Condition.UP:
            records.set_state(instance, "running")
            self._booted.pop(instance.id, None)
        elif instance.id in self._broken or (condition is Condition.BROKEN and instance.id in self._booted):
            detail = self._broken.pop(instance.id, "") or self.hosts.complaint(instance.id)
            records.set_state(instance, "shutting-down")
            records.set_reason(instance, records.BROKEN, f"Internal error on launch: {detail}")
        elif condition is Condition.STARTING:
            if time.monotonic() - self._booted.setdefault(instance.id, time.monotonic()) > BOOT_S:
                self._boot(instance)  # this ends it first
        elif condition is Condition.OFF and instance.id in self._booted:
            self._powered_off(instance)
        else:
            self._boot(instance)

    def _running(self, instance: Any, condition: Condition) -> None:
        if getattr(instance, "reclaimed_at", math.inf) <= time.time():
            records.set_state(instance, "shutting-down")
            records.set_reason(instance, records.RECLAIMED)
        elif self._broken.pop(instance.id, None) or condition in (Condition.OFF, Condition.BROKEN):
            self._powered_off(instance)
        elif condition in (Condition.RESTARTING, Condition.ABSENT):
            instance.reboot_wanted = False
            self._boot(instance)
        elif instance.reboot_wanted and condition is Condition.UP:
            instance.reboot_wanted = False
            self.hosts.shut_down(instance.id, reboot=True)

    def _stopping(self, instance: Any, condition: Condition) -> None:
        if condition not in (Condition.UP, Condition.STARTING):
            self._asked.pop(instance.id, None)
            self._booted.pop(instance.id, None)
            records.finish_stop(instance)
        elif instance.id not in self._asked:
            self._asked[instance.id] = time.monotonic()
            self.hosts.shut_down(instance.id)
        elif time.monotonic() - self._asked[instance.id] > SHUT_DOWN_S:
            self._later(instance.id, lambda: self.hosts.cut_power(instance.id))

    def _shutting_down(self, instance: Any, condition: Condition) -> None:
        def end() -> None:
            self.hosts.remove(instance.id)
            with self._emulator.lock:
                records.finish_terminate(instance)
                self._store.save()

        self._later(instance.id, end)

    def _powered_off(self, instance: Any) -> None:
        """Its power went from inside: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_ChangingInstanceInitiatedShutdownBehavior.html"""
        end = instance.instance_initiated_shutdown_behavior == "terminate"
        records.set_state(instance, "shutting-down" if end else "stopping")
        records.set_reason(instance, records.INSTANCE_SHUTDOWN)
        self._booted.pop(instance.id, None)

    def _boot(self, instance: Any) -> None:
        spec = _spec(instance)
        rules = _rules(instance, [one for one in self._emulator.instances() if one.state != "terminated"])
        rules += fault_rules(self._faults.of(instance.id))

        def boot() -> None:
            try:
                self._suffered.pop(spec.instance_id, None)
                self.hosts.apply_rules(spec.instance_id, rules)
                self.hosts.boot(spec)
                self._booted[spec.instance_id] = time.monotonic()
            except Exception as error:
                traceback.print_exc()
                self._broken[spec.instance_id] = "; ".join(str(error).splitlines()[:2]) or repr(error)

        self._later(spec.instance_id, boot)

    def _later(self, instance_id: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception:
                traceback.print_exc()
                time.sleep(BUSY_POLL_S)
            finally:
                self._busy.discard(instance_id)
                with self._turn:  # the memory was shared out anew, also to a node that is to be short of it
                    self._suffered = {key: effects for key, effects in self._suffered.items() if not effects}
                self.wake()

        self._busy.add(instance_id)
        self._pool.submit(run)


def _spec(instance: Any) -> HostSpec:
    pair = instance.ec2_backend.key_pairs.get(instance.key_name)
    image = instance.ec2_backend.amis[instance.image_id]
    disk = instance.block_device_mapping[instance.root_device_name]
    tags = [(tag["key"], tag["value"]) for tag in instance.get_tags()]
    pretended = ("awsddp:gpus", "pretended") in tags
    return HostSpec(
        instance_id=instance.id,
        address=instance.private_ip,
        name=instance.private_dns_name,
        user_data=base64.b64decode(str(instance.user_data or "")),
        public_keys=(pair.material_public.decode().strip(),) if pair else (),
        has_torch="PyTorch" in image.name,
        disk_gib=int(instance.ec2_backend.volumes[disk.volume_id].size),
        rehearsal=None if pretended else instance.instance_type,
    )


def _groups(instance: Any) -> dict[str, Any]:
    return {group.id: group for nic in instance.nics.values() for group in nic.group_set}


def _rules(instance: Any, living: list[Any]) -> str:
    members: dict[str, list[str]] = {}
    for one in living:
        for group_id in _groups(one):
            members.setdefault(group_id, []).append(one.private_ip)
    return group_rules(_groups(instance).values(), members)
