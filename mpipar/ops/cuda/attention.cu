// Attention by tiles of keys with online softmax (Dao et al. 2022), and its gradients.
// q (b, s, n, h) and k, v (b, t, g, h) by strides of sequences, places and heads; query
// head i reads head i / group. Query i sees keys [begin[i], end[i]); spans of sequence
// b lie b · span_step items on. A warp works on one row, a lane on one of 32 others.

// Rows of a block, one a warp; rows of a tile; keys whose queries are known together
const int ROWS = 8, LANES = 32, REACHED = 64;

// tile[row] = x[first + row], 0 from `last` on; rows of h items lie h + 1 apart.
template <class C>
__device__ void load_tile(C* tile, const C* x, int64 first, int64 last, int64 step,
                          int h) {
    for (int i = threadIdx.x; i < LANES * h; i += blockDim.x) {
        const int64 row = first + i / h;
        tile[i / h * (h + 1) + i % h] = row < last ? x[row * step + i % h] : C(0);
    }
}

template <class C> __device__ C dot(const C* a, const C* b, int h) {
    C sum = 0;
    for (int i = 0; i < h; ++i) sum += a[i] * b[i];
    return sum;
}

// sum += Σ over lanes of their weight times their row of the tile.
template <class C>
__device__ void add_weighted(C* sum, C weight, const C* tile, int h) {
    const int lane = threadIdx.x % LANES;
    for (int j = 0; j < LANES; ++j) {
        const C own = __shfl_sync(0xffffffffu, weight, j);
        for (int i = lane; i < h; i += LANES) sum[i] += own * tile[j * (h + 1) + i];
    }
}

// The keys that any query of [first, first + ROWS) sees lie in [low, high).
__device__ inline void reach(const int* begin, const int* end, int first, int s,
                             int64& low, int64& high) {
    low = high = 0;
    for (int row = first; row < s && row < first + ROWS; ++row) {
        if (begin[row] >= end[row]) continue;
        if (high == 0 || begin[row] < low) low = begin[row];
        if (end[row] > high) high = end[row];
    }
}

// o = softmax(scale · q kᵀ + mask) v and its log-sum-exp; 0 and −∞ where no key is
// seen. o (b, s, n, h), lse (b, n, s); grid (s / ROWS, n, b); shared: 2·LANES·(h + 1) +
// 2·ROWS·h items.
template <class C, class O>
__global__ void attention_fwd(int h, const C* q, const C* k, const C* v, O* o, C* lse,
                              const int* begin, const int* end, int64 span_step,
                              int s, int group, C scale, int64 qb, int64 qs, int64 qn,
                              int64 kb, int64 ks, int64 kn, int64 vb, int64 vs,
                              int64 vn, DRAWN(C)) {
    DYNAMIC_SHARED(C, keys);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int first = blockIdx.x * ROWS, row = first + warp;
    const int head = blockIdx.y, n = gridDim.y;
    const int64 batch = blockIdx.z;
    C* values = keys + LANES * (h + 1);
    C *query = values + LANES * (h + 1) + warp * 2 * h, *sum = query + h;
    begin += batch * span_step, end += batch * span_step;
    k += batch * kb + head / group * kn, v += batch * vb + head / group * vn;
    const bool there = row < s;
    DRAWS_OF(C, head, batch);
    for (int i = lane; i < h; i += LANES) {
        query[i] = there ? q[batch * qb + row * qs + head * qn + i] * scale : C(0);
        sum[i] = 0;
    }
    int64 low, high;
    reach(begin, end, first, s, low, high);
    const C lowest = C(-3e38);
    C peak = lowest, total = 0;
    for (int64 at = low; at < high; at += LANES) {
        __syncthreads();  // until all have done with the tiles before
        load_tile(keys, k, at, high, ks, h);
        load_tile(values, v, at, high, vs, h);
        __syncthreads();
        const int64 key = at + lane;
        const bool seen = there && key >= begin[row] && key < end[row];
        const C score = seen ? dot(query, keys + lane * (h + 1), h) : lowest;
        const C level = Max::join(peak, warp_reduce<Max>(score));
        const C p = seen ? exp(score - level) : C(0), shrink = exp(peak - level);
        for (int i = lane; i < h; i += LANES) sum[i] *= shrink;
        add_weighted(sum, draws.some && seen ? p * draws.factor(row, key) : p, values,
                     h);
        total = total * shrink + warp_reduce<Add>(p);
        peak = level;
    }
    if (!there) return;
    const C share = total > 0 ? 1 / total : C(0);
    for (int i = lane; i < h; i += LANES)
        put(o[((batch * s + row) * n + head) * h + i], sum[i] * share);
    if (lane == 0)
        lse[(batch * n + head) * s + row] = total > 0 ? peak + log(total) : log(total);
}

// dq += scale · dS k with dS = P∘(do vᵀ − D), D = Σ do·o, which is written to delta (b,
// n, s). do, o (b, s, n, h); `count` is how many keys a query sees anywhere. Grid as
// above; shared: 2·LANES·(h + 1) + 3·ROWS·h items.
template <class C, class O>
__global__ void attention_bwd_q(int h, const C* dout, const C* q, const C* k,
                                const C* v, const O* o, const C* lse, C* delta, C* dq,
                                const int* begin, const int* end,
                                const int* count, int64 span_step, int s, int group,
                                C scale, int64 qb, int64 qs, int64 qn, int64 kb,
                                int64 ks, int64 kn, int64 vb, int64 vs, int64 vn,
                                int64 dqb, int64 dqs, int64 dqn, DRAWN(C)) {
    DYNAMIC_SHARED(C, keys);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int first = blockIdx.x * ROWS, row = first + warp;
    const int head = blockIdx.y, n = gridDim.y;
    const int64 batch = blockIdx.z;
    C* values = keys + LANES * (h + 1);
    C* query = values + LANES * (h + 1) + warp * 3 * h;
    C *grad = query + h, *sum = grad + h;
    begin += batch * span_step, end += batch * span_step, count += batch * span_step;
    k += batch * kb + head / group * kn, v += batch * vb + head / group * vn;
    const bool there = row < s;
    DRAWS_OF(C, head, batch);
    C own = 0;
    for (int i = lane; i < h; i += LANES) {
        const int64 at = ((batch * s + row) * n + head) * h + i;
        query[i] = there ? q[batch * qb + row * qs + head * qn + i] * scale : C(0);
        grad[i] = there ? dout[at] : C(0);
        sum[i] = 0;
        if (there) own += grad[i] * wide(o[at]);
    }
    own = warp_reduce<Add>(own);
    const int64 place = (batch * n + head) * s + row;
    if (there && lane == 0) delta[place] = own;
    int64 low, high;
    reach(begin, end, first, s, low, high);
    for (int64 at = low; at < high; at += LANES) {
        __syncthreads();  // until all have done with the tiles before
        load_tile(keys, k, at, high, ks, h);
        load_tile(values, v, at, high, vs, h);
        __syncthreads();
        const int64 key = at + lane;
        // The softmax of a query that sees one key is constant.
        const bool moves = there && key >= begin[row] && key < end[row] &&
                           count[row] != 1;
        C ds = 0;
        if (moves) {
            const C kept = draws.some ? draws.factor(row, key) : C(1);
            ds = exp(dot(query, keys + lane * (h + 1), h) - lse[place]) *
                 (kept * dot(grad, values + lane * (h + 1), h) - own);
        }
        add_weighted(sum, ds, keys, h);
    }
    if (!there) return;
    for (int i = lane; i < h; i += LANES)
        dq[batch * dqb + row * dqs + head * dqn + i] += scale * sum[i];
}

// dk += scale · dSᵀ q and dv += Pᵀ do, over the query heads that read this head; the
// queries that see these keys are `key_reach`'s. Grid (t / ROWS, g, b); shared:
// 2·LANES·(h + 1) + 4·ROWS·h items.
template <class C>
__global__ void attention_bwd_kv(int h, const C* dout, const C* q, const C* k,
                                 const C* v, const C* lse, const C* delta, C* dk, C* dv,
                                 const int* begin, const int* end,
                                 const int* count, int64 span_step, const int* from,
                                 const int* to, int64 reach_step, int s, int t,
                                 int group, C scale, int64 qb, int64 qs, int64 qn,
                                 int64 kb, int64 ks, int64 kn, int64 vb, int64 vs,
                                 int64 vn, int64 dkb, int64 dks, int64 dkn, int64 dvb,
                                 int64 dvs, int64 dvn, DRAWN(C)) {
    DYNAMIC_SHARED(C, queries);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int key = blockIdx.x * ROWS + warp, head = blockIdx.y;
    const int n = gridDim.y * group;
    const int64 batch = blockIdx.z;
    C* grads = queries + LANES * (h + 1);
    C *own = grads + LANES * (h + 1) + warp * 4 * h, *value = own + h;
    C *dkey = value + h, *dvalue = dkey + h;
    begin += batch * span_step, end += batch * span_step, count += batch * span_step;
    const int64 reached = batch * reach_step + blockIdx.x * ROWS / REACHED;
    const bool there = key < t;
    for (int i = lane; i < h; i += LANES) {
        own[i] = there ? k[batch * kb + key * ks + head * kn + i] * scale : C(0);
        value[i] = there ? v[batch * vb + key * vs + head * vn + i] : C(0);
        dkey[i] = dvalue[i] = 0;
    }
    for (int of = head * group; of < (head + 1) * group; ++of) {
        DRAWS_OF(C, of, batch);
        for (int at = from[reached]; at < to[reached]; at += LANES) {
            __syncthreads();  // until all have done with the tiles before
            load_tile(queries, q + batch * qb + of * qn, at, s, qs, h);
            load_tile(grads, dout + (batch * s * n + of) * h, at, s, int64(n) * h, h);
            __syncthreads();
            const int row = at + lane;
            const bool seen = there && row < s && key >= begin[row] && key < end[row];
            const int64 place = (batch * n + of) * s + row;
            C p = 0, ds = 0;
            if (seen) {
                p = exp(dot(own, queries + lane * (h + 1), h) - lse[place]);
                const C kept = draws.some ? draws.factor(row, key) : C(1);
                if (count[row] != 1)
                    ds = p * (kept * dot(value, grads + lane * (h + 1), h) -
                              delta[place]);
                p *= kept;
            }
            add_weighted(dkey, ds, queries, h);
            add_weighted(dvalue, p, grads, h);
        }
    }
    if (!there) return;
    for (int i = lane; i < h; i += LANES) {
        dk[batch * dkb + key * dks + head * dkn + i] += scale * dkey[i];
        dv[batch * dvb + key * dvs + head * dvn + i] += dvalue[i];
    }
}

// Queries [first, last) see any of each KEYS keys; 0 and 0 where none does. begin, end
// (b or 1, s), first, last (b or 1, tiles); grid (tiles, b or 1).
template <int KEYS>
__global__ void key_reach(int s, const int* begin, const int* end, int* first,
                          int* last) {
    const int low = blockIdx.x * KEYS, high = low + KEYS;
    begin += int64(blockIdx.y) * s, end += int64(blockIdx.y) * s;
    int least = s, most = 0;
    for (int row = threadIdx.x; row < s; row += blockDim.x) {
        if (begin[row] >= high || end[row] <= low || begin[row] >= end[row]) continue;
        if (row < least) least = row;
        most = row + 1;
    }
    least = -row_reduce<Max>(-least), most = row_reduce<Max>(most);
    if (threadIdx.x > 0) return;
    first[int64(blockIdx.y) * gridDim.x + blockIdx.x] = most > 0 ? least : 0;
    last[int64(blockIdx.y) * gridDim.x + blockIdx.x] = most;
}

// o, lse ← attention over the keys of both; part, level are those of others. Where
// neither saw a key, o stays 0 and lse −∞. A row is a place and head of o.
template <class C>
__global__ void attention_merge(int h, int64 rows, C* o, C* lse, const C* part,
                                const C* level, int s, int n) {
    const int64 at = own_row(), row = at / n;
    if (at >= rows) return;
    const int64 place = (row / s * n + at % n) * s + row % s;
    const C a = lse[place], b = level[place], most = Max::join(a, b);
    const C top = most < C(-3e38) ? C(0) : most;
    const C mine = exp(a - top), other = exp(b - top), total = mine + other;
    const C share = total == 0 ? C(0) : 1 / total;
    row_wait();  // until all have read lse
    for (int i = threadIdx.x; i < h; i += blockDim.x) {
        const int64 item = at * h + i;
        o[item] = o[item] * (mine * share) + part[item] * (other * share);
    }
    if (threadIdx.x == 0) lse[place] = top + log(total);
}
