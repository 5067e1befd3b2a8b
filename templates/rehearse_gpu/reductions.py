"""NCCL's reductions and data types on gloo, with conversions for those that gloo does not support.

The types and the error texts come from NCCL and from torch's checks before calls to NCCL
(torch/csrc/distributed/c10d/NCCLUtils.hpp and ProcessGroupNCCL.cpp, nccl's src/enqueue.cc).
"""

import torch

from rehearse_gpu import GPUS
from rehearse_gpu.devices import NCCL

Tensor = torch.Tensor
INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
EIGHT_BITS = {getattr(torch, name, None) for name in ("float8_e4m3fn", "float8_e5m2")} - {None}
"""8-bit floats that NCCL reduces on GPUs with capability 9.0 or later."""
TRANSFER_ONLY = {getattr(torch, f"float8_{name}", None) for name in ("e4m3fnuz", "e5m2fnuz", "e8m0fnu")} - {
    None
}
"""8-bit floats that NCCL transfers but does not reduce."""
_SUPPORTED = INTEGERS | FLOATS | EIGHT_BITS | TRANSFER_ONLY | {torch.bool}
_NAMES = {
    "int16": "Short",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    **{f"uint{bits}": f"UInt{bits}" for bits in (16, 32, 64)},
}
"""The names of unsupported types in torch's C++ code."""


def refuse_type(dtype):
    """Raise TypeError for a type that NCCL does not transfer."""
    if dtype not in _SUPPORTED:
        name = str(dtype).removeprefix("torch.")
        raise TypeError(
            f"Input tensor data type is not supported for NCCL process group: {_NAMES.get(name, name)}"
        )


def as_bytes(tensor):
    """Return 8-bit floats, which gloo does not support, as a view of bytes, and other tensors unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype in EIGHT_BITS | TRANSFER_ONLY else tensor


class Reduction:
    """An NCCL reduction on gloo: `op` is gloo's operation, and tensors are converted before and after it.

    If `is_later` is True, `after` must be called when gloo's operation has ended.
    """

    def __init__(self, distributed, op, dtype, ranks):
        operations = distributed.ReduceOp
        kind = getattr(op, "op", op)
        _refuse(distributed, kind, dtype)
        self.op, self._factor, self._ranks = kind, None, None
        self._dtype = torch.float16 if dtype in EIGHT_BITS else dtype
        if kind == operations.PREMUL_SUM:
            self.op, self._factor = operations.SUM, op.__getstate__()[1]
        elif kind == operations.AVG:
            self.op = operations.SUM
            self._factor, self._ranks = (None, ranks) if dtype in INTEGERS else (1 / ranks, None)
        elif dtype == torch.bool and kind == operations.SUM:
            self.op = operations.MAX
        self._is_converted = self._dtype != dtype
        self.is_later = self._is_converted or self._ranks is not None

    @torch.no_grad()
    def before(self, tensor, keeps):
        """Return the tensor that gloo reduces: `tensor` or a copy. If `keeps` is True, `tensor` is not
        changed."""
        sent = tensor.to(self._dtype) if self._is_converted else tensor
        if self._factor is None:
            return sent.clone() if keeps and sent is tensor else sent
        return sent * self._scale() if keeps else sent.mul_(self._scale())

    def result(self, tensor):
        """Return the tensor that gloo should write to in place of the output `tensor`."""
        return torch.empty_like(tensor, dtype=self._dtype) if self.is_later else tensor

    @torch.no_grad()
    def after(self, tensor, sent):
        """Convert the result in `sent`, which gloo wrote, and write it to `tensor`."""
        if self._ranks is not None:  # NCCL sums integers, then divides and rounds toward zero
            sent.div_(self._ranks, rounding_mode="trunc")
        if sent is not tensor:
            tensor.copy_(sent)

    def _scale(self):
        """Return the factor, converted to the tensors' type as in NCCL."""
        return torch.as_tensor(self._factor, dtype=self._dtype, device="cpu").reshape(())


def real_type(dtype):
    """Return the real type in which torch passes a complex type to NCCL; return other types unchanged."""
    return torch.empty(0, dtype=dtype, device="cpu").real.dtype if dtype.is_complex else dtype


def _refuse(distributed, kind, dtype):
    operations, name = distributed.ReduceOp, getattr(kind, "name", kind)
    if dtype in TRANSFER_ONLY:
        raise RuntimeError("Unsupported Float8 type for NCCL reduction")
    refuse_type(dtype)
    if dtype in EIGHT_BITS and GPUS.capability < (9, 0):
        raise distributed.DistBackendError(
            f"NCCL error: invalid argument, NCCL version {'.'.join(map(str, NCCL))}\n"
            "ncclInvalidArgument: Invalid value for an argument.\n"
            "Last error:\nFP8 reduction support begins with sm90 capable devices."
        )
    if kind == operations.AVG and dtype == torch.bool:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if kind == operations.PREMUL_SUM and dtype not in FLOATS:
        raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")
    if kind in (operations.BAND, operations.BOR, operations.BXOR):
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
