// Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011).

__device__ inline void philox(uint32 (&word)[4], uint32 key0, uint32 key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64 p0 = uint64(word[0]) * 0xD2511F53u;
        const uint64 p1 = uint64(word[2]) * 0xCD9E8D57u;
        word[0] = uint32(p1 >> 32) ^ word[1] ^ key0;
        word[2] = uint32(p0 >> 32) ^ word[3] ^ key1;
        word[1] = uint32(p1);
        word[3] = uint32(p0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// Which probabilities of a head and a sequence are dropped. Query i and key j take word
// columns[j] % 4 of counter (columns[j] / 4, rows[i], sample, step), with their global
// positions in rows and columns; dropped where its upper 24 bits stay below the limit.
template <class C> struct Draws {
    bool some;  // false: none is dropped
    uint32 key0, key1, sample, step, limit;
    const uint32 *rows, *columns;
    C kept;

    // keys (n, 2), null where nothing is dropped; samples (b,)
    __device__ Draws(const uint32* keys, const int64* samples, const uint32* rows,
                     const uint32* columns, uint32 step, uint32 limit, C kept, int head,
                     int64 sequence)
        : some(keys != nullptr), key0(0), key1(0), sample(0), step(step), limit(limit),
          rows(rows), columns(columns), kept(kept) {
        if (!some) return;
        key0 = keys[2 * head], key1 = keys[2 * head + 1];
        sample = uint32(samples[sequence]);
    }

    __device__ C factor(int row, int column) const {
        const uint32 place = columns[column];
        uint32 word[4] = {place / 4, rows[row], sample, step};
        philox(word, key0, key1);
        const uint32 drawn = place % 4 == 0   ? word[0]
                             : place % 4 == 1 ? word[1]
                             : place % 4 == 2 ? word[2]
                                              : word[3];
        return (drawn >> 8) >= limit ? kept : C(0);
    }
};

// What a kernel is given for draws, and those of a head and a sequence
#define DRAWN(C)                                                                    \
    const uint32 *draw_keys, const int64 *draw_samples, const uint32 *draw_rows,    \
        const uint32 *draw_columns, uint32 draw_step, uint32 draw_limit, C draw_kept
#define DRAWS_OF(C, head, sequence)                                                 \
    const Draws<C> draws(draw_keys, draw_samples, draw_rows, draw_columns, draw_step, \
                         draw_limit, draw_kept, head, sequence)
