// Flat buffers: the norm of gradients, AdamW.

// sums[block] = Σ x² in double, always in the same order. Not finite if and only if
// some x is not: squares of 16-bit and 32-bit numbers cannot overflow a double.
template <class G> __global__ void square_sums(int64 size, const G* x, double* sums) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    double sum = 0;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
         i += stride) {
        const double v = wide(x[i]);
        sum += v * v;
    }
    sum = block_reduce<Add>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Loshchilov & Hutter 2019, algorithm 2.   keep = 1 − lr·decay, rate = lr/(1 − β₁ᵗ),
// unbias = 1/√(1 − β₂ᵗ), new1 = 1 − β₁, new2 = 1 − β₂
template <class C, class G>
__global__ void adamw(int64 size, C* weight, const G* grad, C* m, C* v, C rate,
                      C unbias, C beta1, C new1, C beta2, C new2, C eps, C keep,
                      C scale) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
         i += stride) {
        const C g = wide(grad[i]) * scale;
        const C first = m[i] * beta1 + new1 * g;
        const C second = v[i] * beta2 + new2 * g * g;
        m[i] = first;
        v[i] = second;
        weight[i] = weight[i] * keep - rate * first / (sqrt(second) * unbias + eps);
    }
}
