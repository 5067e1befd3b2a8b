"""Simulated reductions give the results of NCCL, and its errors for what it refuses.

The table is NCCL's, with torch's limits: sums of integers wrap in their type, averages are truncated
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
FRACTIONS = [[1.5, -2, 4], [0.5, 3, 4], [4, 2, 2]]
COMPLEX = [[1, -2, 4], [2, 3, 4], [3, 2, 4]]
BOOLEANS = [[True, False, False], [True, True, False], [False, False, False]]
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
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), (FRACTIONS, FLOATS)),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2"),
        (FRACTIONS, {name: values for name, values in FLOATS.items() if name != "PREMUL_SUM"}),
    ),
    "bool": (
        BOOLEANS,
        {"SUM": [1, 1, 0], "PRODUCT": [0, 0, 0], "MIN": [0, 0, 0], "MAX": [1, 1, 0]},
    ),
    "complex64": (COMPLEX, {"SUM": [6, 3, 12], "AVG": [2, 1, 4], "PREMUL_SUM": [12, 6, 24]}),
    **dict.fromkeys(("int16", "uint16", "uint32", "uint64", "float8_e5m2fnuz"), (UNSIGNED, {})),
}
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR")
CALLS = (
    *("all_reduce", "all_reduce, async", "all_reduce_coalesced", "all_reduce, together", "reduce"),
    *("reduce_scatter", "reduce_scatter, async", "reduce_scatter_single", "reduce_scatter_single, async"),
    "reduce_scatter_single, together",
)
SCATTERED = [call for call in CALLS if call.startswith("reduce_scatter")]
NCCL_TYPE = "TypeError: Input tensor data type is not supported for NCCL process group: "
ERRORS = {
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
table, operations, calls = json.loads(sys.argv[1])
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
same = lambda left, right: left.tolist() == right.tolist()

def reduced(call, op, tensor):
    function, _, mode = call.partition(", ")
    if function == "all_reduce_coalesced":
        dist.all_reduce_coalesced([tensor], op)
    elif mode == "together" and function == "all_reduce":
        with dist._coalescing_manager():
            dist.all_reduce(tensor, op)
    elif function == "all_reduce":
        work = dist.all_reduce(tensor, op, async_op=mode == "async")
        work and work.wait()
    elif function == "reduce":
        before = tensor.clone()
        dist.reduce(tensor, 1, op)
        assert rank == 1 or same(before, tensor), "the input of another rank"
        dist.broadcast(tensor, 1)
    else:
        before, into = tensor.clone(), tensor.new_empty(1)
        if mode == "together":
            with dist._coalescing_manager(async_ops=True) as work:
                scatter(into, tensor, op)
        elif function == "reduce_scatter":
            work = dist.reduce_scatter(into, list(tensor.split(1)), op, async_op=mode == "async")
        else:
            work = scatter(into, tensor, op, async_op=mode == "async")
        work and work.wait()
        assert same(before, tensor), "the input"
        parts = [torch.empty_like(into) for _ in range(ranks)]
        dist.all_gather(parts, into)
        tensor = torch.cat(parts)
    assert tensor.is_cuda
    return [value.real if isinstance(value, complex) else value for value in tensor.tolist()]

results = {}
for dtype, values in table.items():
    for name in operations:
        op = dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
        for call in calls:
            tensor = torch.tensor(values[rank], dtype=torch.float64).to(getattr(torch, dtype)).cuda()
            try:
                results[f"{dtype} {name} {call}"] = reduced(call, op, tensor)
            except Exception as error:
                results[f"{dtype} {name} {call}"] = f"{type(error).__name__}: {error}"
weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
dist.all_reduce(weight, dist.ReduceOp.AVG)
results["a parameter"] = weight.tolist()
future = dist.all_reduce(mean := torch.full((2,), rank).cuda(), dist.ReduceOp.AVG, async_op=True).get_future()
results["a future"] = [future.then(lambda done: done.value()[0].tolist()).wait(), mean.tolist()]
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(results))
"""


@pytest.fixture(scope="module", params=["p5.48xlarge", pytest.param("g6.48xlarge", marks=pytest.mark.prove)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of three ranks by type, operation and call, on the GPUs of an instance type."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("node")
    image.install_rehearsal(folder, request.param)
    (folder / "script.py").write_text((folder / "rehearse_gpu.pth").read_text() + SCRIPT)
    argument = json.dumps([{dtype: values for dtype, (values, _) in TABLE.items()}, OPERATIONS, CALLS])
    result = subprocess.run(
        [sys.executable, "script.py", argument],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return {"type": request.param, **json.loads(result.stdout)}


def get_error(dtype: str, name: str, call: str, instance_type: str) -> str:
    """Return the start of torch's error if NCCL does not support this reduction, otherwise ""."""
    if dtype.startswith("float8") and instance_type.startswith("g6") and "fnuz" not in dtype:
        return "DistBackendError: NCCL error: invalid argument"
    if dtype == "complex64" and call in SCATTERED:
        return f"{NCCL_TYPE}ComplexFloat"
    if dtype == "complex64" and name in ("PRODUCT", "MIN", "MAX"):
        return (
            "RuntimeError: reduce does not" if call == "reduce" else "ValueError: all_reduce does not support"
        )
    if name in TABLE[dtype][1]:
        return ""
    keys = (dtype, ""), (dtype, name), ("", name)
    return next(ERRORS[key] for key in keys if key in ERRORS)


@pytest.mark.parametrize("dtype", TABLE)
def test_every_operation_gives_the_result_or_the_error_of_nccl(results: dict[str, Any], dtype: str) -> None:
    for name in OPERATIONS:
        for call in CALLS:
            result = results[f"{dtype} {name} {call}"]
            if error := get_error(dtype, name, call, results["type"]):
                assert str(result).startswith(error), (name, call, result)
                continue
            is_exact = name != "AVG" or dtype in ("int8", "int32", "int64", "uint8")
            expected = TABLE[dtype][1][name]
            assert result == (expected if is_exact else pytest.approx(expected, rel=0.06)), (name, call)


def test_parameter_and_future_are_averaged(results: dict[str, Any]) -> None:
    assert results["a parameter"] == pytest.approx([1, 1], rel=1e-6)
    assert results["a future"] == [[1, 1], [1, 1]]
