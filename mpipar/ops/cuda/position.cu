// Rotary positions, rows of positions, dropout.

// Rotates pairs (x₁, x₂) → (x₁c − x₂s, x₂c + x₁s) in place; sign −1 turns back.
// x (b, s, n, 2·half) by the strides given; cos, sin (s, half). A row is a token of
// n·half pairs.
template <class X, class C>
__global__ void rope(int pairs, int64 rows, X* x, const C* cosine, const C* sine,
                     int sequence, int half, int64 of_batch, int64 of_place,
                     int64 of_head, C sign) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= rows) return;
    const int place = number % sequence;
    x += number / sequence * of_batch + place * of_place;
    cosine += place * half, sine += place * half;
    // Vectors are of one head: where halves and heads are whole numbers of them.
    const bool even = half % lanes == 0 && of_head % lanes == 0;
    const int phase = even && phase_of<lanes>(x, cosine, sine) == 0 ? 0 : -1;
    for_row<lanes>(pairs, phase, [&](int i, auto n) {
        const int column = i % half;
        X* own = x + i / half * of_head + column;
        const auto c = load(cosine + column, n), s = load(sine + column, n);
        auto first = load(own, n), second = load(own + half, n);
        for (int k = 0; k < n; ++k) {
            const C a = wide(first[k]), b = wide(second[k]);
            put(first[k], a * c[k] - b * (sign * s[k]));
            put(second[k], b * c[k] + a * (sign * s[k]));
        }
        save(own, first);
        save(own + half, second);
    });
}

// x += table[rows] for every sequence.   x (b, s, d), rows (s,). A row is a token.
template <class C, class W>
__global__ void add_positions(int width, int64 tokens, C* x, const W* table,
                              const int64* rows, int sequence) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= tokens) return;
    const W* from = table + rows[number % sequence] * width;
    x += number * width;
    for_row<lanes>(width, phase_of<lanes>(x, from), [&](int i, auto n) {
        auto sum = load(x + i, n);
        const auto items = load(from + i, n);
        for (int k = 0; k < n; ++k) sum[k] += wide(items[k]);
        save(x + i, sum);
    });
}

// dtable[rows] += Σ_b dy; no row twice. A row is a place.
template <class C, class W>
__global__ void positions_bwd(int width, int64 sequence, const C* dy,
                              const int64* rows, W* dtable, int batch) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= sequence) return;
    W* own = dtable + rows[number] * width;
    const int phase = width % lanes ? -1 : phase_of<lanes>(dy, own);
    for_row<lanes>(width, phase, [&](int i, auto n) {
        Vector<C, n> sum = {};
        for (int64 b = 0; b < batch; ++b) {
            const auto items = load(dy + (b * sequence + number) * width + i, n);
            for (int k = 0; k < n; ++k) sum[k] += items[k];
        }
        auto grad = load(own + i, n);
        for (int k = 0; k < n; ++k) put(grad[k], wide(grad[k]) + sum[k]);
        save(own + i, grad);
    });
}

// --- dropout ------------------------------------------------------------------------

// factor where an element is kept, 0 where it is dropped: element (r, j) takes word
// (start + j) % 4 of counter ((start + j) / 4, a[r], b[r], c[r]); it is kept where the
// upper 24 bits reach `limit`. A thread draws the words of a counter.
// out (rows, width); size = rows · counters of a row
template <class C>
__global__ void dropout_factors(int64 size, const uint32* a, const uint32* b,
                                const uint32* c, C* out, int width, int64 start,
                                int64 groups, int64 key0, int64 key1, int64 limit,
                                C factor) {
    for_all<1>(size, -1, [&](int64 at, auto) {
        const int64 row = at / groups, counter = start / 4 + at % groups;
        uint32 word[4] = {uint32(counter), a[row], b[row], c[row]};
        philox(word, uint32(key0), uint32(key1));
        for (int i = 0; i < 4; ++i) {
            const int64 column = 4 * counter + i - start;
            if (column >= 0 && column < width)
                out[row * width + column] = (word[i] >> 8) >= limit ? factor : C(0);
        }
    });
}

// y = x·m + onto with these factors m for row counters (positions[s], samples[b],
// number); y may be x, onto may be null.   x (b, s, width). A row is a token.
// Moves x, onto and y once.
template <class C>
__global__ void dropout(int width, int64 rows, const C* x, const C* onto, C* y,
                        const int64* positions, const int64* samples, int sequence,
                        int64 number, int64 key0, int64 key1, int64 limit, C factor) {
    const int64 row = own_row();
    if (row >= rows) return;
    const uint32 place = uint32(positions[row % sequence]);
    const uint32 sample = uint32(samples[row / sequence]);
    x += row * width, y += row * width;
    if (onto) onto += row * width;
    const bool even = phase_of<4>(x, y, onto) == 0;
    for (int i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) {
        uint32 word[4] = {uint32(i / 4), place, sample, uint32(number)};
        philox(word, uint32(key0), uint32(key1));
        if (even && i + 4 <= width) {
            auto items = load(x + i, Count<4>());
            for (int k = 0; k < 4; ++k)
                items[k] *= (word[k] >> 8) >= limit ? factor : C(0);
            if (onto) {
                const auto more = load(onto + i, Count<4>());
                for (int k = 0; k < 4; ++k) items[k] += more[k];
            }
            save(y + i, items);
        } else {
            for (int k = 0; k < 4; ++k)
                if (i + k < width) {
                    const C m = (word[k] >> 8) >= limit ? factor : C(0);
                    y[i + k] = onto ? x[i + k] * m + onto[i + k] : x[i + k] * m;
                }
        }
    }
}
