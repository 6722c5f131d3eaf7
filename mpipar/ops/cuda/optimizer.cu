// Flat buffers: the norm of gradients, AdamW.

// sums[block] = Σ x² in double, always in the same order. Not finite if and only if
// some x is not: squares of 16-bit and 32-bit numbers cannot overflow a double.
template <class G> __global__ void square_sums(int64 size, const G* x, double* sums) {
    const int lanes = ITEMS<G>;
    double sum = 0;
    for_all<lanes>(size, phase_of<lanes>(x), [&](int64 i, auto n) {
        const auto items = load(x + i, n);
        for (int k = 0; k < n; ++k) {
            const double v = wide(items[k]);
            sum += v * v;
        }
    });
    sum = row_reduce<Add>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Loshchilov & Hutter 2019, algorithm 2.   keep = 1 − lr·decay, rate = lr/(1 − β₁ᵗ),
// unbias = 1/√(1 − β₂ᵗ), new1 = 1 − β₁, new2 = 1 − β₂
// Moves weight, m and v both ways and grad once; if `rounded` is not null, writes the
// new weight there too: 28 bytes an item in mixed precision, which is the least.
template <class C, class G, class S>
__global__ void adamw(int64 size, C* weight, const G* grad, C* m, C* v, S* rounded,
                      C rate, C unbias, C beta1, C new1, C beta2, C new2, C eps, C keep,
                      C scale) {
    const int lanes = ITEMS<C>;
    const int phase = phase_of<lanes>(weight, grad, m, v, rounded);
    for_all<lanes>(size, phase, [&](int64 i, auto n) {
        const auto grads = load(grad + i, n);
        auto firsts = load(m + i, n), seconds = load(v + i, n);
        auto weights = load(weight + i, n);
        for (int k = 0; k < n; ++k) {
            const C g = wide(grads[k]) * scale;
            firsts[k] = firsts[k] * beta1 + new1 * g;
            seconds[k] = seconds[k] * beta2 + new2 * g * g;
            const C root = sqrt(seconds[k]) * unbias + eps;
            weights[k] = weights[k] * keep - rate * firsts[k] / root;
        }
        save(m + i, firsts);
        save(v + i, seconds);
        save(weight + i, weights);
        if (rounded) {
            Vector<S, n> narrow;
            for (int k = 0; k < n; ++k) put(narrow[k], weights[k]);
            save(rounded + i, narrow);
        }
    });
}
