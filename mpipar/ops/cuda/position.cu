// Rotary positions, embedding rows and their gradients, dropout.

// Rotates pairs (x₁, x₂) → (x₁c − x₂s, x₂c + x₁s) in place; sign −1 turns back.
// x (b, s, n, 2·half) by the strides given; cos, sin (s, half). One block a token of
// n·half pairs.
template <class C>
__global__ void rope(int pairs, C* x, const C* cosine, const C* sine, int sequence,
                     int half, int64 of_batch, int64 of_place, int64 of_head, C sign) {
    const int place = blockIdx.x % sequence;
    x += blockIdx.x / sequence * of_batch + place * of_place;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int column = i % half;
        C* own = x + i / half * of_head + column;
        const C c = cosine[place * half + column];
        const C s = sign * sine[place * half + column];
        const C first = own[0], second = own[half];
        own[0] = first * c - second * s;
        own[half] = second * c + first * s;
    }
}

// y = table[id − first], 0 where an id is not among its rows. One block a token.
template <class W, class C>
__global__ void embedding_fwd(int width, const int64* ids, const W* table, C* y,
                              int64 first, int64 rows) {
    const int64 row = ids[blockIdx.x] - first;
    const bool inside = row >= 0 && row < rows;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        y[int64(blockIdx.x) * width + i] =
            inside ? wide(table[row * width + i]) : C(0);
}

// dtable[id − first] += dy. order sorts ids, equal ones in token order: the block of
// the first of equal ids adds them all up in that order.
template <class C, class W>
__global__ void embedding_bwd(int width, const C* dy, const int64* ids,
                              const int64* order, W* dtable, int64 first, int64 rows,
                              int64 tokens) {
    const int64 begin = blockIdx.x, id = ids[order[begin]], row = id - first;
    if (row < 0 || row >= rows) return;
    if (begin > 0 && ids[order[begin - 1]] == id) return;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        C sum = 0;
        for (int64 at = begin; at < tokens && ids[order[at]] == id; ++at)
            sum += dy[order[at] * width + i];
        put(dtable[row * width + i], wide(dtable[row * width + i]) + sum);
    }
}

// x += table[rows] for every sequence.   x (b, s, d), rows (s,). One block a token.
template <class C, class W>
__global__ void add_positions(int width, C* x, const W* table, const int64* rows,
                              int sequence) {
    const int64 row = rows[blockIdx.x % sequence];
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        x[int64(blockIdx.x) * width + i] += wide(table[row * width + i]);
}

// dtable[rows] += Σ_b dy; no row twice. One block a place.
template <class C, class W>
__global__ void positions_bwd(int width, const C* dy, const int64* rows, W* dtable,
                              int batch, int sequence) {
    W* own = dtable + rows[blockIdx.x] * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        C sum = 0;
        for (int64 b = 0; b < batch; ++b)
            sum += dy[(b * sequence + blockIdx.x) * width + i];
        put(own[i], wide(own[i]) + sum);
    }
}

// factor where an element is kept, 0 where it is dropped: Philox4x32-10 (Salmon et al.
// 2011). Element (r, j) takes word (start + j) % 4 of counter ((start + j) / 4, a[r],
// b[r], c[r]); it is kept where the upper 24 bits reach `limit`. A thread draws the
// words of a counter.   out (rows, width); size = rows · counters of a row
template <class C>
__global__ void dropout_factors(int64 size, const uint32* a, const uint32* b,
                                const uint32* c, C* out, int width, int64 start,
                                int64 groups, int64 key0, int64 key1, int64 limit,
                                C factor) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 at = int64(blockIdx.x) * blockDim.x + threadIdx.x; at < size;
         at += stride) {
        const int64 row = at / groups, counter = start / 4 + at % groups;
        uint32 word[4] = {uint32(counter), a[row], b[row], c[row]};
        philox(word, uint32(key0), uint32(key1));
        for (int i = 0; i < 4; ++i) {
            const int64 column = 4 * counter + i - start;
            if (column >= 0 && column < width)
                out[row * width + column] = (word[i] >> 8) >= limit ? factor : C(0);
        }
    }
}
