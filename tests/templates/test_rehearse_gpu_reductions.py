"""What NCCL reduces is reduced so where it is rehearsed, and what it refuses is refused in its words.

The table is NCCL's with torch's limits around it: sums of integers wrap in their type, averages are cut
toward zero, booleans are added as "or". Sources: nccl's src/enqueue.cc (hostToDevRedOp), and torch's
NCCLUtils.hpp and ProcessGroupNCCL.cpp.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from awsddp.local import image

RANKS = 3
SIGNED = [[7, -7, 100], [-3, -1, 100], [1, 0, 100]]
UNSIGNED = [[7, 0, 100], [200, 1, 100], [100, 0, 100]]
PARTED = [[1.5, -2, 4], [0.5, 3, 4], [4, 2, 2]]
COMPLEX = [[1, -2, 4], [2, 3, 4], [3, 2, 4]]
YES_NO = [[True, False, False], [True, True, False], [False, False, False]]
TRUNCATED: dict[str, list[Any]] = {
    "SUM": [5, -8, 300],
    "PRODUCT": [-21, 0, 1_000_000],
    "MIN": [-3, -7, 100],
    "MAX": [7, 0, 100],
    "AVG": [1, -2, 100],
}
FLOATS: dict[str, list[Any]] = {
    "SUM": [6, 3, 10],
    "PRODUCT": [3, -12, 32],
    "MIN": [0.5, -2, 2],
    "MAX": [4, 3, 4],
    "AVG": [2, 1, 10 / 3],
    "PREMUL_SUM": [12, 6, 20],
}
TABLE: dict[str, tuple[list[list[Any]], dict[str, list[Any]]]] = {
    "int32": (SIGNED, TRUNCATED),
    "int64": (SIGNED, TRUNCATED),
    "int8": (SIGNED, {**TRUNCATED, "SUM": [5, -8, 44], "PRODUCT": [-21, 0, 64], "AVG": [1, -2, 14]}),
    "uint8": (
        UNSIGNED,
        {
            "SUM": [51, 1, 44],
            "PRODUCT": [224, 0, 64],
            "MIN": [7, 0, 100],
            "MAX": [200, 1, 100],
            "AVG": [17, 0, 14],
        },
    ),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), (PARTED, FLOATS)),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2"),
        (PARTED, {name: values for name, values in FLOATS.items() if name != "PREMUL_SUM"}),
    ),
    "bool": (
        YES_NO,
        {"SUM": [1, 1, 0], "PRODUCT": [0, 0, 0], "MIN": [0, 0, 0], "MAX": [1, 1, 0]},
    ),
    "complex64": (COMPLEX, {"SUM": [6, 3, 12], "AVG": [2, 1, 4], "PREMUL_SUM": [12, 6, 24]}),
    **dict.fromkeys(("int16", "uint16", "uint32", "uint64", "float8_e5m2fnuz"), (UNSIGNED, {})),
}
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR")
WAYS = (
    *("all_reduce", "all_reduce, async", "all_reduce_coalesced", "all_reduce, together", "reduce"),
    *("reduce_scatter", "reduce_scatter, async", "reduce_scatter_single", "reduce_scatter_single, async"),
    "reduce_scatter_single, together",
)
SCATTERED = [one for one in WAYS if one.startswith("reduce_scatter")]
NCCL_TYPE = "TypeError: Input tensor data type is not supported for NCCL process group: "
REFUSED = {
    ("bool", "AVG"): "TypeError: Cannot use ReduceOp.AVG with boolean inputs",
    **{(dtype, ""): NCCL_TYPE + name for dtype, name in (("int16", "Short"), ("uint16", "UInt16"))},
    **{(dtype, ""): NCCL_TYPE + name for dtype, name in (("uint32", "UInt32"), ("uint64", "UInt64"))},
    ("float8_e5m2fnuz", ""): "RuntimeError: Unsupported Float8 type for NCCL reduction",
    ("", "PREMUL_SUM"): "TypeError: PreMulSum Data type must be half, float, bfloat16 or double",
    **{("", name): f"ValueError: Cannot use ReduceOp.{name} with NCCL" for name in ("BAND", "BOR", "BXOR")},
}

SCRIPT = """
import json, os, sys, warnings
import torch
import torch.distributed as dist
table, operations, ways = json.loads(sys.argv[1])
rank, ranks = 0, len(next(iter(table.values())))
for other in range(1, ranks):
    if rank == 0 and os.fork() == 0:
        rank = other
warnings.simplefilter("ignore")
torch.set_num_threads(1)
os.environ["RANK"] = str(rank)
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=ranks)
scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
same = lambda one, other: one.tolist() == other.tolist()

def reduced(way, op, own):
    call, _, how = way.partition(", ")
    if call == "all_reduce_coalesced":
        dist.all_reduce_coalesced([own], op)
    elif how == "together" and call == "all_reduce":
        with dist._coalescing_manager():
            dist.all_reduce(own, op)
    elif call == "all_reduce":
        work = dist.all_reduce(own, op, async_op=how == "async")
        work and work.wait()
    elif call == "reduce":
        before = own.clone()
        dist.reduce(own, 1, op)
        assert rank == 1 or same(before, own), "the input of another rank"
        dist.broadcast(own, 1)
    else:
        before, into = own.clone(), own.new_empty(1)
        if how == "together":
            with dist._coalescing_manager(async_ops=True) as work:
                scatter(into, own, op)
        elif call == "reduce_scatter":
            work = dist.reduce_scatter(into, list(own.split(1)), op, async_op=how == "async")
        else:
            work = scatter(into, own, op, async_op=how == "async")
        work and work.wait()
        assert same(before, own), "the input"
        parts = [torch.empty_like(into) for _ in range(ranks)]
        dist.all_gather(parts, into)
        own = torch.cat(parts)
    assert own.is_cuda
    return [one.real if isinstance(one, complex) else one for one in own.tolist()]

found = {}
for dtype, values in table.items():
    for name in operations:
        op = dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
        for way in ways:
            own = torch.tensor(values[rank], dtype=torch.float64).to(getattr(torch, dtype)).cuda()
            try:
                found[f"{dtype} {name} {way}"] = reduced(way, op, own)
            except Exception as error:
                found[f"{dtype} {name} {way}"] = f"{type(error).__name__}: {error}"
weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
dist.all_reduce(weight, dist.ReduceOp.AVG)
found["a parameter"] = weight.tolist()
future = dist.all_reduce(own := torch.full((2,), rank).cuda(), dist.ReduceOp.AVG, async_op=True).get_future()
found["a future"] = [future.then(lambda done: done.value()[0].tolist()).wait(), own.tolist()]
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["p5.48xlarge", pytest.param("g6.48xlarge", marks=pytest.mark.prove)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three ranks got, by type, operation and way, on GPUs of a type of instances."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("node")
    image.install_rehearsal(folder, request.param)
    (folder / "script.py").write_text((folder / "rehearse_gpu.pth").read_text() + SCRIPT)
    asked = json.dumps([{dtype: values for dtype, (values, _) in TABLE.items()}, OPERATIONS, WAYS])
    shown = subprocess.run(
        [sys.executable, "script.py", asked],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    return {"type": request.param, **json.loads(shown.stdout)}


def refusal(dtype: str, name: str, way: str, instance_type: str) -> str:
    """Return how torch's error begins where NCCL does not reduce this, "" where it does."""
    if dtype.startswith("float8") and instance_type.startswith("g6") and "fnuz" not in dtype:
        return "DistBackendError: NCCL error: invalid argument"
    if dtype == "complex64" and way in SCATTERED:
        return f"{NCCL_TYPE}ComplexFloat"
    if dtype == "complex64" and name in ("PRODUCT", "MIN", "MAX"):
        return (
            "RuntimeError: reduce does not" if way == "reduce" else "ValueError: all_reduce does not support"
        )
    if name in TABLE[dtype][1]:
        return ""
    known = (dtype, ""), (dtype, name), ("", name)
    return next(REFUSED[one] for one in known if one in REFUSED)


@pytest.mark.parametrize("dtype", TABLE)
def test_every_operation_gives_what_nccl_gives_or_is_refused_in_its_words(
    found: dict[str, Any], dtype: str
) -> None:
    for name in OPERATIONS:
        for way in WAYS:
            result = found[f"{dtype} {name} {way}"]
            if words := refusal(dtype, name, way, found["type"]):
                assert str(result).startswith(words), (name, way, result)
                continue
            exact = name != "AVG" or dtype in ("int8", "int32", "int64", "uint8")
            wanted = TABLE[dtype][1][name]
            assert result == (wanted if exact else pytest.approx(wanted, rel=0.06)), (name, way)


def test_a_parameter_and_a_future_are_averaged_too(found: dict[str, Any]) -> None:
    assert found["a parameter"] == pytest.approx([1, 1], rel=1e-6)
    assert found["a future"] == [[1, 1], [1, 1]]
