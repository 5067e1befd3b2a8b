"""What NCCL reduces, and with which types: gloo does the sum, and what gloo does not know is done around it.

The table is NCCL's with torch's own limits around it (torch/csrc/distributed/c10d/NCCLUtils.hpp and
ProcessGroupNCCL.cpp, nccl's src/enqueue.cc), in the words of both.
"""

import torch

from rehearse_gpu import GPUS
from rehearse_gpu.devices import NCCL

Tensor = torch.Tensor
WHOLE = {torch.int8, torch.uint8, torch.int32, torch.int64}
PARTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
EIGHT_BITS = {getattr(torch, name, None) for name in ("float8_e4m3fn", "float8_e5m2")} - {None}
"""Floats of 8 bits that NCCL adds, on GPUs of 9.0 and later."""
BYTES = {getattr(torch, f"float8_{name}", None) for name in ("e4m3fnuz", "e5m2fnuz", "e8m0fnu")} - {None}
"""Those that it only carries."""
_KNOWN = WHOLE | PARTED | EIGHT_BITS | BYTES | {torch.bool}
_NAMES = {
    "int16": "Short",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    **{f"uint{bits}": f"UInt{bits}" for bits in (16, 32, 64)},
}
"""Torch's names of other types in its C++."""


def refuse_type(dtype):
    """Refuse a type that NCCL does not carry."""
    if dtype not in _KNOWN:
        name = str(dtype).removeprefix("torch.")
        raise TypeError(
            f"Input tensor data type is not supported for NCCL process group: {_NAMES.get(name, name)}"
        )


def as_bytes(tensor):
    """A tensor of floats of 8 bits as gloo carries it; all others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in EIGHT_BITS | BYTES else tensor


class Reduction:
    """A reduction that NCCL does: gloo's `op`, what is done to a tensor before it, to the result after it.

    `is_later`: something is done after it.
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
            self._factor, self._ranks = (None, ranks) if dtype in WHOLE else (1 / ranks, None)
        elif dtype == torch.bool and kind == operations.SUM:
            self.op = operations.MAX
        self._is_other = self._dtype != dtype
        self.is_later = self._is_other or self._ranks is not None

    @torch.no_grad()
    def before(self, tensor, keeps):
        """What gloo reduces for a tensor: the tensor itself, or another one where that `keeps` its values."""
        sent = tensor.to(self._dtype) if self._is_other else tensor
        if self._factor is None:
            return sent.clone() if keeps and sent is tensor else sent
        return sent * self._scale() if keeps else sent.mul_(self._scale())

    def result(self, tensor):
        """What gloo writes to for a tensor that gets the result, each time that one waits for it."""
        return torch.empty_like(tensor, dtype=self._dtype) if self.is_later else tensor

    @torch.no_grad()
    def after(self, tensor, sent):
        """Bring what gloo has made of `sent` to the tensor where NCCL leaves its result."""
        if self._ranks is not None:  # a sum of its type, then divided toward zero
            sent.div_(self._ranks, rounding_mode="trunc")
        if sent is not tensor:
            tensor.copy_(sent)

    def _scale(self):
        """The factor as NCCL has it, in the type of the tensors."""
        return torch.as_tensor(self._factor, dtype=self._dtype, device="cpu").reshape(())


def real_type(dtype):
    """The type that a complex number consists of; torch gives NCCL the numbers as two."""
    return torch.empty(0, dtype=dtype, device="cpu").real.dtype if dtype.is_complex else dtype


def _refuse(distributed, kind, dtype):
    operations, name = distributed.ReduceOp, getattr(kind, "name", kind)
    if dtype in BYTES:
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
    if kind == operations.PREMUL_SUM and dtype not in PARTED:
        raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")
    if kind in (operations.BAND, operations.BOR, operations.BXOR):
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
