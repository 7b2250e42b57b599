"""A kernel writes where no memory is. The driver ends this process's context and nobody else's."""

import torch
from moment import fault, guilty
from training import steps_on_gpu

SOURCE = 'extern "C" __global__ void wild(float* x) { *(volatile float*)(x + (1ull << 40)) = 1.0f; }'

for step in steps_on_gpu():
    if guilty(step, rank=0):
        wild = torch.cuda._compile_kernel(SOURCE, "wild")  # NVRTC, in torch since 2.9
        numbers = torch.zeros(4, device="cuda")
        fault()
        wild(grid=(1, 1, 1), block=(1, 1, 1), args=(numbers,))
        torch.cuda.synchronize()
