"""The pages before a launch, and its question: the plan, the settings, the offers and quota."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from awsddp.cli.command_line import named
from awsddp.cli.screen import Screen
from awsddp.cli.table import line, lines, table, width
from awsddp.errors import UsageError
from awsddp.model.records import write_numbers
from awsddp.settings.loader import EXCLUSIVE
from awsddp.settings.spec import ClusterSpec, Value
from awsddp.util.format import amount, counted, duration, money

if TYPE_CHECKING:
    from awsddp.model.documents import OffersDocument, QuotaDocument
    from awsddp.model.records import Choice
    from awsddp.plan.records import Data, ImageDocument, LaunchPlan, Step

_PRICED = EXCLUSIVE | {"cluster.max_price_usd", "cluster.budget_usd"}
"""Keys that choose what is paid for, or limit it."""
_FACTS, _WARNED = 8, 12
"""How many lines the facts of a launch get, and its warnings: the question is the 24th at most."""
_CODE = re.compile(r", L-[0-9A-F]{8}")
_KNOWN = re.compile(
    r"GPUs are |prices are list |the budget of |skipped: |spot nodes |a newer image |"
    r"\S+ is (bare metal|deprecated)"
)
"""How warnings begin that leave nothing to decide."""


def plan_page(plan: "LaunchPlan", *, verbose: bool = False, stderr: bool = False) -> None:
    """Show a plan: instances, price, image, zones, resources, fallbacks, other choices, warnings.

    With `verbose` also what only those look up who know why: placement, EFA, the code of the quota.
    """
    unchanged = ["none: the cluster is as requested, nothing would change"] if plan.exists else []
    closed = "nowhere: no port is open"
    if not plan.asks("CreateSecurityGroup"):
        closed = "what your security group allows"
    through = f", through {plan.jump}" if plan.jump else ""
    egress = f"; data transfer out {money(plan.egress_usd_per_gb)} per GB"
    efa = f"{plan.efa.count}/{plan.efa.most} interfaces: {plan.efa.why}"
    rows = [
        ("cluster", f"{plan.cluster} on {plan.target}, {plan.region}"),
        ("nodes", f"{plan.nodes} x {plan.instance_type}, {plan.market} ({plan.why})"),
        ("price", _price_line(plan) + egress * verbose),
        ("budget", str(plan.budget or "")),
        ("expires", f"after {duration(plan.expires_s)}, by itself"),
        *(("" if index else "steps", str(step)) for index, step in enumerate(plan.steps or unchanged)),
        ("per node", _node_line(plan)),
        ("image", _image_line(plan.image.shown, verbose=verbose)),
        ("zones", ", ".join(plan.zones)),
        ("fallbacks", "; ".join(map(_next_line, plan.alternatives))),
        ("data", "; ".join(map(_data_line, plan.data))),
        ("address", f"{plan.address}{through}; SSH from {', '.join(plan.ssh_cidrs) or closed}"),
        ("creates", ", ".join(plan.makes)),
        ("uses", ", ".join(f"{what} {name}" for what, name in plan.uses.items())),
        ("quota", plan.quota if verbose else _CODE.sub("", plan.quota)),
        ("placement", plan.placement_why if verbose else ""),
        ("EFA", efa if verbose or plan.efa.count else ""),
    ]
    table(("", ""), [row for row in rows if row[1]], stderr=stderr)
    if plan.choices:
        line("other choices:", stderr=stderr)
        _choices(plan.choices, plan.region, stderr=stderr)
    line(*(f"warning: {warning}" for warning in plan.warnings), stderr=stderr)


def launch_page(plan: "LaunchPlan", idle: str) -> None:
    """Show on stderr what a launch is asked about: a fact a line, and what is to be decided."""
    columns = width(stderr=True) or sys.maxsize
    facts = [f"{label:<9}{text}" if label else text for label, text in _facts(plan, idle) if text]
    if len(facts) > _FACTS:
        facts[_FACTS - 1 :] = [f"and {len(facts) - _FACTS + 1} more"]
    line(*(text if len(text) <= columns else f"{text[: columns - 1]}…" for text in facts), stderr=True)
    warnings = (f"warning: {text}" for text in plan.warnings if not _KNOWN.match(text))
    warned = [one for text in warnings for one in lines(text, columns=columns)]
    line(*warned[:_WARNED], f"details: {named('awsddp plan')}", stderr=True)


def _facts(plan: "LaunchPlan", idle: str) -> list[tuple[str, str]]:
    """Return what a launch is, by heading."""
    kind, price = plan.kind, money(plan.price_usd_per_hour)
    expires = duration(plan.expires_s).removesuffix(" 0 min")
    gpus = f"{kind.gpus} {kind.gpu_shown} each" if kind.gpus else "no GPU"
    idle = "" if plan.exists or idle == "off" else f"when idle for {idle}, or "
    ends = "ends", f"{idle}after {expires}"
    steps = [("changes", text) for text in _step_lines(plan.steps)]
    if plan.target == "local":
        off = "; GPUs are off" if plan.pretended and not plan.image.rehearses else ""
        what = f"{counted(plan.nodes, 'node')} on this machine (rehearsed as {kind.name}, {gpus}{off})"
        free = f"free; on EC2 it would be {price}{' per hour' * (plan.price.total is not None)}"
        return [("", what), ("price", free), *steps, ends]
    most, why = money(plan.price_until_expiry_usd), f"expires after {expires}"
    if plan.budget is not None and plan.budget.lasts_s <= plan.expires_s + 1:
        most, why = money(plan.budget.usd), "ends by itself then"
    listed = f" (list {plan.price.date})" * plan.listed
    others = [other.price_usd_per_hour or 0.0 for other in plan.alternatives]
    image = plan.image.shown
    versions = (("torch", image.torch), ("CUDA", image.cuda))
    told = "".join(f"{what} {version}, " for what, version in versions if version)
    return [
        ("", f"{plan.nodes} x {kind.name} ({gpus}), {plan.market}, in {plan.region}: cluster {plan.cluster}"),
        (
            "price",
            "unknown" if plan.price.total is None else f"{price} per hour{listed}, at most {most}: {why}",
        ),
        *steps,
        ("or", f"{counted(len(others), 'fallback')}, up to {money(max(others))} per hour" if others else ""),
        ends,
        ("image", f"{told}{image.name}"),
        ("creates", ", ".join(plan.makes)),
    ]


def _step_lines(steps: "Sequence[Step]") -> list[str]:
    """Return the steps, ends first; those that do the same to several nodes for one reason are one."""
    found: dict[tuple[str, str], list[Step]] = {}
    for step in sorted(steps, key=lambda step: step.do != "end"):
        found.setdefault((step.do, step.why), []).append(step)
    texts = []
    for (do, why), alike in found.items():
        numbers = write_numbers(number for step in alike for number in step.numbers)
        texts.append(str(alike[0]) if len(alike) == 1 else f"{do} nodes {numbers}: {why}")
    return texts


def _node_line(plan: "LaunchPlan") -> str:
    kind = plan.kind
    gpus = f"{kind.gpus} x {kind.gpu_shown} ({kind.memory_gb:g} GiB)" if kind.gpus else "no GPU"
    network = f", {kind.network} Gbit/s" if kind.network else ""
    return f"{gpus}, {kind.vcpus} vCPUs, {kind.ram_gb:g} GiB{network}, {plan.disk_gb} GB disk"


def _image_line(image: "ImageDocument", *, verbose: bool) -> str:
    told = (("torch", image.torch), ("CUDA", image.cuda), ("driver", image.driver))
    versions = ", ".join(f"{what} {version}" for what, version in told if version)
    owner = f", of {image.owner}" if image.owner else ""
    id = f" ({image.id}, {image.created[:10]}{owner})" * verbose
    return f"{image.name}{id}{f'; {versions}' * bool(versions)}"


def _data_line(data: "Data") -> str:
    if data.bytes is None or data.files is None:
        return f"{data.name}: {data.source}"
    about = "at least " * data.at_least + amount(data.files, data.bytes)
    return f"{data.name}: {about} of {data.source}"


def _next_line(other: "LaunchPlan") -> str:
    price = money(other.price_usd_per_hour)
    return f"{other.instance_type} {other.market} in {other.region} at {price} per hour"


def _price_line(plan: "LaunchPlan") -> str:
    price, free = plan.price, "free; on EC2 " * (plan.target == "local")
    if price.total is None:
        return f"{free}unknown"
    parts = ", ".join(f"{part} {money(usd)}" for part, usd in vars(price.parts).items() if usd != 0)
    return (
        f"{free}{money(price.total)} per hour ({parts}), "
        f"{money(plan.price_until_expiry_usd)} until it expires "
        f"({f'{price.source} {price.date}'.strip()})"
    )


def _choices(choices: "Sequence[Choice]", region: str, *, stderr: bool = False) -> None:
    """Show instance types, their spot prices too where some are known."""
    prices = [getattr(one, "spot_usd_per_hour", None) for one in choices]
    has_spot = prices.count(None) < len(prices)
    rows = [
        (
            *(one.instance_type, f"{one.gpus_per_node} x {one.gpu}", money(one.price_usd_per_hour)),
            {True: "sufficient", False: "too small", None: "unknown"}[one.fits_quota],
            ", ".join(zone.removeprefix(region) for zone in one.zones),
            *[money(price)] * has_spot,
        )
        for one, price in zip(choices, prices, strict=True)
    ]
    headings = ("type", "gpus", "per node-hour", "quota", f"zones of {region}", *["spot"] * has_spot)
    table(headings, rows, stderr=stderr)


def settings_page(settings: "list[tuple[str, Value, str]]") -> None:
    """Show each setting, its value and where it comes from."""
    rows = [(key, json.dumps(value, ensure_ascii=False), source) for key, value, source in settings]
    table(("setting", "value", "from"), rows)


def offers_page(found: "OffersDocument") -> None:
    """Show every GPU type offered in the region."""
    line(
        f"{found.region}, {found.price_source}, {found.price_date}; quota for {counted(found.nodes, 'node')}:"
    )
    _choices(found.offers, found.region)
    others: dict[str, list[str]] = {}
    for one in found.offers:
        if one.price_usd_per_hour is not None and one.price_date != found.price_date:
            others.setdefault(one.price_date, []).append(one.instance_type)
    line(*(f"list price of {date}: {', '.join(names)}" for date, names in sorted(others.items())))


def quota_page(quota: "QuotaDocument") -> None:
    """Show the quota request, or that none is needed."""
    what = f"{quota.name} ({quota.quota}) in {quota.region}"
    if quota.request is None:
        line(f"No request needed: {what} allows {quota.have:g} vCPUs, and {quota.need} are needed.")
        return
    line(f"Requested {quota.need} vCPUs of {what}: request {quota.request}. AWS answers by email.")


def launch_question(show: Screen, spec: ClusterSpec) -> Callable[["LaunchPlan | str"], None]:
    """Return the question of `up`, called with a plan or with the text of a change.

    -y answers it, but chooses no price: UsageError where neither a type nor a limit was given. In the local
    cloud a launch is free: only the end of nodes is asked about.
    """

    def ask(plan: "LaunchPlan | str") -> None:
        if isinstance(plan, str):
            show.question("", "nothing was changed")(f"{plan}Do this?")
            return
        is_free = plan.target == "local" and not any(step.do == "end" for step in plan.steps)
        is_chosen = plan.target == "local" or plan.steps or spec.explicit & _PRICED
        if show.options.yes and not is_chosen:
            _refuse_any_price(plan)
        show.pause()
        if not show.options.quiet and not (show.options.json and (show.options.yes or is_free)):
            if show.options.verbose:
                plan_page(plan, verbose=True, stderr=True)
            else:
                launch_page(plan, spec.cluster.idle)
        if is_free:
            return
        show.question("Do this?" if plan.steps else "Launch this?", "nothing was launched")("")

    return ask


def _refuse_any_price(plan: "LaunchPlan") -> None:
    price = money(plan.price_usd_per_hour)
    raise UsageError(
        f"-y does not choose a price: {plan.nodes} x {plan.instance_type} cost {price} per hour",
        "neither an instance type, GPUs, nor a limit was given",
        f"--instance-type {plan.instance_type}   # if that is what you want\n"
        "--budget USD   # or a limit until they expire",
    )
