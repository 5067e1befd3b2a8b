"""The pages shown before a launch (plan, settings, offers, quota), and the question that asks for consent."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from awsddp.cli.command_line import with_global_options
from awsddp.cli.screen import Screen
from awsddp.cli.table import line, table, width, wrap_lines
from awsddp.errors import UsageError
from awsddp.model.records import format_node_numbers
from awsddp.settings.loader import EXCLUSIVE_KEYS
from awsddp.settings.spec import ClusterSpec, Value
from awsddp.util.formatting import counted, duration, files_text, money

if TYPE_CHECKING:
    from awsddp.model.documents import OffersDocument, QuotaDocument
    from awsddp.model.records import Choice
    from awsddp.plan.records import Data, ImageDocument, LaunchPlan, Step

_PRICE_KEYS = EXCLUSIVE_KEYS | {"cluster.max_price_usd", "cluster.budget_usd"}
"""Keys that determine or limit the price."""
_MAX_FACT_LINES, _MAX_WARNING_LINES = 8, 12
"""The maximum numbers of lines for facts and for warnings on a launch page. These limits keep the question on
line 24 or above."""
_QUOTA_CODE = re.compile(r", L-[0-9A-F]{8}")
_INFORMATIONAL = re.compile(
    r"GPUs are |prices are list |the budget of |skipped: |spot nodes |a newer image |"
    r"\S+ is (bare metal|deprecated)"
)
"""Matches the beginning of a warning that needs no decision by the user."""


def plan_page(plan: "LaunchPlan", *, verbose: bool = False, stderr: bool = False) -> None:
    """Show a plan: instances, price, image, zones, resources, fallbacks, other choices, warnings.

    If `verbose`, the placement, EFA, the data transfer price and the quota code are shown too.
    """
    unchanged = ["none: the cluster is as requested, nothing would change"] if plan.exists else []
    no_cidrs = "nowhere: no port is open"
    if not plan.has_request("CreateSecurityGroup"):
        no_cidrs = "what your security group allows"
    through = f", through {plan.jump}" if plan.jump else ""
    egress = f"; data transfer out {money(plan.egress_usd_per_gb)} per GB"
    efa = f"{plan.efa.count}/{plan.efa.most} interfaces: {plan.efa.why}"
    rows = [
        ("cluster", f"{plan.cluster} on {plan.target}, {plan.region}"),
        ("nodes", f"{plan.nodes} x {plan.instance_type}, {plan.market} ({plan.why})"),
        ("price", _price_text(plan) + egress * verbose),
        ("budget", str(plan.budget or "")),
        ("expires", f"after {duration(plan.expires_s)}, automatically"),
        *(("" if index else "steps", str(step)) for index, step in enumerate(plan.steps or unchanged)),
        ("per node", _node_text(plan)),
        ("image", _image_text(plan.image.shown, verbose=verbose)),
        ("zones", ", ".join(plan.zones)),
        ("fallbacks", "; ".join(map(_fallback_text, plan.alternatives))),
        ("data", "; ".join(map(_data_text, plan.data))),
        ("address", f"{plan.address}{through}; SSH from {', '.join(plan.ssh_cidrs) or no_cidrs}"),
        ("creates", ", ".join(plan.makes)),
        ("uses", ", ".join(f"{resource} {name}" for resource, name in plan.uses.items())),
        ("quota", plan.quota if verbose else _QUOTA_CODE.sub("", plan.quota)),
        ("placement", plan.placement_why if verbose else ""),
        ("EFA", efa if verbose or plan.efa.count else ""),
    ]
    table(("", ""), [row for row in rows if row[1]], stderr=stderr)
    if plan.choices:
        line("other choices:", stderr=stderr)
        _choices(plan.choices, plan.region, stderr=stderr)
    line(*(f"warning: {warning}" for warning in plan.warnings), stderr=stderr)


def launch_page(plan: "LaunchPlan", idle: str) -> None:
    """Before asking for consent, show a launch on stderr: the facts, then warnings that need a decision."""
    columns = width(stderr=True) or sys.maxsize
    facts = [f"{label:<9}{text}" if label else text for label, text in _facts(plan, idle) if text]
    if len(facts) > _MAX_FACT_LINES:
        facts[_MAX_FACT_LINES - 1 :] = [f"and {len(facts) - _MAX_FACT_LINES + 1} more"]
    line(*(text if len(text) <= columns else f"{text[: columns - 1]}…" for text in facts), stderr=True)
    warnings = [f"warning: {text}" for text in plan.warnings if not _INFORMATIONAL.match(text)]
    warning_lines = [row for warning in warnings for row in wrap_lines(warning, columns=columns)]
    line(*warning_lines[:_MAX_WARNING_LINES], f"details: {with_global_options('awsddp plan')}", stderr=True)


def _facts(plan: "LaunchPlan", idle: str) -> list[tuple[str, str]]:
    """Return the facts about a launch as (heading, text) pairs."""
    kind, price = plan.kind, money(plan.price_usd_per_hour)
    expires = duration(plan.expires_s).removesuffix(" 0 min")
    gpus = f"{kind.gpus} {kind.gpu_shown} each" if kind.gpus else "no GPU"
    idle = "" if plan.exists or idle == "off" else f"when idle for {idle}, or "
    ends = "ends", f"{idle}after {expires}"
    steps = [("changes", text) for text in _step_lines(plan.steps)]
    if plan.target == "local":
        off = "; GPUs are off" if plan.pretended and not plan.image.rehearses else ""
        nodes = f"{counted(plan.nodes, 'node')} on this machine (rehearsed as {kind.name}, {gpus}{off})"
        free = f"free; on EC2 it would be {price}{' per hour' * (plan.price.total is not None)}"
        return [("", nodes), ("price", free), *steps, ends]
    max_cost, why = money(plan.price_until_expiry_usd), f"expires after {expires}"
    if plan.budget is not None and plan.budget.lasts_s <= plan.expires_s + 1:
        max_cost, why = money(plan.budget.usd), "then the nodes end"
    list_date = f" (list {plan.price.date})" * plan.has_list_price
    prices = [fallback.price_usd_per_hour or 0.0 for fallback in plan.alternatives]
    image = plan.image.shown
    versions = (("torch", image.torch), ("CUDA", image.cuda))
    version_text = "".join(f"{name} {version}, " for name, version in versions if version)
    return [
        ("", f"{plan.nodes} x {kind.name} ({gpus}), {plan.market}, in {plan.region}: cluster {plan.cluster}"),
        (
            "price",
            "unknown"
            if plan.price.total is None
            else f"{price} per hour{list_date}, at most {max_cost}: {why}",
        ),
        *steps,
        ("or", f"{counted(len(prices), 'fallback')}, up to {money(max(prices))} per hour" if prices else ""),
        ends,
        ("image", f"{version_text}{image.name}"),
        ("creates", ", ".join(plan.makes)),
    ]


def _step_lines(steps: "Sequence[Step]") -> list[str]:
    """Return the steps as lines, with terminations first.

    Steps with the same action and reason share a line.
    """
    groups: dict[tuple[str, str], list[Step]] = {}
    for step in sorted(steps, key=lambda step: step.do != "end"):
        groups.setdefault((step.do, step.why), []).append(step)
    texts = []
    for (do, why), group in groups.items():
        numbers = format_node_numbers(number for step in group for number in step.numbers)
        texts.append(str(group[0]) if len(group) == 1 else f"{do} nodes {numbers}: {why}")
    return texts


def _node_text(plan: "LaunchPlan") -> str:
    kind = plan.kind
    gpus = f"{kind.gpus} x {kind.gpu_shown} ({kind.memory_gb:g} GiB)" if kind.gpus else "no GPU"
    network = f", {kind.network} Gbit/s" if kind.network else ""
    return f"{gpus}, {kind.vcpus} vCPUs, {kind.ram_gb:g} GiB{network}, {plan.disk_gb} GB disk"


def _image_text(image: "ImageDocument", *, verbose: bool) -> str:
    versions = (("torch", image.torch), ("CUDA", image.cuda), ("driver", image.driver))
    version_text = ", ".join(f"{name} {version}" for name, version in versions if version)
    owner = f", owner {image.owner}" if image.owner else ""
    details = f" ({image.id}, {image.created[:10]}{owner})" * verbose
    return f"{image.name}{details}{f'; {version_text}' * bool(version_text)}"


def _data_text(data: "Data") -> str:
    if data.bytes is None or data.files is None:
        return f"{data.name}: {data.source}"
    size = "at least " * data.at_least + files_text(data.files, data.bytes)
    return f"{data.name}: {size} from {data.source}"


def _fallback_text(fallback: "LaunchPlan") -> str:
    price = money(fallback.price_usd_per_hour)
    return f"{fallback.instance_type} {fallback.market} in {fallback.region} at {price} per hour"


def _price_text(plan: "LaunchPlan") -> str:
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
    """Show instance types, with a column for spot prices if any are known."""
    spot_prices = [getattr(choice, "spot_usd_per_hour", None) for choice in choices]
    has_spot = spot_prices.count(None) < len(spot_prices)
    rows = [
        (
            *(choice.instance_type, f"{choice.gpus_per_node} x {choice.gpu}"),
            money(choice.price_usd_per_hour),
            {True: "sufficient", False: "too small", None: "unknown"}[choice.fits_quota],
            ", ".join(zone.removeprefix(region) for zone in choice.zones),
            *[money(spot_price)] * has_spot,
        )
        for choice, spot_price in zip(choices, spot_prices, strict=True)
    ]
    headings = ("type", "gpus", "per node-hour", "quota", f"zones of {region}", *["spot"] * has_spot)
    table(headings, rows, stderr=stderr)


def settings_page(settings: "list[tuple[str, Value, str]]") -> None:
    """Show each setting with its value and its source."""
    rows = [(key, json.dumps(value, ensure_ascii=False), source) for key, value, source in settings]
    table(("setting", "value", "from"), rows)


def offers_page(document: "OffersDocument") -> None:
    """Show every GPU type offered in the region."""
    nodes = counted(document.nodes, "node")
    line(f"{document.region}, {document.price_source}, {document.price_date}; quota for {nodes}:")
    _choices(document.offers, document.region)
    types_by_date: dict[str, list[str]] = {}
    for offer in document.offers:
        if offer.price_usd_per_hour is not None and offer.price_date != document.price_date:
            types_by_date.setdefault(offer.price_date, []).append(offer.instance_type)
    line(*(f"list price of {date}: {', '.join(names)}" for date, names in sorted(types_by_date.items())))


def quota_page(quota: "QuotaDocument") -> None:
    """Show the quota request, or say that none is needed."""
    name = f"{quota.name} ({quota.quota}) in {quota.region}"
    if quota.request is None:
        line(f"No request needed: {name} allows {quota.have:g} vCPUs, and {quota.need} are needed.")
        return
    line(f"Requested {quota.need} vCPUs of {name}: request {quota.request}. AWS answers by email.")


def launch_question(show: Screen, spec: ClusterSpec) -> Callable[["LaunchPlan | str"], None]:
    """Return a function that asks for consent to a plan, or to a change that a text describes.

    With -y the function does not ask, but raises UsageError if the user gave neither a type nor a limit,
    because -y is not consent to every price. In the local cloud, where launches are free, the function asks
    only before nodes are terminated.
    """

    def ask(plan: "LaunchPlan | str") -> None:
        if isinstance(plan, str):
            show.question("", "nothing was changed")(f"{plan}Do this?")
            return
        is_free = plan.target == "local" and not any(step.do == "end" for step in plan.steps)
        has_price_limit = plan.target == "local" or plan.steps or spec.explicit & _PRICE_KEYS
        if show.options.yes and not has_price_limit:
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
        "no instance type, no GPUs and no limit were given",
        f"--instance-type {plan.instance_type}   # if that is what you want\n"
        "--budget USD   # or a limit on the cost of the nodes",
    )
