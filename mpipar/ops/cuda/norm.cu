// LayerNorm (centred) and RMSNorm over rows of `width` items. W is the type of gains and
// biases.

// y = (x − μ)·r·gain + bias, r = 1/√(var + eps).   The row waits in shared memory (width
// items). mean and bias are not read unless centred.
// Moves x once and y once: 4 + 2 bytes an item in mixed precision, which is the least.
template <class C, class S, class W, bool centred>
__global__ void norm_fwd(int width, int64 rows, const C* x, const W* gain,
                         const W* bias, S* y, C* mean, C* rstd, C eps) {
    DYNAMIC_SHARED(C, kept);
    const int lanes = ITEMS<C>;
    const int64 number = own_row(), at = number * width;
    if (number >= rows) return;
    C* row = kept + threadIdx.y * width;
    x += at, y += at;
    const int phase = phase_of<lanes>(x, y, gain, bias, row);
    C mu = 0, sum = 0;
    for_row<lanes>(width, phase, [&](int i, auto n) {
        const auto items = load(x + i, n);
        for (int k = 0; k < n; ++k) sum += items[k];
        keep(row + i, items);
    });
    if (centred) mu = row_reduce<Add>(sum) / width;
    sum = 0;
    for_row<lanes>(width, phase, [&](int i, auto n) {
        const auto items = load(row + i, n);
        for (int k = 0; k < n; ++k) sum += (items[k] - mu) * (items[k] - mu);
    });
    const C r = 1 / sqrt(row_reduce<Add>(sum) / width + eps);
    if (threadIdx.x == 0) {
        rstd[number] = r;
        if (centred) mean[number] = mu;
    }
    for_row<lanes>(width, phase, [&](int i, auto n) {
        const auto items = load(row + i, n);
        const auto factors = load(gain + i, n);
        Vector<S, n> made;
        if (centred) {
            const auto shifts = load(bias + i, n);
            for (int k = 0; k < n; ++k)
                put(made[k], (items[k] - mu) * r * wide(factors[k]) + wide(shifts[k]));
        } else {
            for (int k = 0; k < n; ++k) put(made[k], items[k] * r * wide(factors[k]));
        }
        save(y + i, made);
    });
}

// dx = r(dŷ − mean(dŷ) − x̂·mean(dŷ·x̂)) + onto, dŷ = dy·gain.   A block takes every
// gridDim.x-th row and sums dgain and, if centred, dbias over them in shared memory, a
// row each; two more rows keep dŷ and x̂ if `keeps`, else dy and x are read again.
// dgains, dbiases (gridDim.x, width). onto may be null. D is the type of dy.
// Moves dy, x, onto and dx once, 14 bytes an item with narrow dy, which is the least.
template <class D, class C, class W, bool centred>
__global__ void __launch_bounds__(512) norm_bwd(int width, int64 rows, const D* dy,
                                                const C* x, const C* mean,
                                                const C* rstd, const W* gain,
                                                const C* onto, C* dx, C* dgains,
                                                C* dbiases, int keeps) {
    DYNAMIC_SHARED(C, shared);
    const int lanes = ITEMS<C>;
    C *dgain = shared, *dbias = shared + width;
    C *kept = centred ? dbias + width : dbias, *hats = kept + width;
    // A thread sees the same columns of every row if all rows have the same phase: sums
    // need no barrier.
    const int phase =
        width % lanes ? -1 : phase_of<lanes>(dy, x, onto, dx, gain, shared);
    for_row<lanes>(width, phase, [&](int i, auto n) {
        for (int k = 0; k < n; ++k) {
            dgain[i + k] = 0;
            if (centred) dbias[i + k] = 0;
        }
    });
    for (int64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64 at = row * width;
        const C mu = centred ? mean[row] : C(0), r = rstd[row];
        C sums[2] = {0, 0};
        for_row<lanes>(width, phase, [&](int i, auto n) {
            const auto given = load(dy + at + i, n);
            auto own = load(x + at + i, n);
            const auto factors = load(gain + i, n);
            auto to_gain = load(dgain + i, n);
            Vector<C, n> scaled;
            for (int k = 0; k < n; ++k) {
                const C d = wide(given[k]);
                own[k] = (own[k] - mu) * r;
                scaled[k] = d * wide(factors[k]);
                sums[0] += scaled[k];
                sums[1] += scaled[k] * own[k];
                to_gain[k] += d * own[k];
            }
            keep(dgain + i, to_gain);
            if (centred) {
                auto to_bias = load(dbias + i, n);
                for (int k = 0; k < n; ++k) to_bias[k] += wide(given[k]);
                keep(dbias + i, to_bias);
            }
            if (keeps) {
                keep(kept + i, scaled);
                keep(hats + i, own);
            }
        });
        row_reduce<Add>(sums);
        const C c1 = centred ? sums[0] / width : C(0), c2 = sums[1] / width;
        for_row<lanes>(width, phase, [&](int i, auto n) {
            Vector<C, n> scaled, own;
            if (keeps) {
                scaled = load(kept + i, n);
                own = load(hats + i, n);
            } else {
                const auto given = load(dy + at + i, n);
                const auto factors = load(gain + i, n);
                own = load(x + at + i, n);
                for (int k = 0; k < n; ++k) {
                    own[k] = (own[k] - mu) * r;
                    scaled[k] = wide(given[k]) * wide(factors[k]);
                }
            }
            for (int k = 0; k < n; ++k) own[k] = (scaled[k] - c1 - own[k] * c2) * r;
            if (onto) {
                const auto more = load(onto + at + i, n);
                for (int k = 0; k < n; ++k) own[k] += more[k];
            }
            save(dx + at + i, own);
        });
    }
    const int64 at = int64(blockIdx.x) * width;
    for_row<lanes>(width, phase, [&](int i, auto n) {
        for (int k = 0; k < n; ++k) {
            dgains[at + i + k] = dgain[i + k];
            if (centred) dbiases[at + i + k] = dbias[i + k];
        }
    });
}
