// Attention of 16-bit heads by tensor cores, with online softmax (Dao 2023), and its
// gradients. q (b, s, n, h) and k, v (b, t, g, h) by strides of sequences, places and
// heads; query head i reads head i / group. Query i sees keys [begin[i], end[i]); spans
// of sequence b lie b · span_step items on. A head is padded to H items. A block of four
// warps owns 64 rows, each warp 16 of them, and goes through tiles of other rows.
// Exponentials are of base 2. No sum depends on the order of blocks.

const int OWN = 64, TILE = 64, SHORT = 32, FLASH_THREADS = 128;
const float LOG2E = 1.44269504f, LN2 = 0.69314718f;

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

struct Least {
    template <class C> static __device__ C join(C a, C b) { return b < a ? b : a; }
};

// Of the spans of rows [first, first + OWN): keys that some see, and that all see.
struct Reach {
    int low, high, from, to;
    __device__ Reach(const int* begin, const int* end, int first, int s) {
        int least = 0x7fffffff, latest = 0, most = 0, soonest = 0x7fffffff;
        for (int row = first + threadIdx.x % 32; row < first + OWN; row += 32) {
            const bool there = row < s && begin[row] < end[row];
            const int own = there ? begin[row] : 0x7fffffff, last = there ? end[row] : 0;
            least = Least::join(least, own), latest = Max::join(latest, own);
            most = Max::join(most, last), soonest = Least::join(soonest, last);
        }
        low = warp_reduce<Least>(least), high = warp_reduce<Max>(most);
        from = warp_reduce<Max>(latest), to = warp_reduce<Least>(soonest);
    }
};

template <int N> __device__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
}

// Rows of a warp's sums, times two scales, at x or added to `onto`, whichever there is;
// row i lies i · step items on, `rows` of them.
template <int H, class S>
__device__ void write_rows(const float (&c)[H / 8][4], float scale0, float scale1, S* x,
                           float* onto, int64 step, int rows, int h) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < H / 8; ++n) {
        const int column = n * 8 + lane % 4 * 2;
        if (column >= h) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + half * 8;
            if (row >= rows) continue;
            const float scale = half ? scale1 : scale0;
            const float a = c[n][2 * half] * scale, b = c[n][2 * half + 1] * scale;
            if (x) *reinterpret_cast<uint32*>(x + row * step + column) = pair<S>(a, b);
            else onto[row * step + column] += a, onto[row * step + column + 1] += b;
        }
    }
}

// o = softmax(scale · q kᵀ + mask) v and its log-sum-exp; 0 and −∞ where no key is
// seen. o (b, s, n, h), as S or, added to zeros, as float; lse (b, n, s); grid (s / OWN,
// n, b); shared: (OWN + 2·TILE)·(H + 8) items of S.
template <class S, int H>
__global__ void __launch_bounds__(FLASH_THREADS)
    flash_fwd(int h, const S* q, const S* k, const S* v, S* o, float* part, float* lse,
              const int* begin, const int* end, int64 span_step, int s, int group,
              float scale, int64 qb, int64 qs, int64 qn, int64 kb, int64 ks, int64 kn,
              int64 vb, int64 vs, int64 vn, DRAWN(float)) {
    DYNAMIC_SHARED(S, queries);
    S *keys = queries + OWN * (H + 8), *values = keys + TILE * (H + 8);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Blocks with most keys first
    const int first = (gridDim.x - 1 - blockIdx.x) * OWN, own = first + warp * 16;
    const int head = blockIdx.y, n = gridDim.y;
    const int64 batch = blockIdx.z;
    DRAWS_OF(float, head, batch);
    begin += batch * span_step, end += batch * span_step;
    k += batch * kb + head / group * kn, v += batch * vb + head / group * vn;
    load_rows<H, OWN>(queries, q + batch * qb + head * qn, qs, first, s, h);
    const Reach reach(begin, end, first, s);
    int from[2], to[2];
    float peak[2], total[2] = {0, 0}, sum[H / 8][4], p[TILE / 8][4];
    for (int half = 0; half < 2; ++half) {
        const int row = own + lane / 4 + half * 8;
        from[half] = row < s ? begin[row] : 0, to[half] = row < s ? end[row] : 0;
        peak[half] = minus_infinity();
    }
    clear(sum);
    for (int at = reach.low; at < reach.high; at += TILE) {
        __syncthreads();  // until all have done with the tiles before
        load_rows<H, TILE>(keys, k, ks, at, reach.high, h);
        load_rows<H, TILE>(values, v, vs, at, reach.high, h);
        __syncthreads();
        clear(p);
        multiply_rows<H, TILE>(p, queries + warp * 16 * (H + 8), keys);
        const bool whole = at >= reach.from && at + TILE <= reach.to;
        float top[2] = {peak[0], peak[1]}, level[2];
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            const int key = at + i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
            float& score = p[i / 4][i % 4];
            const bool seen = whole || (key >= from[half] && key < to[half]);
            score = seen ? score * (scale * LOG2E) : minus_infinity();
            top[half] = Max::join(top[half], score);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            for (int lanes = 1; lanes < 4; lanes *= 2)
                top[half] = Max::join(
                    top[half], __shfl_xor_sync(0xffffffffu, top[half], lanes));
            // A query that has seen no key so far: exp(−∞ − 0) = 0
            level[half] = top[half] == minus_infinity() ? 0 : top[half];
            const float shrink = exp2f(peak[half] - level[half]);
            peak[half] = top[half], total[half] *= shrink;
#pragma unroll
            for (int i = 0; i < H / 8; ++i)
                sum[i][2 * half] *= shrink, sum[i][2 * half + 1] *= shrink;
        }
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            const int half = i / 2 % 2;
            float& one = p[i / 4][i % 4];
            one = exp2f(one - level[half]);
            total[half] += one;
            if (draws.some && one > 0)
                one *= draws.factor(own + lane / 4 + half * 8,
                                    at + i / 4 * 8 + lane % 4 * 2 + i % 2);
        }
        multiply_onto<H, TILE>(sum, p, values);
    }
    for (int half = 0; half < 2; ++half) {
        for (int lanes = 1; lanes < 4; lanes *= 2)
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], lanes);
        const int row = own + lane / 4 + half * 8;
        if (lane % 4 == 0 && row < s)
            lse[(batch * n + head) * s + row] =
                total[half] == 0 ? minus_infinity() : peak[half] * LN2 + logf(total[half]);
        total[half] = total[half] == 0 ? 0 : 1 / total[half];
    }
    const int64 place = ((batch * s + own) * n + head) * h;
    write_rows<H>(sum, total[0], total[1], o ? o + place : o, part ? part + place : part,
                  int64(n) * h, s - own, h);
}

// delta[row] = Σ do·o of the warp's 16 rows, from tiles; kept by the lanes of a row
template <int H, class S>
__device__ void row_products(float (&delta)[2], const S* dout, const S* o) {
    const int lane = threadIdx.x % 32;
    for (int half = 0; half < 2; ++half) {
        const int at = (lane / 4 + half * 8) * (H + 8);
        float sum = 0;
        for (int i = lane % 4; i < H; i += 4) sum += wide(dout[at + i]) * wide(o[at + i]);
        for (int lanes = 1; lanes < 4; lanes *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        delta[half] = sum;
    }
}

// dq = scale · dS k with dS = P∘(do vᵀ − D), D = Σ do·o, which is written to delta (b,
// n, s); as S, or added to a float array. do, o (b, s, n, h); `count` is how many keys a
// query sees anywhere. Grid as above; shared: (2·OWN + 2·SHORT)·(H + 8) items of S.
template <class S, int H>
__global__ void __launch_bounds__(FLASH_THREADS)
    flash_bwd_q(int h, const S* dout, const S* q, const S* k, const S* v, const S* o,
                const float* lse, float* delta, S* dq, float* onto, const int* begin,
                const int* end, const int* count, int64 span_step, int s, int group,
                float scale, int64 qb, int64 qs, int64 qn, int64 kb, int64 ks, int64 kn,
                int64 vb, int64 vs, int64 vn, int64 dqb, int64 dqs, int64 dqn,
                DRAWN(float)) {
    DYNAMIC_SHARED(S, queries);
    S *grads = queries + OWN * (H + 8), *keys = grads + OWN * (H + 8);
    S* values = keys + SHORT * (H + 8);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = (gridDim.x - 1 - blockIdx.x) * OWN, own = first + warp * 16;
    const int head = blockIdx.y, n = gridDim.y;
    const int64 batch = blockIdx.z, outputs = (batch * s * n + head) * h;
    DRAWS_OF(float, head, batch);
    begin += batch * span_step, end += batch * span_step, count += batch * span_step;
    k += batch * kb + head / group * kn, v += batch * vb + head / group * vn;
    load_rows<H, OWN>(grads, dout + outputs, int64(n) * h, first, s, h);
    load_rows<H, OWN>(queries, o + outputs, int64(n) * h, first, s, h);
    __syncthreads();
    float own_delta[2], level[2];
    row_products<H>(own_delta, grads + warp * 16 * (H + 8),
                    queries + warp * 16 * (H + 8));
    __syncthreads();  // until all have done with the outputs
    load_rows<H, OWN>(queries, q + batch * qb + head * qn, qs, first, s, h);
    const Reach reach(begin, end, first, s);
    int from[2], to[2];
    bool moves[2];
    for (int half = 0; half < 2; ++half) {
        const int row = own + lane / 4 + half * 8;
        const int64 place = (batch * n + head) * s + row;
        const bool there = row < s;
        from[half] = there ? begin[row] : 0, to[half] = there ? end[row] : 0;
        // The softmax of a query that sees one key is constant.
        moves[half] = there && count[row] != 1;
        level[half] = there ? lse[place] * LOG2E : 0;
        if (there && lane % 4 == 0) delta[place] = own_delta[half];
    }
    float sum[H / 8][4], p[SHORT / 8][4], ds[SHORT / 8][4];
    clear(sum);
    for (int at = reach.low; at < reach.high; at += SHORT) {
        __syncthreads();  // until all have done with the tiles before
        load_rows<H, SHORT>(keys, k, ks, at, reach.high, h);
        load_rows<H, SHORT>(values, v, vs, at, reach.high, h);
        __syncthreads();
        clear(p), clear(ds);
        multiply_rows<H, SHORT>(p, queries + warp * 16 * (H + 8), keys);
        multiply_rows<H, SHORT>(ds, grads + warp * 16 * (H + 8), values);
#pragma unroll
        for (int i = 0; i < SHORT / 2; ++i) {
            const int key = at + i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
            const bool seen = moves[half] && key >= from[half] && key < to[half];
            const float one = exp2f(p[i / 4][i % 4] * (scale * LOG2E) - level[half]);
            float& change = ds[i / 4][i % 4];
            if (draws.some && seen)
                change *= draws.factor(own + lane / 4 + half * 8, key);
            change = seen ? one * (change - own_delta[half]) : 0;
        }
        multiply_onto<H, SHORT>(sum, ds, keys);
    }
    const int64 place = batch * dqb + own * dqs + head * dqn;
    write_rows<H>(sum, scale, scale, dq ? dq + place : dq, onto ? onto + place : onto,
                  dqs, s - own, h);
}

// dk = scale · dSᵀ q and dv = Pᵀ do, over the query heads that read this head; as S, or
// added to float arrays. Queries [from[i], to[i]) of `s` see keys of the i-th OWN ones;
// of sequence b, b · reach_step items on. Grid (t / OWN, g, b); shared: (2·OWN +
// 2·SHORT)·(H + 8) items of S.
template <class S, int H>
__global__ void __launch_bounds__(FLASH_THREADS)
    flash_bwd_kv(int h, const S* dout, const S* q, const S* k, const S* v,
                 const float* lse, const float* delta, S* dk, S* dv, float* onto_k,
                 float* onto_v, const int* begin, const int* end, const int* count,
                 int64 span_step, const int* from, const int* to, int64 reach_step,
                 int s, int t, int group, float scale, int64 qb, int64 qs, int64 qn,
                 int64 kb, int64 ks, int64 kn, int64 vb, int64 vs, int64 vn, int64 dkb,
                 int64 dks, int64 dkn, int64 dvb, int64 dvs, int64 dvn,
                 DRAWN(float)) {
    DYNAMIC_SHARED(S, keys);
    __shared__ int first_key[SHORT], last_key[SHORT], moves[SHORT];
    __shared__ float level[SHORT], own_delta[SHORT];
    S *values = keys + OWN * (H + 8), *queries = values + OWN * (H + 8);
    S* grads = queries + SHORT * (H + 8);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * OWN, own = first + warp * 16;
    const int head = blockIdx.y, n = gridDim.y * group;
    const int64 batch = blockIdx.z;
    begin += batch * span_step, end += batch * span_step, count += batch * span_step;
    from += batch * reach_step + blockIdx.x, to += batch * reach_step + blockIdx.x;
    load_rows<H, OWN>(keys, k + batch * kb + head * kn, ks, first, t, h);
    load_rows<H, OWN>(values, v + batch * vb + head * vn, vs, first, t, h);
    float dkey[H / 8][4], dvalue[H / 8][4], p[SHORT / 8][4], ds[SHORT / 8][4];
    clear(dkey), clear(dvalue);
    for (int of = head * group; of < (head + 1) * group; ++of) {
        DRAWS_OF(float, of, batch);
        const int64 stats = (batch * n + of) * s;
        for (int at = *from; at < *to; at += SHORT) {
            __syncthreads();  // until all have done with the tiles before
            load_rows<H, SHORT>(queries, q + batch * qb + of * qn, qs, at, s, h);
            load_rows<H, SHORT>(grads, dout + (batch * s * n + of) * h, int64(n) * h,
                                at, s, h);
            if (threadIdx.x < SHORT) {
                const int row = at + threadIdx.x;
                const bool there = row < s;
                first_key[threadIdx.x] = there ? begin[row] : 0;
                last_key[threadIdx.x] = there ? end[row] : 0;
                moves[threadIdx.x] = there && count[row] != 1;
                level[threadIdx.x] = there ? lse[stats + row] * LOG2E : 0;
                own_delta[threadIdx.x] = there ? delta[stats + row] : 0;
            }
            __syncthreads();
            clear(p), clear(ds);
            multiply_rows<H, SHORT>(p, keys + warp * 16 * (H + 8), queries);
            multiply_rows<H, SHORT>(ds, values + warp * 16 * (H + 8), grads);
#pragma unroll
            for (int i = 0; i < SHORT / 2; ++i) {
                const int key = own + lane / 4 + i / 2 % 2 * 8;
                const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
                const bool seen = key >= first_key[row] && key < last_key[row];
                float &one = p[i / 4][i % 4], &change = ds[i / 4][i % 4];
                one = seen ? exp2f(one * (scale * LOG2E) - level[row]) : 0;
                const float factor =
                    draws.some && seen ? draws.factor(at + row, key) : 1.0f;
                change = moves[row] ? one * (change * factor - own_delta[row]) : 0;
                one *= factor;
            }
            multiply_onto<H, SHORT>(dkey, ds, queries);
            multiply_onto<H, SHORT>(dvalue, p, grads);
        }
    }
    const int64 key = batch * dkb + own * dks + head * dkn;
    const int64 value = batch * dvb + own * dvs + head * dvn;
    write_rows<H>(dkey, scale, scale, dk ? dk + key : dk, onto_k ? onto_k + key : onto_k,
                  dks, t - own, h);
    write_rows<H>(dvalue, 1.0f, 1.0f, dv ? dv + value : dv,
                  onto_v ? onto_v + value : onto_v, dvs, t - own, h);
}
