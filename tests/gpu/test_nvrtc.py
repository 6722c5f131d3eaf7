"""Every kernel compiles for the GPUs in use and keeps to its registers."""

import pytest
from gpu.nvrtc import build, spilled
from gpu.precisions import every_name

from mpipar.ops.cuda.programs import OPTIONS, PROGRAMS, source


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_compile_and_do_not_spill(program, target):
    names = every_name(program)
    if program == "flash":
        # These take a second each: all of one type on one GPU, else the widest.
        wanted = "<bf16, " if target == "sm_90" else "<fp16, 128>"
        names = tuple(name for name in names if wanted in name)
    log = build(source(program), names, (*OPTIONS, f"-arch={target}"))
    assert spilled(log) == [0] * len(names), log


def test_a_kernel_that_does_not_compile_is_reported():
    with pytest.raises(ValueError, match="INFINITY"):
        text = "__global__ void k(float* x) { *x = INFINITY; }"
        build(text, (), (*OPTIONS, "-arch=sm_90"))


def test_spills_are_seen():
    text = """
    __global__ void __launch_bounds__(1024) k(const float* x, float* y) {
        float kept[128];
        #pragma unroll
        for (int i = 0; i < 128; ++i) kept[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 128; ++i) y[i * 1024 + threadIdx.x] = kept[127 - i];
    }"""
    log = build(text, ("k",), (*OPTIONS, "-arch=sm_90"))
    assert spilled(log)[0] > 0
