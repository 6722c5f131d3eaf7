// Cross-entropy over the columns that one rank holds. Logits (T, width) lie in rows that
// begin every `step` items, of type L, the compute type or that of operands. A target
// outside of [0, width) is not here.

// peak = largest logit, total = Σ exp(logit − peak), picked = logit[target], else 0.
// Reads logits once: a sum is scaled down where a larger peak is found.
template <class L, class C>
__global__ void xent_fwd(int width, int64 rows, const L* logits, int64 step,
                         const int64* local, C* peak, C* total, C* picked) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= rows) return;
    const L* row = logits + number * step;
    C top = C(-3e38), sum = 0;
    for_row<lanes>(width, phase_of<lanes>(row), [&](int i, auto n) {
        const auto items = load(row + i, n);
        C higher = top, more = 0;
        for (int k = 0; k < n; ++k) higher = Max::join(higher, C(wide(items[k])));
        for (int k = 0; k < n; ++k) more += exp(wide(items[k]) - higher);
        sum = sum * exp(top - higher) + more;
        top = higher;
    });
    const C highest = row_reduce<Max>(top);
    sum = row_reduce<Add>(sum * exp(top - highest));
    if (threadIdx.x) return;
    const int64 target = local[number];
    peak[number] = highest;
    total[number] = sum;
    picked[number] = target >= 0 && target < width ? wide(row[target]) : C(0);
}

// Brings both to the peak over all ranks: total ·= exp(own − peak), picked −= peak.
template <class C>
__global__ void xent_merge(int64 size, int width, const C* own, const C* peak,
                           const int64* local, C* total, C* picked) {
    for_all<1>(size, -1, [&](int64 i, auto) {
        total[i] *= exp(own[i] - peak[i]);
        if (local[i] >= 0 && local[i] < width) picked[i] -= peak[i];
    });
}

// dlogits = seed·(exp(logit − peak)/total − onehot); dlogits may be the logits.
template <class L, class C, class S>
__global__ void xent_bwd(int width, int64 rows, const L* logits, int64 step,
                         const C* peak, const C* total, const int64* local,
                         const C* seed, S* dlogits, int64 made_step) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= rows) return;
    const int64 target = local[number];
    const L* row = logits + number * step;
    S* made = dlogits + number * made_step;
    const C own = seed[number], factor = own / total[number], top = peak[number];
    for_row<lanes>(width, phase_of<lanes>(row, made), [&](int i, auto n) {
        const auto items = load(row + i, n);
        Vector<S, n> to;
        for (int k = 0; k < n; ++k) {
            const C part = exp(wide(items[k]) - top) * factor;
            put(to[k], part - (i + k == target ? own : C(0)));
        }
        save(made + i, to);
    });
}

// sum = Σ log(total) − picked over tokens with a label, in double. One block.
template <class C>
__global__ void loss_sum(int64 size, const C* total, const C* picked,
                         const int64* labels, double* sum) {
    double own = 0;
    for_all<1>(size, -1, [&](int64 i, auto) {
        if (labels[i] >= 0) own += log(total[i]) - picked[i];
    });
    own = row_reduce<Add>(own);
    if (threadIdx.x == 0) *sum = own;
}
