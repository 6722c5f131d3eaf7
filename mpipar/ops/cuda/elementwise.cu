// Maps over items or over rows of evenly spaced items (`step` items apart), and sums
// over columns. Blocks take every gridDim.x-th row.

template <class From, class To>
__global__ void cast(int64 size, const From* x, To* y) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += stride)
        put(y[i], wide(x[i]));
}

// grad += x, rounded once.
template <class C, class G> __global__ void add_to(int64 size, G* grad, const C* x) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += stride)
        put(grad[i], wide(grad[i]) + x[i]);
}

// y += bias + onto, either of which may be null.
template <class C>
__global__ void add_rows(int64 rows, int width, C* y, const C* bias, const C* onto,
                         int64 step) {
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x)
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            C sum = y[row * step + i];
            if (bias) sum += bias[i];
            if (onto) sum += onto[row * width + i];
            y[row * step + i] = sum;
        }
}

// y = x Φ(x) and its slope; Φ by tanh (Hendrycks & Gimpel 2016) or by erf.
template <class C, class S, bool by_tanh>
__global__ void gelu_fwd(int64 size, const C* x, S* y, S* slope) {
    const C root = C(0.70710678118654752), cubic = C(0.044715);
    const C scale = by_tanh ? C(0.79788456080286536) : C(0.39894228040143268);
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
         i += stride) {
        const C v = x[i];
        C phi, rise;
        if (by_tanh) {
            const C t = tanh(scale * (v + cubic * v * v * v));
            phi = C(0.5) * (1 + t);
            rise = C(0.5) * (1 - t * t) * scale * (1 + 3 * cubic * v * v);
        } else {
            phi = C(0.5) * (1 + erf(v * root));
            rise = scale * exp(C(-0.5) * v * v);
        }
        put(y[i], v * phi);
        put(slope[i], phi + v * rise);
    }
}

// dx = dy · slope; dx may be dy.
template <class C, class S>
__global__ void gelu_bwd(int64 size, const C* dy, const S* slope, S* dx) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += stride)
        put(dx[i], dy[i] * wide(slope[i]));
}

// y = gate σ(gate) · up.   Shazeer 2020
template <class C, class S>
__global__ void swiglu_fwd(int64 rows, int width, const C* gate, const C* up, S* y,
                           int64 gate_step, int64 up_step) {
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x)
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const C g = gate[row * gate_step + i];
            put(y[row * width + i], g / (1 + exp(-g)) * up[row * up_step + i]);
        }
}

// dgate = dy·up·σ(1 + gate(1−σ)), dup = dy·gate·σ.
template <class C, class D>
__global__ void swiglu_bwd(int64 rows, int width, const C* dy, const C* gate,
                           const C* up, D* dgate, D* dup, int64 gate_step,
                           int64 up_step, int64 dgate_step, int64 dup_step) {
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x)
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const C d = dy[row * width + i], g = gate[row * gate_step + i];
            const C u = up[row * up_step + i], sigma = 1 / (1 + exp(-g));
            put(dgate[row * dgate_step + i], d * u * sigma * (1 + g * (1 - sigma)));
            put(dup[row * dup_step + i], d * g * sigma);
        }
}

// sums[chunk] = Σ of x over the rows of a chunk.   x (rows, width), sums (gridDim.y,
// width); blocks of 32 columns by 8 rows. Always in the same order.
template <class From, class C>
__global__ void column_sums(int64 rows, int width, const From* x, C* sums,
                            int64 chunk) {
    __shared__ C part[8][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    const int64 first = blockIdx.y * chunk;
    const int64 last = first + chunk < rows ? first + chunk : rows;
    C sum = 0;
    if (column < width)
        for (int64 row = first + threadIdx.y; row < last; row += 8)
            sum += wide(x[row * width + column]);
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= width) return;
    for (int i = 1; i < 8; ++i) sum += part[i][threadIdx.x];
    sums[int64(blockIdx.y) * width + column] = sum;
}
