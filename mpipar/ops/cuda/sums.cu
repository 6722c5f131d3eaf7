// Sums of what ranks bring.

// out = Σ rows in order, rounded once.   rows (count, size) → out (size)
template <class G, class O>
__global__ void sum_rows(int64 size, const G* rows, int count, O* out) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
         i += stride) {
        auto sum = wide(rows[i]);
        for (int row = 1; row < count; ++row) sum += wide(rows[row * size + i]);
        put(out[i], sum);
    }
}
