// Rows of an embedding, and its gradient.

// y = table[id − first], 0 where an id is not among its rows. A row is a token.
template <class W, class C>
__global__ void embedding_fwd(int width, int64 tokens, const int64* ids,
                              const W* table, C* y, int64 first, int64 rows) {
    const int lanes = ITEMS<C>;
    const int64 number = own_row();
    if (number >= tokens) return;
    const int64 row = ids[number] - first;
    const bool inside = row >= 0 && row < rows;
    const W* from = inside ? table + row * width : nullptr;
    y += number * width;
    for_row<lanes>(width, phase_of<lanes>(y, from), [&](int i, auto n) {
        Vector<C, n> made = {};
        if (inside) {
            const auto items = load(from + i, n);
            for (int k = 0; k < n; ++k) made[k] = wide(items[k]);
        }
        save(y + i, made);
    });
}

// --- gradient of an embedding: tokens sorted by their rows, then sums of equal ones --
//
// Counting sort: chunks of tokens count the rows that they have; a token's place is
// where its row begins, behind the same rows of earlier chunks and of its own chunk. So
// equal rows stay in token order, whatever the order of threads. Tokens whose row is
// not held here get no place.

__device__ inline int own_place(int64 id, int64 first, int rows) {
    const int64 row = id - first;
    return row >= 0 && row < rows ? int(row) : -1;
}

// counts (gridDim.x, rows), zero before: tokens of each chunk with a row
__global__ void count_rows(int tokens, const int64* ids, int64 first, int rows,
                           int chunk, int* counts) {
    const int low = blockIdx.x * chunk, high = min(low + chunk, tokens);
    for (int i = low + threadIdx.x; i < high; i += blockDim.x) {
        const int row = own_place(ids[i], first, rows);
        if (row >= 0) atomicAdd(counts + int64(blockIdx.x) * rows + row, 1);
    }
}

// counts ← those of earlier chunks; begins[row] = those of all chunks
__global__ void sum_counts(int64 rows, int chunks, int* counts, int* begins) {
    for_all<1>(rows, -1, [&](int64 row, auto) {
        int before = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int own = counts[chunk * rows + row];
            counts[chunk * rows + row] = before;
            before += own;
        }
        begins[row] = before;
    });
}

// begins ← tokens of earlier rows; begins[rows] = all.   One block of 1024 threads
__global__ void __launch_bounds__(1024) place_rows(int rows, int* begins) {
    __shared__ int sums[1024];
    const int each = (rows + blockDim.x - 1) / blockDim.x;
    const int low = min(int(threadIdx.x) * each, rows), high = min(low + each, rows);
    int sum = 0;
    for (int row = low; row < high; ++row) sum += begins[row];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 1; step < blockDim.x; step *= 2) {
        const int before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    int before = sums[threadIdx.x] - sum;
    for (int row = low; row < high; ++row) {
        const int own = begins[row];
        begins[row] = before;
        before += own;
    }
    if (threadIdx.x == blockDim.x - 1) begins[rows] = sums[threadIdx.x];
}

// order (tokens,): tokens by row;  keys: their rows
__global__ void sort_tokens(int tokens, const int64* ids, int64 first, int rows,
                            int chunk, const int* counts, const int* begins,
                            int* order, int* keys) {
    __shared__ int tile[256];
    const int low = blockIdx.x * chunk, high = min(low + chunk, tokens);
    for (int at = low; at < high; at += blockDim.x) {
        const int token = at + threadIdx.x;
        const int row = token < high ? own_place(ids[token], first, rows) : -1;
        int before = 0;
        for (int from = low; from <= at; from += blockDim.x) {
            __syncthreads();  // until all have read the tile before
            const int other = from + threadIdx.x;
            tile[threadIdx.x] = other < high ? own_place(ids[other], first, rows) : -1;
            __syncthreads();
            const int last = from < at ? blockDim.x : threadIdx.x;
            for (int i = 0; i < last; ++i) before += tile[i] == row;
        }
        if (row >= 0) {
            const int place =
                begins[row] + counts[int64(blockIdx.x) * rows + row] + before;
            order[place] = token;
            keys[place] = row;
        }
    }
}

// Sums of equal rows within 64 sorted tokens. A sum that is whole goes to dtable; one
// that goes on in a neighbouring block waits in parts (2·gridDim.x, width): 2·block for
// the first row of the block, else 2·block + 1.
const int SORTED = 64;
template <class C, class W>
__global__ void embedding_sums(int width, const C* dy, const int* order,
                               const int* keys, const int* count, W* dtable,
                               C* parts) {
    const int lanes = ITEMS<C>;
    const int all = *count, low = blockIdx.x * SORTED, high = min(low + SORTED, all);
    if (low >= all) return;
    __shared__ int token[SORTED], key[SORTED + 2];
    for (int i = threadIdx.x; i < SORTED + 2; i += blockDim.x)
        key[i] = low + i > 0 && low + i <= all ? keys[low + i - 1] : -1;
    for (int i = threadIdx.x; i < high - low; i += blockDim.x)
        token[i] = order[low + i];
    __syncthreads();
    const int phase = width % lanes ? -1 : phase_of<lanes>(dy, dtable, parts);
    for_row<lanes>(width, phase, [&](int i, auto n) {
        Vector<C, n> sum = {};
        int begin = 0;
        for (int at = 0; at < high - low; ++at) {
            const auto items = load(dy + int64(token[at]) * width + i, n);
            for (int k = 0; k < n; ++k) sum[k] += items[k];
            const int row = key[at + 1];
            const bool goes_on = row == key[at + 2];
            if (goes_on && at + 1 < high - low) continue;
            if (goes_on || (begin == 0 && key[0] == row)) {
                save(parts + (2 * int64(blockIdx.x) + (begin > 0)) * width + i, sum);
            } else {
                W* own = dtable + int64(row) * width + i;
                auto grad = load(own, n);
                for (int k = 0; k < n; ++k) put(grad[k], wide(grad[k]) + sum[k]);
                save(own, grad);
            }
            sum = {};
            begin = at + 1;
        }
    });
}

// dtable += the sums of rows that go on from one block to the next, by the block in
// which they begin.
template <class C, class W>
__global__ void embedding_joins(int width, const int* keys, const int* count,
                                const C* parts, W* dtable) {
    const int lanes = ITEMS<C>;
    const int all = *count, low = blockIdx.x * SORTED, next = low + SORTED;
    if (next >= all || keys[next - 1] != keys[next]) return;
    const int row = keys[next];
    const bool is_first = keys[low] == row;
    if (is_first && low > 0 && keys[low - 1] == row) return;
    int last = next;  // first block that begins with another row
    while (last < all && keys[last] == row) last += SORTED;
    const int phase = width % lanes ? -1 : phase_of<lanes>(dtable, parts);
    for_row<lanes>(width, phase, [&](int i, auto n) {
        const C* from = parts + i + (2 * int64(blockIdx.x) + !is_first) * width;
        auto sum = load(from, n);
        for (int at = next; at < last; at += SORTED) {
            const auto more = load(parts + i + 2 * int64(at / SORTED) * width, n);
            for (int k = 0; k < n; ++k) sum[k] += more[k];
        }
        W* own = dtable + int64(row) * width + i;
        auto grad = load(own, n);
        for (int k = 0; k < n; ++k) put(grad[k], wide(grad[k]) + sum[k]);
        save(own, grad);
    });
}
