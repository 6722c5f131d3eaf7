// Maps over items or over rows of evenly spaced items (`step` items apart), and sums
// over columns. Blocks take every gridDim.x-th row.
//
// X is the type of what a product made: C, or S where it was made narrow. Each kernel
// reads and writes every array once.

template <class From, class To>
__global__ void cast(int64 size, const From* x, To* y) {
    const int lanes = ITEMS<decltype(wide(From()))>;
    for_all<lanes>(size, phase_of<lanes>(x, y), [&](int64 i, auto n) {
        const auto given = load(x + i, n);
        Vector<To, n> made;
        for (int k = 0; k < n; ++k) put(made[k], wide(given[k]));
        save(y + i, made);
    });
}

// grad += x, rounded once.
template <class C, class G> __global__ void add_to(int64 size, G* grad, const C* x) {
    const int lanes = ITEMS<C>;
    for_all<lanes>(size, phase_of<lanes>(grad, x), [&](int64 i, auto n) {
        auto sum = load(grad + i, n);
        const auto own = load(x + i, n);
        for (int k = 0; k < n; ++k) put(sum[k], wide(sum[k]) + own[k]);
        save(grad + i, sum);
    });
}

// y += bias + onto, either of which may be null.
template <class C, class W>
__global__ void add_rows(int64 rows, int width, C* y, const W* bias, const C* onto,
                         int64 step) {
    const int lanes = ITEMS<C>;
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x) {
        C* own = y + row * step;
        const C* other = onto ? onto + row * width : onto;
        const int phase = phase_of<lanes>(own, bias, other);
        for_row<lanes>(width, phase, [&](int i, auto n) {
            auto sum = load(own + i, n);
            if (bias) {
                const auto b = load(bias + i, n);
                for (int k = 0; k < n; ++k) sum[k] += wide(b[k]);
            }
            if (other) {
                const auto o = load(other + i, n);
                for (int k = 0; k < n; ++k) sum[k] += o[k];
            }
            save(own + i, sum);
        });
    }
}

// y = x Φ(x) and its slope; Φ by tanh (Hendrycks & Gimpel 2016) or by erf.
template <class X, class C, class S, bool by_tanh>
__global__ void gelu_fwd(int64 size, const X* x, S* y, S* slope) {
    const C root = C(0.70710678118654752), cubic = C(0.044715);
    const C scale = by_tanh ? C(0.79788456080286536) : C(0.39894228040143268);
    const int lanes = ITEMS<C>;
    for_all<lanes>(size, phase_of<lanes>(x, y, slope), [&](int64 i, auto n) {
        const auto given = load(x + i, n);
        Vector<S, n> value, rises;
        for (int k = 0; k < n; ++k) {
            const C v = wide(given[k]);
            C phi, rise;
            if (by_tanh) {
                const C t = tanh(scale * (v + cubic * v * v * v));
                phi = C(0.5) * (1 + t);
                rise = C(0.5) * (1 - t * t) * scale * (1 + 3 * cubic * v * v);
            } else {
                phi = C(0.5) * (1 + erf(v * root));
                rise = scale * exp(C(-0.5) * v * v);
            }
            put(value[k], v * phi);
            put(rises[k], phi + v * rise);
        }
        save(y + i, value);
        save(slope + i, rises);
    });
}

// dx = dy · slope; dx may be dy.
template <class X, class S>
__global__ void gelu_bwd(int64 size, const X* dy, const S* slope, S* dx) {
    const int lanes = ITEMS<decltype(wide(X()))>;
    for_all<lanes>(size, phase_of<lanes>(dy, slope, dx), [&](int64 i, auto n) {
        const auto d = load(dy + i, n);
        auto own = load(slope + i, n);
        for (int k = 0; k < n; ++k) put(own[k], wide(d[k]) * wide(own[k]));
        save(dx + i, own);
    });
}

// y = gate σ(gate) · up.   Shazeer 2020
template <class X, class C, class S>
__global__ void swiglu_fwd(int64 rows, int width, const X* gate, const X* up, S* y,
                           int64 gate_step, int64 up_step) {
    const int lanes = ITEMS<C>;
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *its_gate = gate + row * gate_step, *its_up = up + row * up_step;
        S* its_y = y + row * width;
        const int phase = phase_of<lanes>(its_gate, its_up, its_y);
        for_row<lanes>(width, phase, [&](int i, auto n) {
            const auto gates = load(its_gate + i, n), ups = load(its_up + i, n);
            Vector<S, n> made;
            for (int k = 0; k < n; ++k) {
                const C g = wide(gates[k]);
                put(made[k], g / (1 + exp(-g)) * wide(ups[k]));
            }
            save(its_y + i, made);
        });
    }
}

// dgate = dy·up·σ(1 + gate(1−σ)), dup = dy·gate·σ.   Y is the type of dy
template <class Y, class X, class C, class D>
__global__ void swiglu_bwd(int64 rows, int width, const Y* dy, const X* gate,
                           const X* up, D* dgate, D* dup, int64 gate_step,
                           int64 up_step, int64 dgate_step, int64 dup_step) {
    const int lanes = ITEMS<C>;
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *its_gate = gate + row * gate_step, *its_up = up + row * up_step;
        D *its_dgate = dgate + row * dgate_step, *its_dup = dup + row * dup_step;
        const Y* its_dy = dy + row * width;
        const int phase =
            phase_of<lanes>(its_dy, its_gate, its_up, its_dgate, its_dup);
        for_row<lanes>(width, phase, [&](int i, auto n) {
            const auto given = load(its_dy + i, n);
            const auto gates = load(its_gate + i, n), ups = load(its_up + i, n);
            Vector<D, n> to_gate, to_up;
            for (int k = 0; k < n; ++k) {
                const C d = wide(given[k]), g = wide(gates[k]), u = wide(ups[k]);
                const C sigma = 1 / (1 + exp(-g));
                put(to_gate[k], d * u * sigma * (1 + g * (1 - sigma)));
                put(to_up[k], d * g * sigma);
            }
            save(its_dgate + i, to_gate);
            save(its_dup + i, to_up);
        });
    }
}

// sums[chunk] = Σ of x over the rows of a chunk, always in the same order.   x (rows,
// width), sums (gridDim.y, width); blocks of 32 × 8 threads, each of n columns.
template <int n, class From, class C>
__device__ void sum_columns(int64 rows, int width, const From* x, C* sums,
                            int64 chunk) {
    __shared__ C part[8][32 * n];
    const int column = (blockIdx.x * 32 + threadIdx.x) * n;
    const int64 first = blockIdx.y * chunk;
    const int64 last = first + chunk < rows ? first + chunk : rows;
    C sum[n] = {};
    if (column < width)
        for (int64 row = first + threadIdx.y; row < last; row += 8) {
            const auto items = load(x + row * width + column, Count<n>());
            for (int k = 0; k < n; ++k) sum[k] += wide(items[k]);
        }
    for (int k = 0; k < n; ++k) part[threadIdx.y][threadIdx.x * n + k] = sum[k];
    __syncthreads();
    if (threadIdx.y || column >= width) return;
    Vector<C, n> total;
    for (int k = 0; k < n; ++k) {
        total[k] = sum[k];
        for (int i = 1; i < 8; ++i) total[k] += part[i][threadIdx.x * n + k];
    }
    save(sums + int64(blockIdx.y) * width + column, total);
}

// columns   of a thread, 1 or as many as one access moves
template <class From, class C>
__global__ void column_sums(int64 rows, int width, const From* x, C* sums, int64 chunk,
                            int columns) {
    if (columns == 1)
        sum_columns<1>(rows, width, x, sums, chunk);
    else
        sum_columns<ITEMS<C>>(rows, width, x, sums, chunk);
}

// grad += Σ of the rows of parts, rounded once, always in the same order; blockIdx.y
// tells which of both.   parts (gridDim.y, rows, width); blocks of 32 × 32 threads
template <class C, class G>
__global__ void __launch_bounds__(1024) add_column_sums(int rows, int width,
                                                        const C* parts, G* grad0,
                                                        G* grad1) {
    __shared__ C part[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    const C* own = parts + int64(blockIdx.y) * rows * width;
    C sum = 0;
    if (column < width) {
#pragma unroll 4
        for (int row = threadIdx.y; row < rows; row += 32)
            sum += own[int64(row) * width + column];
    }
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= width) return;
    for (int i = 1; i < 32; ++i) sum += part[i][threadIdx.x];
    G* grad = (blockIdx.y ? grad1 : grad0) + column;
    put(*grad, wide(*grad) + sum);
}
