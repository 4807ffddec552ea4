"""A kernel compiled for a GPU, which takes no GPU: what the compiler does to a process can be seen anywhere."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


@triton.jit
def _add_one_kernel(values_ptr, num_values, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    values = tl.load(values_ptr + place, mask=place < num_values)
    tl.store(values_ptr + place, values + 1, mask=place < num_values)


def compile_one() -> None:
    """Compile a kernel. Not where TRITON_INTERPRET is set. From a cache if there is one."""
    signature = {"values_ptr": "*fp32", "num_values": "i32", "TILE": "constexpr"}
    triton.compile(ASTSource(_add_one_kernel, signature=signature, constexprs={"TILE": 128}), target=HOPPER)
