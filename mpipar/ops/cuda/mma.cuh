// Products of 16-bit tiles by tensor cores (sm_80 and later), sums in float. A tile of
// width H lies in shared memory, its rows H + 8 items apart: so eight rows that are read
// at once lie in different banks.
//
// Lane l of a warp holds of a 16 × 8 matrix of sums the items 2·(l % 4) and the next
// one of rows l / 4 (places 0, 1) and l / 4 + 8 (places 2, 3).

struct alignas(16) Pack { uint32 words[4]; };  // eight items, moved at once

template <class S> __device__ uint32 pair(float low, float high) {
    S a, b;
    put(a, low), put(b, high);
    return uint32(a.bits) | uint32(b.bits) << 16;
}

#ifdef __CUDA_ARCH__
__device__ inline uint32 shared_address(const void* at) {
    uint32 address;
    asm("{ .reg .u64 at; cvta.to.shared.u64 at, %1; cvt.u32.u64 %0, at; }"
        : "=r"(address) : "l"(at));
    return address;
}

// Four 8 × 8 matrices; lane l gives the address of row l % 8 of the (l / 8)-th.
__device__ inline void load_matrices(uint32 (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)) : "memory");
}
__device__ inline void load_transposed(uint32 (&m)[4], const void* row) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
        : "r"(shared_address(row)) : "memory");
}

// c (16, 8) += a (16, 16) b (16, 8)
#define MULTIPLY(type)                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "    \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ inline void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0,
                                uint32 b1, bf16) {
    MULTIPLY("bf16");
}
__device__ inline void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0,
                                uint32 b1, fp16) {
    MULTIPLY("f16");
}
#else
#include "mma.h"  // tests on a CPU
#endif

// tile[row] = x[first + row], 0 from row `last` and from column h on; h a multiple of 8
template <int H, int ROWS, class S>
__device__ void load_rows(S* tile, const S* x, int64 step, int first, int last, int h) {
    const int packs = H / 8;
    for (int i = threadIdx.x; i < ROWS * packs; i += blockDim.x) {
        const int row = i / packs, column = i % packs * 8;
        Pack items = {{0, 0, 0, 0}};
        if (first + row < last && column < h)
            items = *reinterpret_cast<const Pack*>(x + (first + row) * step + column);
        *reinterpret_cast<Pack*>(tile + row * (H + 8) + column) = items;
    }
}

// c (16, N) += a bᵀ of 16 and N rows of tiles
template <int H, int N, class S>
__device__ void multiply_rows(float (&c)[N / 8][4], const S* a, const S* b) {
    const int lane = threadIdx.x % 32;
    a += lane % 16 * (H + 8) + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * (H + 8) + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < H; k += 16) {
        uint32 left[4], right[4];
        load_matrices(left, a + k);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            load_matrices(right, b + n * (H + 8) + k);
            multiply(c[n / 8], left, right[0], right[1], S());
            multiply(c[n / 8 + 1], left, right[2], right[3], S());
        }
    }
}

// c (16, H) += a b of sums a (16, N), rounded, and N rows of a tile
template <int H, int N, class S>
__device__ void multiply_onto(float (&c)[H / 8][4], const float (&a)[N / 8][4],
                              const S* b) {
    const int lane = threadIdx.x % 32;
    b += lane % 16 * (H + 8) + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        const float(&low)[4] = a[k / 8], (&high)[4] = a[k / 8 + 1];
        const uint32 left[4] = {pair<S>(low[0], low[1]), pair<S>(low[2], low[3]),
                                pair<S>(high[0], high[1]), pair<S>(high[2], high[3])};
        uint32 right[4];
#pragma unroll
        for (int n = 0; n < H; n += 16) {
            load_transposed(right, b + k * (H + 8) + n);
            multiply(c[n / 8], left, right[0], right[1], S());
            multiply(c[n / 8 + 1], left, right[2], right[3], S());
        }
    }
}
