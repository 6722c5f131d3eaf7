// Cross-entropy over the columns that one rank holds. One block a token; logits
// (T, width) lie in rows of `width` items. A target outside of [0, width) is not here.

template <class C> __global__ void row_max(int width, const C* logits, C* peak) {
    const C* row = logits + int64(blockIdx.x) * width;
    C top = row[0];
    for (int i = threadIdx.x; i < width; i += blockDim.x) top = Max::join(top, row[i]);
    top = block_reduce<Max>(top);
    if (threadIdx.x == 0) peak[blockIdx.x] = top;
}

// logits ← e = exp(logits − peak); total = Σe; picked = logit[target] − peak, else 0.
template <class C>
__global__ void xent_fwd(int width, C* logits, const int64* local, const C* peak,
                         C* total, C* picked) {
    C* row = logits + int64(blockIdx.x) * width;
    const int64 target = local[blockIdx.x];
    const C top = peak[blockIdx.x];
    C sum = 0;
    if (threadIdx.x == 0)
        picked[blockIdx.x] = target >= 0 && target < width ? row[target] - top : C(0);
    __syncthreads();  // before the target's logit is overwritten
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        row[i] = exp(row[i] - top);
        sum += row[i];
    }
    sum = block_reduce<Add>(sum);
    if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

// dlogits = seed·(e/total − onehot); dlogits may be e.
template <class C, class S>
__global__ void xent_bwd(int width, const C* e, const C* total, const int64* local,
                         const C* seed, S* dlogits) {
    const int64 at = int64(blockIdx.x) * width, target = local[blockIdx.x];
    const C own = seed[blockIdx.x], factor = own / total[blockIdx.x];
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        put(dlogits[at + i], e[at + i] * factor - (i == target ? own : C(0)));
}
