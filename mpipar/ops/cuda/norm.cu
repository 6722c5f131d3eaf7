// LayerNorm (centred) and RMSNorm over rows of `width` items.

// y = (x − μ)·r·gain + bias, r = 1/√(var + eps).   One block a row; the row waits in
// shared memory (width items). mean and bias are not read unless centred.
template <class C, class S, bool centred>
__global__ void norm_fwd(int width, const C* x, const C* gain, const C* bias, S* y,
                         C* mean, C* rstd, C eps) {
    DYNAMIC_SHARED(C, row);
    const int64 at = int64(blockIdx.x) * width;
    C mu = 0, sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        row[i] = x[at + i];
        sum += row[i];
    }
    if (centred) mu = block_reduce<Add>(sum) / width;
    sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        row[i] -= mu;
        sum += row[i] * row[i];
    }
    const C r = 1 / sqrt(block_reduce<Add>(sum) / width + eps);
    if (threadIdx.x == 0) {
        rstd[blockIdx.x] = r;
        if (centred) mean[blockIdx.x] = mu;
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const C shift = centred ? bias[i] : C(0);
        put(y[at + i], row[i] * r * gain[i] + shift);
    }
}

// dx = r(dŷ − mean(dŷ) − x̂·mean(dŷ·x̂)) + onto, dŷ = dy·gain.   A block takes every
// gridDim.x-th row and sums dgain and dbias over them in shared memory (2·width items):
// dgains, dbiases (gridDim.x, width). onto may be null.
template <class C, bool centred>
__global__ void norm_bwd(int width, int64 rows, const C* dy, const C* x, const C* mean,
                         const C* rstd, const C* gain, const C* onto, C* dx, C* dgains,
                         C* dbiases) {
    DYNAMIC_SHARED(C, sums);
    C *dgain = sums, *dbias = sums + width;
    // A thread sees the same columns of every row: sums need no barrier.
    for (int i = threadIdx.x; i < width; i += blockDim.x) dgain[i] = dbias[i] = 0;
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64 at = row * width;
        const C mu = centred ? mean[row] : C(0), r = rstd[row];
        C c1 = 0, c2 = 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const C hat = (x[at + i] - mu) * r, d = dy[at + i];
            c1 += d * gain[i];
            c2 += d * gain[i] * hat;
            dgain[i] += d * hat;
            dbias[i] += d;
        }
        c1 = centred ? block_reduce<Add>(c1) / width : C(0);
        c2 = block_reduce<Add>(c2) / width;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const C hat = (x[at + i] - mu) * r;
            const C own = (dy[at + i] * gain[i] - c1 - hat * c2) * r;
            dx[at + i] = onto ? own + onto[at + i] : own;
        }
    }
    const int64 at = int64(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        dgains[at + i] = dgain[i];
        if (centred) dbiases[at + i] = dbias[i];
    }
}
