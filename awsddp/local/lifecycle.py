"""The worker that reconciles instance records with hosts.

Records have the desired state (`pending`, `stopping`, `shutting-down`, a requested reboot), and hosts have
the actual state. Each pass brings each instance one step closer to the desired state. No state is lost when
the daemon restarts. Slow steps run in a thread pool, one at a time per instance.
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
from awsddp.local.image import get_rehearsed_type
from awsddp.local.network import make_fault_rules, make_group_rules

BUSY_POLL_S = 0.05
IDLE_POLL_S = 0.5
SHUT_DOWN_S = 60.0
BOOT_S = 60.0
"""A host that does not answer within this time after its start counts as hung and is started again."""
ENDED = ("stopped", "terminated")
_OFF = {"stopped": {"cut"}}
"""The fault effects for a host that is off. Such a host sends no packets, not even to refuse a connection."""


class Lifecycle:
    """The worker that reconciles records with hosts."""

    def __init__(self, emulator: Emulator, store: Store, hosts: Hosts, faults: Faults) -> None:
        self._faults = faults
        self._emulator = emulator
        self._store = store
        self.hosts = hosts
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="host")
        self._busy: set[str] = set()
        self._booted_at: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._shut_down_at: dict[str, float] = {}
        self._applied_rules: dict[str, str] = {}
        self._applied_effects: dict[str, frozenset[str]] = {}
        self._pass_lock = threading.Lock()
        self._applied_names: dict[str, str] = {}
        self._wake_event = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="lifecycle", daemon=True).start()

    def wake(self) -> None:
        """Start a pass now."""
        self._wake_event.set()

    def settle(self) -> bool:
        """Run a pass, which also applies faults and rules. Return True if no instance is changing state, or
        if the pass failed."""
        with self._pass_lock:
            try:
                return self._pass()
            except Exception:
                traceback.print_exc()
                return True

    def _run(self) -> None:
        while True:
            self._wake_event.clear()
            self._wake_event.wait(IDLE_POLL_S if self.settle() else BUSY_POLL_S)

    def _pass(self) -> bool:
        """Take one step for every instance; return True if no instance is changing state."""
        with self._emulator.lock:
            instances = list(self._emulator.instances())
            before = [(row.id, row.state, row.reboot_wanted) for row in instances]
            for instance in instances:
                if instance.state not in ENDED and instance.id not in self._busy:
                    self._step(instance)
            alive = [row for row in instances if row.state != "terminated"]
            has_changed = before != [(row.id, row.state, row.reboot_wanted) for row in instances]
            if self._emulator.drop_old_instances() or has_changed:
                self._store.save()
            self._faults.remove_gone_nodes({row.id for row in alive})
            effects = {row.id: self._faults.get_effects(row.id) for row in alive}
            cut = {row.id: effects[row.id] | _OFF.get(row.state, set()) for row in alive}
            rules = {row.id: _make_rules(row, alive) + make_fault_rules(cut[row.id]) for row in alive}
            names = {row.private_ip: row.private_dns_name for row in alive}
            is_changing = bool(self._busy) or any(
                row.state not in (*ENDED, "running") or row.reboot_wanted for row in alive
            )
        self._apply_changes(rules, effects, names)
        return not is_changing and not has_changed

    def _apply_changes(
        self, rules: dict[str, str], effects: dict[str, frozenset[str]], names: dict[str, str]
    ) -> None:
        """Apply changed rules, fault effects and host names, or all of them after the daemon's restart."""
        for instance_id in rules.keys() - self._busy:
            if self._applied_rules.get(instance_id) != (text := rules[instance_id]):
                self.hosts.apply_rules(instance_id, text)
                self._applied_rules[instance_id] = text
            desired = effects[instance_id]
            if self._applied_effects.get(instance_id) != desired and self.hosts.apply_faults(
                instance_id, desired
            ):
                self._applied_effects[instance_id] = desired
        if names != self._applied_names:
            self.hosts.set_host_names(names)
            self._applied_names = names
        for instance_id in (self._applied_rules.keys() | self._applied_effects.keys()) - rules.keys():
            self._applied_rules.pop(instance_id, None)
            self._applied_effects.pop(instance_id, None)

    def _step(self, instance: Any) -> None:
        """Take one step for an instance. The caller holds the lock."""
        steps = {
            "pending": self._step_pending,
            "running": self._step_running,
            "stopping": self._step_stopping,
            "shutting-down": self._step_shutting_down,
        }
        steps[instance.state](instance, self.hosts.condition(instance.id))

    def _step_pending(self, instance: Any, condition: Condition) -> None:
        has_booted = instance.id in self._booted_at
        if condition is Condition.UP:
            records.set_state(instance, "running")
            self._booted_at.pop(instance.id, None)
        elif instance.id in self._errors or (condition is Condition.BROKEN and has_booted):
            detail = self._errors.pop(instance.id, "") or self.hosts.failure_reason(instance.id)
            records.set_state(instance, "shutting-down")
            records.set_reason(instance, records.BROKEN, f"Internal error on launch: {detail}")
        elif condition is Condition.STARTING:
            if time.monotonic() - self._booted_at.setdefault(instance.id, time.monotonic()) > BOOT_S:
                self._boot(instance)  # this first kills the host
        elif condition is Condition.OFF and has_booted:
            self._powered_off(instance)
        else:
            self._boot(instance)

    def _step_running(self, instance: Any, condition: Condition) -> None:
        if getattr(instance, "reclaimed_at", math.inf) <= time.time():
            records.set_state(instance, "shutting-down")
            records.set_reason(instance, records.RECLAIMED)
        elif self._errors.pop(instance.id, None) or condition in (Condition.OFF, Condition.BROKEN):
            self._powered_off(instance)
        elif condition in (Condition.RESTARTING, Condition.ABSENT):
            instance.reboot_wanted = False
            self._boot(instance)
        elif instance.reboot_wanted and condition is Condition.UP:
            instance.reboot_wanted = False
            self.hosts.shut_down(instance.id, reboot=True)

    def _step_stopping(self, instance: Any, condition: Condition) -> None:
        if condition not in (Condition.UP, Condition.STARTING):
            self._shut_down_at.pop(instance.id, None)
            self._booted_at.pop(instance.id, None)
            records.finish_stop(instance)
        elif instance.id not in self._shut_down_at:
            self._shut_down_at[instance.id] = time.monotonic()
            self.hosts.shut_down(instance.id)
        elif time.monotonic() - self._shut_down_at[instance.id] > SHUT_DOWN_S:
            self._run_in_pool(instance.id, lambda: self.hosts.cut_power(instance.id))

    def _step_shutting_down(self, instance: Any, condition: Condition) -> None:
        def terminate() -> None:
            self.hosts.remove(instance.id)
            with self._emulator.lock:
                records.finish_terminate(instance)
                self._store.save()

        self._run_in_pool(instance.id, terminate)

    def _powered_off(self, instance: Any) -> None:
        """Record that a node powered itself off: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_ChangingInstanceInitiatedShutdownBehavior.html"""
        terminates = instance.instance_initiated_shutdown_behavior == "terminate"
        records.set_state(instance, "shutting-down" if terminates else "stopping")
        records.set_reason(instance, records.INSTANCE_SHUTDOWN)
        self._booted_at.pop(instance.id, None)

    def _boot(self, instance: Any) -> None:
        spec = _make_spec(instance)
        alive = [row for row in self._emulator.instances() if row.state != "terminated"]
        rules = _make_rules(instance, alive) + make_fault_rules(self._faults.get_effects(instance.id))

        def boot() -> None:
            try:
                self._applied_effects.pop(spec.instance_id, None)
                self.hosts.apply_rules(spec.instance_id, rules)
                self.hosts.boot(spec)
                self._booted_at[spec.instance_id] = time.monotonic()
            except Exception as error:
                traceback.print_exc()
                self._errors[spec.instance_id] = "; ".join(str(error).splitlines()[:2]) or repr(error)

        self._run_in_pool(spec.instance_id, boot)

    def _run_in_pool(self, instance_id: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception:
                traceback.print_exc()
                time.sleep(BUSY_POLL_S)
            finally:
                self._busy.discard(instance_id)
                # The step divided the memory again, so the "oom" effect must be applied again.
                with self._pass_lock:
                    applied = self._applied_effects.items()
                    self._applied_effects = {key: effects for key, effects in applied if not effects}
                self.wake()

        self._busy.add(instance_id)
        self._pool.submit(run)


def _make_spec(instance: Any) -> HostSpec:
    pair = instance.ec2_backend.key_pairs.get(instance.key_name)
    image = instance.ec2_backend.amis[instance.image_id]
    disk = instance.block_device_mapping[instance.root_device_name]
    return HostSpec(
        instance_id=instance.id,
        address=instance.private_ip,
        name=instance.private_dns_name,
        user_data=base64.b64decode(str(instance.user_data or "")),
        public_keys=(pair.material_public.decode().strip(),) if pair else (),
        has_torch="PyTorch" in image.name,
        disk_gib=int(instance.ec2_backend.volumes[disk.volume_id].size),
        rehearsal=get_rehearsed_type(instance),
    )


def _security_groups(instance: Any) -> dict[str, Any]:
    return {group.id: group for nic in instance.nics.values() for group in nic.group_set}


def _make_rules(instance: Any, alive: list[Any]) -> str:
    """Return the ruleset for an instance's security groups, whose members are among the instances in
    `alive`."""
    members: dict[str, list[str]] = {}
    for peer in alive:
        for group_id in _security_groups(peer):
            members.setdefault(group_id, []).append(peer.private_ip)
    return make_group_rules(_security_groups(instance).values(), members)
