// Rows of tokens on their way to experts and back.

// y[i] = x[index[i]]
template <class T>
__global__ void gather_rows(int width, int64 rows, const T* x, const int64* index,
                            T* y) {
    const int lanes = ITEMS<T>;
    const int64 number = own_row();
    if (number >= rows) return;
    const T* from = x + index[number] * width;
    y += number * width;
    for_row<lanes>(width, phase_of<lanes>(from, y),
                   [&](int i, auto n) { save(y + i, load(from + i, n)); });
}

// out[i] += Σ_k gates[i, k] · rows[places[i, k]], k after k; places from `count` on are
// skipped. gates may be null, for 1.   places, gates (tokens, choices)
template <class R, class C>
__global__ void combine_rows(int width, int64 tokens, const R* rows, int64 count,
                             const int64* places, const C* gates, int choices, C* out) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= tokens) return;
    places += number * choices;
    if (gates) gates += number * choices;
    out += number * width;
    const int phase = width % lanes ? -1 : phase_of<lanes>(out, rows);
    for_row<lanes>(width, phase, [&](int i, auto n) {
        auto sum = load(out + i, n);
        for (int choice = 0; choice < choices; ++choice) {
            if (places[choice] >= count) continue;
            const C gate = gates ? gates[choice] : C(1);
            const auto items = load(rows + places[choice] * width + i, n);
            for (int k = 0; k < n; ++k) sum[k] += gate * wide(items[k]);
        }
        save(out + i, sum);
    });
}

// drows[i] = gate·dy[token], dgate = Σ dy[token]·rows[i], of the gate (token, slot) of
// each row.
template <class D, class R, class C, class S>
__global__ void combine_bwd(int width, int64 count, const D* dy, const R* rows,
                            const int64* tokens, const int64* slots, const C* gates,
                            int choices, C* dgates, S* drows) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= count) return;
    const int64 token = tokens[number], at = token * choices + slots[number];
    const C gate = gates[at];
    dy += token * width, rows += number * width, drows += number * width;
    C sum = 0;
    for_row<lanes>(width, phase_of<lanes>(dy, rows, drows), [&](int i, auto n) {
        const auto d = load(dy + i, n);
        const auto items = load(rows + i, n);
        Vector<S, n> made;
        for (int k = 0; k < n; ++k) {
            sum += wide(d[k]) * wide(items[k]);
            put(made[k], gate * wide(d[k]));
        }
        save(drows + i, made);
    });
    sum = row_reduce<Add>(sum);
    if (threadIdx.x == 0) dgates[at] = sum;
}
